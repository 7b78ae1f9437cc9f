"""Rules of a run: memory, precision, checkpoints, data, hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from neox.architecture import GATED_KINDS
from neox.config.neox_config import NeoXConfig
from neox.config.sections.base import status_of
from neox.config.sections.data import split_shares
from neox.config.sections.deepspeed import OffloadSettings
from neox.errors import ConfigError
from neox.plan.compiled import compile_obstacle
from neox.plan.precision import PRECISION_KEYS, choose_precision
from neox.problems import Problem

# More checkpoints than this are a mistake, and listing them would take longer than refusing them.
_MOST_CHECKPOINTS = 100_000


def run_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about how a run goes that are broken."""
    rules = (
        *(_zero, _offload, _precision, _fp8, _accumulation, _compiled_layers, _recompute, _length, _checkpoint),
        *(_profile, _noise_scale, _data, _data_weights, _data_labels, _reset_attention_mask, _hosts),
    )
    return chain.from_iterable(rule(config) for rule in rules)


def _zero(config: NeoXConfig) -> Iterator[Problem]:
    zero = config.deepspeed.zero_optimization
    if zero.stage >= 2 and config.parallelism.pipe_parallel_size > 1:
        yield config.problem(
            "zero_optimization.stage",
            f"does not work with {config.describe_setting('pipe_parallel_size')}: DeepSpeed's pipeline keeps gradients "
            "and weights whole; use stage 1, or pipe_parallel_size 1 with model_parallel_size for the rest",
            "pipe_parallel_size",
        )


def _offload(config: NeoXConfig) -> Iterator[Problem]:
    zero, key = config.deepspeed.zero_optimization, "zero_optimization.offload_optimizer"
    stage = config.describe_setting("zero_optimization.stage", zero.stage)
    yield from _offload_to_files(config)
    block = zero.offload_optimizer
    if block is not None and zero.cpu_offload is not None and block.device != ("cpu" if zero.cpu_offload else "none"):
        rule = f"contradicts `{key}`, its name today; keep one"
        yield config.problem("zero_optimization.cpu_offload", rule, key)
    if zero.offloads_optimizer and zero.stage == 0:
        named = "zero_optimization.cpu_offload" if zero.cpu_offload else f"{key}.device"
        rule = f"needs zero_optimization.stage 1, 2 or 3, not {stage}"
        yield config.problem(named, rule, "zero_optimization.stage")
    if zero.offloads_weights and not (zero.stage == 3 and zero.offloads_optimizer):
        rule = f"needs zero_optimization.stage 3 and `{key}: {{device: cpu}}`"
        yield config.problem("zero_optimization.offload_param.device", rule, "zero_optimization.stage", key)


def _offload_to_files(config: NeoXConfig) -> Iterator[Problem]:
    zero = config.deepspeed.zero_optimization
    for name in ("offload_optimizer", "offload_param"):
        block: OffloadSettings | None = getattr(zero, name)
        if block is None:
            continue
        for key, info in OffloadSettings.model_fields.items():
            if status_of(info) == "refused" and getattr(block, key) is not None:
                yield config.problem(
                    f"zero_optimization.{name}.{key}",
                    "is of DeepSpeed's own files, which are not used: the kernel reads and writes ours; remove it",
                )
        on_nvme = block.device == "nvme"
        device = f"zero_optimization.{name}.device"
        path = f"zero_optimization.{name}.nvme_path"
        if on_nvme and not block.nvme_path:
            yield config.problem(device, "needs `nvme_path`, a directory on a local disk of every host", path)
        if on_nvme and zero.stage != 3:
            stage = config.describe_setting("zero_optimization.stage", zero.stage)
            rule = f"needs zero_optimization.stage 3, not {stage}; or use cpu"
            yield config.problem(device, rule, "zero_optimization.stage")
        if not on_nvme and block.nvme_path is not None:
            yield config.problem(path, "needs `device: nvme` beside it; or remove it", device)
        if on_nvme and name == "offload_param" and block.pin_memory:
            rule = "cannot pin what is in files; remove it"
            yield config.problem(f"zero_optimization.{name}.pin_memory", rule, device)


def _precision(config: NeoXConfig) -> Iterator[Problem]:
    contradictions: list[Problem] = []
    choose_precision(config, contradictions)
    yield from contradictions
    block = config.deepspeed.fp16
    if block is None:
        return
    if block.enabled is not None and block.fp16 is not None and block.enabled != block.fp16:
        other = config.describe_setting("fp16.enabled")
        yield config.problem("fp16.fp16", f"contradicts {other}; keep `enabled`", "fp16.enabled")
    if config.value("dynamic_loss_scale") is False and not block.loss_scale:
        rule = "needs a fixed fp16.loss_scale; give one, or remove it"
        yield config.problem("dynamic_loss_scale", rule, "fp16.loss_scale")


def _fp8(config: NeoXConfig) -> Iterator[Problem]:
    precision = choose_precision(config, [])
    if config.training.fp8 is not None and config.model.precision != "auto" and precision not in ("bf16", None):
        rule = f"needs `precision: bf16`, and this run has {precision}; remove one of them"
        yield config.problem("fp8", rule, *PRECISION_KEYS)


def _accumulation(config: NeoXConfig) -> Iterator[Problem]:
    ds, key = config.deepspeed, "data_types.grad_accum_dtype"
    wanted, precision = config.value(key), choose_precision(config, [])
    if wanted == "fp32" and precision == "fp16" and config.parallelism.pipe_parallel_size > 1:
        yield config.problem(
            key,
            "with fp16 and pipeline stages lets tied weights drift apart in DeepSpeed; leave it out, or use bf16",
            "pipe_parallel_size",
            *PRECISION_KEYS,
        )
    if wanted == "fp32" and precision == "bf16" and ds.zero_optimization.stage == 0:
        rule = "with bf16 needs zero_optimization.stage 1 or more in DeepSpeed"
        yield config.problem(key, rule, "zero_optimization.stage", *PRECISION_KEYS)
    if wanted not in (None, "fp32", precision):
        yield config.problem(key, f"does not fit {precision} training; leave it out", *PRECISION_KEYS)
    if ds.fp32_allreduce and ds.communication_data_type not in (None, "fp32"):
        other = "communication_data_type"
        yield config.problem("fp32_allreduce", f"contradicts {config.describe_setting(other)}; keep one", other)


def _compiled_layers(config: NeoXConfig) -> Iterator[Problem]:
    training, obstacle = config.training, compile_obstacle(config)
    budget = training.activation_memory_budget is not None
    for key, wanted in (("compile_layers", training.compile_layers is True), ("activation_memory_budget", budget)):
        if wanted and obstacle is not None:
            other, why = obstacle
            yield config.problem(key, f"does not work with {config.describe_setting(other)}, {why}", other)
    if budget and training.checkpoint_activations:
        yield config.problem(
            "activation_memory_budget",
            f"and {config.describe_setting('checkpoint_activations')} both choose what is recomputed; keep one",
            "checkpoint_activations",
        )
    if budget and training.compile_layers is False:
        other = config.describe_setting("compile_layers")
        yield config.problem("activation_memory_budget", f"needs compiled layers: remove {other}", "compile_layers")


def _recompute(config: NeoXConfig) -> Iterator[Problem]:
    training, layers, kinds = config.training, config.model.num_layers or 0, config.model.attention_config
    if not training.checkpoint_activations:
        return
    outside = [number for number in training.no_recompute_layers or () if not 0 <= number < layers]
    if outside:
        message = f"`no_recompute_layers` has {outside[0]}; layers are 0 to {layers - 1}"
        yield config.problem_about(message, "no_recompute_layers", "num_layers")
    if training.part_to_recompute == "full":
        return
    if training.checkpoint_num_layers > 1:
        yield config.problem(
            "checkpoint_num_layers",
            f"joins layers that are recomputed whole; remove it, or {config.describe_setting('recompute_granularity')}",
            "recompute_granularity",
        )
    for key in ("partition_activations", "checkpoint_in_cpu"):
        if config.value(key):
            whole = config.describe_setting("recompute_granularity")
            rule = f"keeps inputs of layers that are recomputed whole; remove it, or {whole}"
            yield config.problem(key, rule, "recompute_granularity")
    if any(kind in str(kinds) for kind in GATED_KINDS):
        rule = "needs attention, which blocks gmlp and amlp lack; use full"
        yield config.problem("recompute_granularity", rule, "attention_config")


def _length(config: NeoXConfig) -> Iterator[Problem]:
    if config.training.train_iters is not None and config.training.num_train_epochs is not None:
        other = config.describe_setting("train_iters")
        yield config.problem("num_train_epochs", f"and {other} both set the run's length; keep one", "train_iters")


def _checkpoint(config: NeoXConfig) -> Iterator[Problem]:
    keys, total = config.checkpoint, config.training.train_iters or 0
    factor, scale = keys.checkpoint_factor, keys.checkpoint_scale
    if factor is not None and scale == "log" and factor <= 1:
        yield config.problem(
            "checkpoint_factor",
            "must be above 1 with checkpoint_scale log, which saves at its powers",
            "checkpoint_scale",
        )
    if factor is not None and scale == "linear" and total // factor > _MOST_CHECKPOINTS:
        yield config.problem(
            "checkpoint_factor",
            f"over {config.describe_setting('train_iters')} saves {total // factor:,} checkpoints; give a larger one, "
            f"such as {-(-total // 100)}",
            "train_iters",
            "checkpoint_scale",
        )
    if factor is None and scale == "log":
        yield config.problem("checkpoint_scale", "needs checkpoint_factor, such as 2", "checkpoint_factor")
    negative = [i for i in keys.extra_save_iters or () if i < 0]
    if negative:
        message = f"`extra_save_iters` has {negative[0]}; iterations start at 0"
        yield config.problem_about(message, "extra_save_iters")
    if keys.finetune and keys.load is None:
        yield config.problem("finetune", "needs `load`, the checkpoint to start from", "load")


def _profile(config: NeoXConfig) -> Iterator[Problem]:
    keys = config.logging
    if not (keys.profile or keys.memory_profiling):
        return
    if keys.profile_step_start >= keys.profile_step_stop:
        stop = config.describe_setting("profile_step_stop")
        rule = f"is not below {stop}, before which profiling ends"
        yield config.problem("profile_step_start", rule, "profile_step_stop")
    if keys.log_dir is None and (keys.profile or keys.memory_profiling_path is None):
        asked = "profile" if keys.profile else "memory_profiling"
        yield config.problem(asked, "needs log_dir, where files are written", "log_dir", "memory_profiling_path")


def _noise_scale(config: NeoXConfig) -> Iterator[Problem]:
    key, stage = "log_gradient_noise_scale", config.deepspeed.zero_optimization.stage
    if not config.logging.log_gradient_noise_scale:
        return
    if stage:
        yield config.problem(
            key,
            f"does not work with {config.describe_setting('zero_optimization.stage')}, which divides gradients over "
            "ranks before they can be compared; use stage 0, or remove it",
            "zero_optimization.stage",
        )
    if config.schedule.rampup_batch_size is not None:
        ramp = config.describe_setting("rampup_batch_size")
        rule = f"compares batches of one size, and {ramp} changes it; remove one of them"
        yield config.problem(key, rule, "rampup_batch_size")
    if config.parallelism.pipe_parallel_size > 1 and not stage and choose_precision(config, []) == "bf16":
        yield config.problem(
            key,
            f"does not work with bf16 and {config.describe_setting('pipe_parallel_size')}, where gradients are clipped "
            "and divided over ranks first; use pipe_parallel_size 1 or fp16, or remove it",
            "pipe_parallel_size",
            *PRECISION_KEYS,
        )


def _data(config: NeoXConfig) -> Iterator[Problem]:
    data = config.data
    if data.data_path is not None and data.train_data_paths is not None:
        other = config.describe_setting("train_data_paths")
        message = f"`data_path` and {other} both name training data; keep one"
        yield config.problem_about(message, "data_path", "train_data_paths")
    if data.train_data_paths is None:
        try:
            split_shares(data.split)
        except ConfigError as error:
            yield config.problem_about(str(error), "split", "train_data_paths")
        if len(re.split("[,/]", data.split.rstrip(",/ "))) > 3:
            yield config.problem("split", "has more than three parts; they are training, validation and test")


def _data_weights(config: NeoXConfig) -> Iterator[Problem]:
    data = config.data
    for split, paths, weights, _ in data.blends:
        key = f"{split}_data_weights"
        if weights is None:
            continue
        if paths is None or len(paths) != len(weights):
            count = f"`{key}` has {len(weights)} weights for {len(paths or ())} {split}_data_paths"
            yield config.problem_about(f"{count}; give one weight for each path", key, f"{split}_data_paths")
        if any(weight < 0 for weight in weights) or sum(weights) <= 0:
            yield config.problem(key, "must not be negative and must not all be 0")
        if data.weight_by_num_documents:
            message = f"`{key}` and weight_by_num_documents both set weights; keep one"
            yield config.problem_about(message, key, "weight_by_num_documents")


def _data_labels(config: NeoXConfig) -> Iterator[Problem]:
    for split, paths, _, labels in config.data.blends:
        key = f"{split}_label_data_paths"
        if labels is not None and len(paths or ()) != len(labels):
            rule = f"does not go with `{split}_data_paths: {list(paths or ())}`"
            advice = "give one label file for each data file, in order (data_path has none)"
            yield config.problem(key, f"{rule}; {advice}", f"{split}_data_paths")


def _reset_attention_mask(config: NeoXConfig) -> Iterator[Problem]:
    key, fused = "reset_attention_mask", "scaled_upper_triang_masked_softmax_fusion"
    if not config.data.reset_attention_mask:
        return
    if config.parallelism.pipe_parallel_size > 1:
        yield config.problem(
            key,
            f"does not work with {config.describe_setting('pipe_parallel_size')}: only hidden states travel between "
            "stages; use pipe_parallel_size 1, with ZeRO or model_parallel_size for memory",
            "pipe_parallel_size",
        )
    if config.value(fused):
        yield config.problem(
            key,
            f"does not work with {config.describe_setting(fused)}: its kernel masks later tokens only; remove that, "
            'or use attention_config: [[["flash"], "all"]]',
            fused,
        )


def _hosts(config: NeoXConfig) -> Iterator[Problem]:
    runner = config.runner
    if runner.num_nodes != -1 and runner.num_nodes < 1:
        yield config.problem("num_nodes", "must be at least 1, or -1 for all hosts")
    if runner.include is not None and runner.exclude is not None:
        other = config.describe_setting("exclude")
        yield config.problem("include", f"and {other} exclude each other; keep one", "exclude")
