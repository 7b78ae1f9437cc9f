"""Report of a plan as text for a terminal: degrees, batch, memory, compute, sources."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from neox.architecture import BLOCKS, Architecture, block_kinds
from neox.config.neox_config import NeoXConfig
from neox.devices import GPUS
from neox.features.on_paper import PAPERS
from neox.plan.devices.device import GIB, Device, gib, gpu_device, memory_on
from neox.plan.devices.fast_paths import path_choices, path_lines
from neox.plan.memory.checkpoint_size import checkpoint_bytes, kept_checkpoints
from neox.plan.memory.inference import inference_bytes
from neox.plan.network.parameter_groups import group_lines
from neox.plan.ranks.stages import StagePlan
from neox.plan.report.as_json import count, plain, stage_contents
from neox.plan.report.data_lines import data_lines, fim_lines, preference_lines, validation_lines
from neox.plan.report.defaults import all_defaults, notable_defaults
from neox.plan.report.run_totals import RunTotals, imbalance, memory_with, run_totals, stage_ranks
from neox.plan.report.value_sources import all_values, derived_values
from neox.plan.run_identity import starting_weights
from neox.plan.run_plan import RunPlan
from neox.plan.run_start import requested_start
from neox.plan.schedule import schedule_of
from neox.plan.search.fit import flash_advice, memory_problem
from neox.plan.search.longest_sequence import length_notes, longest_sample
from neox.plan.time.expert_traffic import expert_traffic

_LABEL_WIDTH = 10
_LONGEST_VALUE = 70
_LOSS_MEANS: Mapping[str, str] = MappingProxyType(
    {
        "tokens": "the labels of a step",
        "micro_batch": "the labels of each micro batch",
        "samples": "the samples of a step",
    }
)
# Model FLOPs utilisation that published runs in 16 bits reached, in per cent of the peak, by the rows of
# benchmarks/published_runs.tsv: the lowest and the highest.
PUBLISHED_MFU: Mapping[str, tuple[int, int]] = MappingProxyType({"a100": (24, 56), "h100": (33, 43)})
# Derived values that only repeat a key's value.
_REPEATED = ("pp", "mp", "padded_vocab_size", "lr_decay_iters")


def format_plan(
    plan: RunPlan,
    device: Device | None = None,
    *,
    notes: Sequence[str] | None = None,
    training: bool = True,
    verbose: bool = False,
) -> str:
    """Return the plan as text for a terminal.

    Args:
        plan: The plan of a run.
        device: What a rank runs on; by default a GPU of `gpu_memory_gib`.
        notes: Messages for people; those of the plan if left out.
        training: False if the model only generates or is evaluated: less memory, and no DeepSpeed.
        verbose: Whether to show every stage, every given value with its source, and DeepSpeed's configuration.
    """
    device = device or gpu_device(plan)
    lines = [*_grid_lines(plan), *_model_lines(plan)]
    if verbose:
        lines += [_stage_line(plan, stage) for stage in plan.stages]
    if plan.grid.pp_size > 1:
        lines.append(_balance_line(plan))
    shown = list(plan.notes if notes is None else notes)
    if training:
        asked = requested_start(plan.config)
        if plan.start is not None and plan.start.checkpoint is not None:
            lines.append(f"start     {plan.start}")
        elif asked.load is not None and not asked.own_directory:
            lines.append(f"start     {starting_weights(plan.config)}")
        lines += _memory_lines(plan, device, verbose=verbose)
        lines += _figure_lines(plan, device)
        shown += flash_advice(plan, device)
        shown += length_notes(plan, device, longest_sample(plan, device))
    else:
        lines += _inference_lines(plan, device)
    lines += labelled("kernels", path_lines(path_choices(plan, device.family, training=training)))
    lines += labelled("derived", _derived_lines(plan, verbose=verbose))
    lines += _default_lines(plan, training=training)
    if verbose:
        lines += _given_lines(plan)
    if plan.decisions:
        lines += labelled("decided", ["; ".join(f"{each.key} = {_short(each.value)}" for each in plan.decisions)])
    lines += labelled("note", shown)
    if training and verbose:
        lines += labelled("deepspeed", json.dumps(plain(plan.deepspeed), indent=2).splitlines())
    return "\n".join(lines)


def labelled(label: str, texts: Iterable[str]) -> list[str]:
    """Return lines with a label in front of the first and indentation in front of the others."""
    lines = []
    for text in texts:
        lines.append(f"{label:<{_LABEL_WIDTH}}{text}")
        label = ""
    return lines


def _grid_lines(plan: RunPlan) -> Iterator[str]:
    grid = plan.grid
    batch = plan.batch
    context = f"{grid.cp_size} context x " if grid.cp_size > 1 else ""
    degrees = f"{count(grid.pp_size, 'pipeline stage')} x {grid.data_size} data x {context}{grid.tp_size} tensor"
    if grid.ep_size > 1:
        degrees += f", {grid.ep_size} of which divide experts"
    if grid.sequence_parallel:
        degrees += ", which divide tokens too"
    yield f"grid      {count(grid.world_size, 'rank')} = {degrees}"
    yield (
        f"batch     {count(batch.train_batch_size, 'sample')} = {batch.train_micro_batch_size_per_gpu} per rank x "
        f"{count(batch.gradient_accumulation_steps, 'accumulation step')} x {grid.data_size} data"
    )


def _model_lines(plan: RunPlan) -> Iterator[str]:
    number_format: str = plan.precision
    if plan.config.training.fp8:
        number_format += f" (blocks multiply in fp8, {plan.config.training.fp8})"
    network = plan.architecture
    size = f"{plan.layers.numel:,} parameters"
    if network.num_experts:
        size += f" ({plan.layers.active_numel:,} active)"
    yield (f"model     {size}, {number_format}, vocabulary {plan.vocab_size:,} padded to {plan.padded_vocab_size:,}")
    widths = [f"width {network.hidden_size:,}"]
    if any(kind.attention is not None for kind in block_kinds(network)):
        heads = count(network.num_attention_heads, "head")
        if network.num_kv_heads != network.num_attention_heads:
            heads += f" ({network.num_kv_heads} of keys)"
        widths.append(f"{heads} of {network.head_dim}")
        if plan.config.training.attention_backend != "auto":
            widths.append(f"attention by {plan.config.training.attention_backend}")
    widths += _recurrent_widths(network)
    widths += _mlp_widths(network)
    yield f"          {', '.join(widths)}"
    modules = plan.layers.multi_token
    if modules:
        elements = sum(layer.numel for layer in modules)
        number = count(len(modules), "module")
        yield f"          {number} of multi-token prediction, {elements:,} of the parameters, in training only"
    yield from labelled("groups", group_lines(plan.layers, plan.config))


def _recurrent_widths(network: Architecture) -> list[str]:
    """Return what a sequence's states take in the blocks of each recurrent kind, as text."""
    parts = []
    for name in dict.fromkeys(network.attention):
        kind = BLOCKS[name]
        if kind.keeps == "state":
            blocks = count(network.attention.count(name), f"{name} block")
            parts.append(f"{blocks} with states of {kind.kept(network, 1):,}")
    return parts


def _mlp_widths(network: Architecture) -> list[str]:
    """Return the widths of a network's MLPs and experts as text."""
    parts = []
    if network.mlp_width and len(network.expert_blocks) < network.num_layers:
        parts.append(f"MLP width {network.mlp_width:,}")
    if network.num_experts:
        experts = (
            f"{network.num_experts} experts of width {network.expert_width:,}, {network.experts_per_token} a token"
        )
        parts.append(f"{experts}, in {count(len(network.expert_blocks), 'block')}")
    if network.shared_expert_width:
        parts.append(f"a shared expert of width {network.shared_expert_width:,}")
    return ["; ".join(parts)] if parts else []


def _stage_line(plan: RunPlan, stage: StagePlan) -> str:
    layers = " and ".join(f"{held.start}-{held.stop - 1}" for held in stage.ranges)
    first, last = stage_ranks(plan, stage.index)
    ranks = f"rank {first}"
    if last > first:
        ranks = f"ranks {first}-{last}"
    if plan.grid.tp_size > 1:
        ranks += f", {plan.grid.dp_size} tensor groups of {plan.grid.tp_size} in a row"
    contents = stage_contents(plan, stage)
    return f"stage {stage.index:<3} layers {layers} ({contents}), {stage.parameters:,} parameters; {ranks}"


def _balance_line(plan: RunPlan) -> str:
    layers = ", ".join(str(len(stage.layers)) for stage in plan.stages)
    return f"stages    {layers} layers; the largest holds {imbalance(plan):.3f} x the mean's parameters"


def _memory_lines(plan: RunPlan, device: Device, *, verbose: bool) -> Iterator[str]:
    memory = memory_on(plan, device)
    states = f"weights {gib(memory.weights)}, gradients {gib(memory.gradients)}, optimizer {gib(memory.optimizer)}"
    total = gib(memory.total)
    yield f"memory    {total} on the fullest rank: {states}, activations {gib(memory.activations)}"
    if memory.host:
        saves_nothing = device.shared and not memory.files
        why = "; ranks on CPUs have that memory anyway: offload saves nothing" if saves_nothing else ""
        yield f"          and {gib(memory.host)} of main memory for what each rank keeps there{why}"
    if memory.files:
        yield f"          and {gib(memory.files)} of each rank in files of nvme_path"
    if memory.copies:
        yield f"          and {gib(memory.copies)} of main memory for the copies that async_save writes"
    if verbose:
        recomputed = memory_with(plan, recompute=True, device=device).activations
        kept = memory_with(plan, recompute=False, device=device).activations
        chosen = "with" if plan.config.training.checkpoint_activations else "without"
        yield f"          activations {gib(recomputed)} with recompute, {gib(kept)} without (this run: {chosen})"
    yield _verdict(plan, device, training=True)


def _loss_mean(plan: RunPlan) -> str:
    """Return what losses are means over, in words."""
    over = _LOSS_MEANS[plan.loss_normalization]
    if plan.config.preferences.on_preferences:
        return over.replace("labels", "pairs").replace("samples", "rows")
    return over


def _inference_lines(plan: RunPlan, device: Device) -> Iterator[str]:
    needed = inference_bytes(plan, plan.grid.pp_size, plan.grid.tp_size)
    yield f"memory    {gib(needed)} on the fullest rank: weights, keys and values"
    yield _verdict(plan, device, training=False)


def _verdict(plan: RunPlan, device: Device, *, training: bool) -> str:
    fits = f"fits on {device.name}, of which {gib(device.usable)} are usable"
    problem = memory_problem(plan, device, training=training)
    if problem is None:
        return f"          {fits} ({device.source})"
    return f"          {problem.text} (compared with {problem.source})"


def _figure_lines(plan: RunPlan, device: Device) -> Iterator[str]:
    found = run_totals(plan, device)
    yield f"loss      mean over {_loss_mean(plan)} (loss_normalization)"
    for paper in PAPERS:
        yield from labelled(paper.label, paper.plan_lines(plan.config))
    yield from labelled("answers", preference_lines(plan))
    yield from labelled("fim", fim_lines(plan))
    yield from labelled("data", data_lines(plan))
    yield from labelled("valid", validation_lines(plan))
    step = f"{found.tokens_per_step:,} tokens, {_flop(found.flops_per_token)} per token"
    if plan.grid.pp_size > 1 and found.estimate is None:  # else the run's line says how long stages wait
        step += f", pipeline bubble {100 * found.bubble:.1f} %"
    yield f"step      {step}"
    yield from labelled("experts", _expert_lines(plan, found))
    train_iters = plan.config.training.train_iters
    if train_iters is not None:
        yield f"run       {train_iters:,} steps, {found.tokens:,} tokens{_time_of_run(plan, found, device)}"
        yield f"schedule  {schedule_of(plan.config).describe()}"
        for label, line in plan.batch_schedule.describe(train_iters):
            yield from labelled(label, [line])
    if plan.save_iterations:
        saves = count(len(plan.save_iterations), "checkpoint")
        sizes = _checkpoint_sizes(plan)
        yield f"saves     {saves}, the last after step {plan.save_iterations[-1]:,}{sizes}"


def _expert_lines(plan: RunPlan, found: RunTotals) -> Iterator[str]:
    """Yield the communication and load of expert parallelism; nothing without it."""
    traffic = expert_traffic(plan)
    if traffic is None:
        return
    number = plan.architecture.num_experts // plan.grid.ep_size
    time = ""
    if found.estimate is not None:
        time = f", {_duration(found.estimate.experts)}"
    yield (
        f"{count(number, 'expert')} of each block on a rank, which sends {gib(traffic.sent_bytes)} per step in "
        f"{traffic.exchanges:,} all-to-alls{time}"
    )
    yield (
        f"{traffic.rows:,} rows per block and micro batch if tokens are spread evenly, at most {traffic.most_rows:,} "
        "if the experts of one rank get all tokens"
    )


def _checkpoint_sizes(plan: RunPlan) -> str:
    """Return the sizes on disk of one checkpoint and of all that are kept."""
    one = checkpoint_bytes(plan)
    kept = kept_checkpoints(plan)
    if kept == 1:
        return f"; {_disk_size(one)} on disk"
    return f"; {_disk_size(one)} each on disk, {_disk_size(one * kept)} for the {kept:,} that are kept"


def _disk_size(size: int) -> str:
    """Return a number of bytes in TiB if it is large, else as memory is shown."""
    if size >= 1024 * GIB:
        return f"{size / GIB / 1024:,.1f} TiB"
    return gib(size)


def _time_of_run(plan: RunPlan, found: RunTotals, device: Device) -> str:
    """Return the time that a run takes and what was assumed; nothing if the speed of its device is not known."""
    if plan.precision == "fp32" and found.peak_tflops is None and not device.shared:
        return ": no time, as peaks of GPUs are known in 16 bits (peak_theoretical_tflops: that of fp32)"
    if found.days is None or found.peak_tflops is None:
        return ""
    speed = f"{100 * found.mfu:.0f} % MFU of {found.peak_tflops:,.0f} TFLOP/s"
    estimate = found.estimate
    if estimate is not None:
        parts = f"waiting for stages {estimate.bubble / estimate.seconds:.0%}, communication"
        parts += f" {estimate.communication / estimate.seconds:.0%}"
        duration = _duration(found.days * 86_400)
        kind = plan.config.runner.gpu_type or ""
        basis = f"{estimate_basis(kind, fp8=bool(plan.config.training.fp8))}, {device.peak_source}"
        return f": {duration}, {_duration(estimate.seconds)} a step, {speed} ({basis}; {parts})"
    return f": {_duration(found.days * 86_400)} at {speed} (expected_mfu, {device.peak_source})"


def estimate_basis(gpu_type: str, *, fp8: bool) -> str:
    """Return what an estimated time assumes, and what published runs on the same kind of GPU reached."""
    return times_basis([gpu_type], fp8=fp8)


def times_basis(gpu_types: Sequence[str], *, fp8: bool) -> str:
    """Return what estimated times on several kinds of GPU assume, and what published runs on those kinds reached."""
    basis = "estimated for full power and fused kernels, not measured"
    kinds = dict.fromkeys(gpu_type.partition("-")[0] for gpu_type in gpu_types)
    ranges = []
    for kind in kinds:
        if kind in PUBLISHED_MFU and not fp8:
            lowest, highest = PUBLISHED_MFU[kind]
            ranges.append(f"on {kind.upper()}: {lowest} to {highest} % MFU")
    if not ranges:
        return basis
    return f"{basis} (published runs {', '.join(ranges)})"


def network_basis(gpu_types: Sequence[str]) -> str:
    """Return the bandwidth between hosts that estimated times on several kinds of GPU assume."""
    kinds = [f"{GPUS[gpu_type].network_sheet_gbs:g} GB/s ({gpu_type})" for gpu_type in gpu_types]
    return (
        f"hosts are linked by {', '.join(kinds)} for each GPU, in one direction; slower networks favour other layouts"
    )


def main_memory_basis(config: NeoXConfig, gpu_types: Sequence[str]) -> str:
    """Return how much main memory on several kinds of GPU is counted with, for what ranks offload."""
    if config.runner.host_memory_gib is not None:
        return f"main memory of each host: {config.describe_setting('host_memory_gib')}"
    kinds = [f"{GPUS[kind].main_memory_gib:.0f} GiB ({kind})" for kind in gpu_types]
    return (
        f"main memory for each GPU is its share of a usual host, as hosts are rented: {', '.join(kinds)}; "
        "--set host_memory_gib=N names that of your hosts"
    )


def _derived_lines(plan: RunPlan, *, verbose: bool) -> Iterator[str]:
    """Yield what was derived from what; unless verbose, only what does not repeat a key's value."""
    for name, derived in derived_values(plan).items():
        repeats_key = plan.config.given(name) or name in _REPEATED
        if verbose or not repeats_key:
            yield f"{name} = {derived.value}: {derived.rule}"


def _given_lines(plan: RunPlan) -> list[str]:
    given = []
    for key, value, source in all_values(plan.config):
        if not source.is_default:
            given.append(f"{key} = {_short(value)}: {source}")
    return [*labelled("given", given), *labelled("others", all_defaults(plan.config))]


def _default_lines(plan: RunPlan, *, training: bool) -> list[str]:
    """Return the line of defaults that matter for the result; none if all of them are given."""
    notable = notable_defaults(plan, training=training)
    return labelled("defaults", [", ".join(notable)]) if notable else []


def _duration(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    if seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.1f} seconds"


def _flop(operations: float) -> str:
    if operations < 1e9:
        return f"{operations / 1e6:.2f} MFLOP"
    return f"{operations / 1e9:.2f} GFLOP"


def _short(value: Any) -> str:
    """Return a value as JSON, cut if it is long."""
    text = json.dumps(plain(value))
    if len(text) > _LONGEST_VALUE:
        return text[: _LONGEST_VALUE - 3] + "..."
    return text
