"""Rules of precision and of DeepSpeed's settings: ZeRO, offload, accumulation."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.devices.precision import PRECISION_KEYS, choose_precision
from neox.problems import Problem

_STAGE = "zero_optimization.stage"
_STATES = "zero_optimization.offload_optimizer"
_WEIGHTS = "zero_optimization.offload_param"
_OLD_STATES = "zero_optimization.cpu_offload"


def deepspeed_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about precision and DeepSpeed that are broken."""
    yield from _offload(config)
    yield from _precision(config)
    yield from _accumulation(config)
    yield from _prescaled(config)
    yield from _bf16_states(config)


def _offload(config: NeoXConfig) -> Iterator[Problem]:
    zero = config.deepspeed.zero_optimization
    block = zero.offload_optimizer
    if block is not None and zero.cpu_offload is not None:
        meant = "cpu" if zero.cpu_offload else "none"
        if block.device != meant:
            yield config.problem(_OLD_STATES, f"contradicts `{_STATES}`, its name today; keep one", _STATES)
    if zero.offloads_optimizer and zero.stage == 0:
        named = _OLD_STATES if zero.cpu_offload else f"{_STATES}.device"
        yield config.problem(named, f"needs {_STAGE} 1, 2 or 3, not {config.describe_setting(_STAGE)}", _STAGE)
    if zero.offloads_weights and not (zero.stage == 3 and zero.offloads_optimizer):
        rule = f"needs {_STAGE} 3 and `{_STATES}: {{device: cpu}}`"
        yield config.problem(f"{_WEIGHTS}.device", rule, _STAGE, _STATES)
    weights = zero.offload_param
    if weights is not None and weights.device == "nvme" and weights.pin_memory:
        yield config.problem(f"{_WEIGHTS}.pin_memory", "cannot pin what is in files; remove it", f"{_WEIGHTS}.device")


def _precision(config: NeoXConfig) -> Iterator[Problem]:
    contradictions: list[Problem] = []
    precision = choose_precision(config, contradictions)
    yield from contradictions
    if config.training.fp8 is not None and config.model.precision != "auto" and precision not in ("bf16", None):
        rule = f"needs `precision: bf16`, and this run has {precision}; remove one of them"
        yield config.problem("fp8", rule, *PRECISION_KEYS)
    block = config.deepspeed.fp16
    if block is None:
        return
    if block.enabled is not None and block.fp16 is not None and block.enabled != block.fp16:
        other = config.describe_setting("fp16.enabled")
        yield config.problem("fp16.fp16", f"contradicts {other}; keep `enabled`", "fp16.enabled")
    if config.value("dynamic_loss_scale") is False and not block.loss_scale:
        rule = "needs a fixed fp16.loss_scale; give one, or remove it"
        yield config.problem("dynamic_loss_scale", rule, "fp16.loss_scale")


def _accumulation(config: NeoXConfig) -> Iterator[Problem]:
    key = "data_types.grad_accum_dtype"
    wanted = config.value(key)
    precision = choose_precision(config, [])
    if wanted == "fp32" and precision == "fp16" and config.parallelism.pipe_parallel_size > 1:
        rule = "with fp16 and pipeline stages lets tied weights drift apart in DeepSpeed; leave it out, or use bf16"
        yield config.problem(key, rule, "pipe_parallel_size", *PRECISION_KEYS)
    elif wanted == "fp32" and precision in ("fp16", "bf16") and config.deepspeed.zero_optimization.stage == 0:
        yield config.problem(key, f"with {precision} needs {_STAGE} 1 or more in DeepSpeed", _STAGE, *PRECISION_KEYS)
    if wanted not in (None, "fp32", precision):
        yield config.problem(key, f"does not fit {precision} training; leave it out", *PRECISION_KEYS)


def _prescaled(config: NeoXConfig) -> Iterator[Problem]:
    """Yield that DeepSpeed's reduce-scatter, its default where gradients are divided, divides them afterwards."""
    keys = config.deepspeed
    zero = keys.zero_optimization
    if zero.stage < 2 or zero.reduce_scatter is False:
        return
    stage = config.describe_setting(_STAGE)
    rule = f"does not work with DeepSpeed's reduce-scatter and {stage}; set reduce_scatter: false, or remove it"
    for key, divides in (
        ("prescale_gradients", keys.prescale_gradients),
        ("gradient_predivide_factor", keys.gradient_predivide_factor != 1.0),
    ):
        if divides:
            yield config.problem(key, rule, _STAGE, "zero_optimization.reduce_scatter")


def _bf16_states(config: NeoXConfig) -> Iterator[Problem]:
    """Weights, gradients and states are bf16 together, in Adam."""
    bf16 = config.deepspeed.bf16
    if bf16 is None or not bf16.has_bf16_states:
        return
    key = "bf16.bf16_master_weights_and_grads"
    precision = choose_precision(config, [])
    if config.model.precision != "auto" and precision not in ("bf16", None):
        yield config.problem(key, f"needs bf16 training, and this run has {precision}; remove one", *PRECISION_KEYS)
    if config.optimizer.optimizer.name != "adam":
        kind = config.describe_setting("optimizer.type")
        yield config.problem(key, f"is for Adam, not for {kind}; remove one of them", "optimizer.type")
    accumulated = "data_types.grad_accum_dtype"
    if config.value(accumulated) not in (None, "bf16"):
        other = config.describe_setting(accumulated)
        yield config.problem(key, f"accumulates gradients in bf16, not {other}; remove one of them", accumulated)
