"""Fast paths that a run will take on a kind of device, and why it takes the plain one of others.

Only what the run has a use for is listed. On its rank the library asks the device itself (`neox.ops.fast_paths`); a
rank that finds otherwise says so at its start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from neox.architecture import BLOCKS, FLEX_HEAD_DIM, POSITIONS
from neox.devices import DEVICES, FAST_PATHS, DeviceFamily, FastPathName, family_has
from neox.plan.devices.compiled import compile_obstacle, compiles
from neox.plan.network.recurrent_keys import DELTA_KINDS, MAMBA2_KINDS, RWKV_KINDS, SELECTIVE_FP32_KINDS
from neox.plan.run_plan import RunPlan


class _Use(NamedTuple):
    """A use that a run has for a fast path.

    Attributes:
        name: The fast path.
        of: What the run would compute by it.
        obstacle: What of the run does not go together with it; empty if nothing.
        on_any_device: Whether the run asks for it by name, so that no kind of device rules it out.
    """

    name: FastPathName
    of: str
    obstacle: str = ""
    on_any_device: bool = False


@dataclass(frozen=True)
class PathChoice:
    """Which path a run takes for one of its computations.

    Attributes:
        name: The fast path.
        use: What the run computes by it, or by the plain one.
        is_taken: Whether the fast one is taken.
        reason: Why the plain one is; empty if it is not.
        is_ruled_out: Whether the run itself rules the fast one out, on every device.
        instead: What the plain one is; empty if the fast one is taken.
    """

    name: FastPathName
    use: str
    is_taken: bool
    reason: str = ""
    instead: str = ""
    is_ruled_out: bool = False


def path_choices(plan: RunPlan, family: DeviceFamily, *, training: bool = True) -> list[PathChoice]:
    """Return which paths a run takes on a kind of device.

    Args:
        plan: The plan.
        family: Kind of device.
        training: Whether the model is trained, not only run.
    """
    uses = _uses_in_training(plan) if training else _uses_in_generation(plan)
    choices = []
    for name, use, obstacle, on_any_device in uses:
        path = FAST_PATHS[name]
        reason = obstacle
        if not family_has(family, name) and not on_any_device:
            reason = f"not on {DEVICES[family].devices}"
        if not reason and path.package:
            use = f"{use}, with {path.package}"
            if training and name != "convolution_kernel":
                use = f"{use}; memory is planned for torch's operations"
        instead = (path.elsewhere or "refused") if reason else ""
        choices.append(PathChoice(name, use, not reason, reason, instead, is_ruled_out=bool(obstacle)))
    return choices


def path_lines(choices: Iterable[PathChoice]) -> Iterator[str]:
    """Yield a line with the fast paths that are taken, and one for each reason why others are not."""
    uses: dict[str, dict[str, list[str]]] = {"": {}}  # reason -> name -> uses; those that are taken come first
    for choice in choices:
        uses.setdefault(choice.reason, {}).setdefault(choice.name, []).append(choice.use)
    for reason, names in uses.items():
        if names:
            paths = ", ".join(f"{name} ({', '.join(of)})" for name, of in names.items())
            yield f"{reason}: {paths}" if reason else paths


def _uses_in_training(plan: RunPlan) -> Iterator[_Use]:
    network = plan.architecture
    training = plan.config.training
    yield _Use("triton", "cross entropy")
    fused = plan.attention.count("fused")
    if fused:
        yield _Use("triton", f"softmax of {_blocks(fused)}")
    yield from _masked_attention(plan)
    if network.num_experts and training.fp8 is None:
        yield _experts(plan)
    yield from _recurrences(plan, training=True)
    if training.fp8 is not None:
        yield _Use("scaled_product", "linear layers of blocks")
        if network.num_experts:
            yield _Use("scaled_grouped_product", "experts")
    if plan.precision != "fp32":
        yield _Use("product_added_to_fp32", "gradient of the head")
    if training.compile_layers is not False:
        obstacle = compile_obstacle(plan.config)
        reason = f"{obstacle[0]} is set" if obstacle else ""
        yield _Use("compiled_layers", "blocks", reason, on_any_device=compiles(plan.config, None))
    on_device = not plan.config.deepspeed.zero_optimization.offloads_optimizer
    if on_device and plan.config.optimizer.optimizer.name in ("adam", "muon"):
        yield _Use("fused_update", "optimizer")


def _uses_in_generation(plan: RunPlan) -> Iterator[_Use]:
    yield _Use("attention_kernels", "attention")
    if plan.architecture.num_experts:
        yield _experts(plan)
    yield from _recurrences(plan, training=False)
    if plan.config.generation.cuda_graphs:
        obstacle = ""
        if plan.architecture.num_experts:
            obstacle = "the host reads how many tokens each expert has"
        elif plan.grid.pp_size * plan.grid.tp_size > 1:
            obstacle = "several ranks hold the model"
        yield _Use("recorded_steps", "steps of one token", obstacle)


def _recurrences(plan: RunPlan, *, training: bool) -> Iterator[_Use]:
    """Yield the kernels of recurrent blocks, and what of the run they do not take (`neox.ops.recurrent_kernels`)."""
    network = plan.architecture
    kinds = network.attention
    convolved = sum(kind in SELECTIVE_FP32_KINDS for kind in kinds)
    width = network.linear_conv if "gated_delta" in kinds else network.mamba_conv
    of_run = "deterministic is set" if plan.config.training.deterministic else ""
    if convolved:
        obstacle = of_run or ("" if 2 <= width <= 4 else f"convolutions see {width} tokens, not 2 to 4")
        yield _Use("convolution_kernel", f"convolutions of {_blocks(convolved)}", obstacle)
    if count := kinds.count("mamba"):
        obstacle = of_run
        if not training:
            obstacle = obstacle or "the kernel continues no state"
        elif plan.keeps_documents_apart:
            obstacle = obstacle or "the kernel separates no documents"
        yield _Use("mamba_kernels", f"recurrences of {_blocks(count)} of mamba", obstacle)
    if count := sum(kind in MAMBA2_KINDS for kind in kinds):
        obstacle = of_run or ("its products would be TF32" if plan.precision == "fp32" else "")
        yield _Use("mamba_kernels", f"recurrences of {_blocks(count)} of mamba2", obstacle)
    if count := sum(kind in (*DELTA_KINDS, *RWKV_KINDS) for kind in kinds):
        obstacle = of_run or ("they take 16 bits" if plan.precision == "fp32" else "")
        yield _Use("linear_attention_kernels", f"recurrences of {_blocks(count)}", obstacle)


def _experts(plan: RunPlan) -> _Use:
    obstacle = ""
    if plan.precision != "bf16":
        obstacle = f"experts multiply in {plan.precision}, not in bf16"
    return _Use("grouped_product", "experts", obstacle)


def _masked_attention(plan: RunPlan) -> Iterator[_Use]:
    """Yield the attention of the blocks whose queries do not see all earlier tokens of their row.

    `SelfAttention.takes_block_masks` asks the same of a module.
    """
    network = plan.architecture
    divided = plan.grid.cp_size > 1 and plan.grid.cp_kind != "ulysses"
    width = network.head_dim
    by_use: dict[str, int] = {}
    for block, kernel in zip(network.attention, plan.attention, strict=True):
        attention = BLOCKS[block].attention
        if attention is None or kernel != "flash":
            continue
        masks = []
        if attention.sees != "all":
            masks.append(f"{attention.sees}s")
        if plan.keeps_documents_apart:
            masks.append("documents")
        if divided:
            masks.append("shares of tokens")
        if masks:
            use = " and ".join(masks)
            by_use[use] = by_use.get(use, 0) + 1
            width = min(width, attention.value_width(network))
    obstacle = ""
    if plan.config.training.attention_backend not in ("auto", "flex"):
        obstacle = f"attention_backend is {plan.config.training.attention_backend}"
    elif plan.config.training.attention_dropout:
        obstacle = "attention_dropout is set"
    elif POSITIONS[network.positions].biases_scores:
        obstacle = f"pos_emb {network.positions} adds to scores"
    elif width < FLEX_HEAD_DIM:
        obstacle = f"heads are {width} wide, less than {FLEX_HEAD_DIM}"
    for use, count in by_use.items():
        yield _Use("flex_attention", f"{use} in {_blocks(count)}", obstacle)


def _blocks(count: int) -> str:
    return f"{count} block" if count == 1 else f"{count} blocks"
