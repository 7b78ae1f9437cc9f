"""Parameters that stay fp32, on paper."""

from __future__ import annotations

from collections.abc import Iterator

from neox.architecture.recurrence import selective_fp32
from neox.config.neox_config import NeoXConfig
from neox.plan.devices.precision import choose_precision
from neox.plan.feature import NO_MEMORY, FeatureMemory, FeaturePaper, RankTensors
from neox.plan.layout import LaidOutRun
from neox.plan.network.attention_config import asked_kinds
from neox.plan.network.recurrent_keys import SELECTIVE_FP32_KINDS
from neox.problems import Note, Problem

_KEY = "mamba_selective_fp32_params"
_FP32 = 4


def asks_for_fp32(config: NeoXConfig) -> bool:
    """Return whether such parameters stay fp32 in 16 bits: only if memory holds fp32 weights for the optimizer."""
    return config.recurrent.mamba_selective_fp32_params and not list(_obstacles(config))


def keeps_fp32(config: NeoXConfig) -> bool:
    """Return whether a run in 16 bits computes with fp32 values of such parameters."""
    return asks_for_fp32(config) and _has_them_in_16_bits(config)


def _has_them_in_16_bits(config: NeoXConfig) -> bool:
    if config.value("num_layers") is None or choose_precision(config, []) not in ("bf16", "fp16"):
        return False
    return not set(asked_kinds(config)).isdisjoint(SELECTIVE_FP32_KINDS)


def _obstacles(config: NeoXConfig) -> Iterator[tuple[str, str, str]]:
    """Yield settings with which memory holds no fp32 weights: the key, why, and what else to do."""
    bf16 = config.deepspeed.bf16
    if bf16 is not None and bf16.has_bf16_states:
        yield "bf16.bf16_master_weights_and_grads", "keeps no weights in fp32", "remove one"
    if config.deepspeed.zero_optimization.states_directory is not None:
        key = "zero_optimization.offload_optimizer.device"
        yield key, "has the fp32 weights in files", "use device: cpu there, or set it to false"


def problems(config: NeoXConfig) -> Iterator[Problem]:
    """Fp32 values come from the optimizer's weights, which are fp32 and in memory."""
    if not (config.given(_KEY) and config.recurrent.mamba_selective_fp32_params and _has_them_in_16_bits(config)):
        return
    for key, reason, advice in _obstacles(config):
        rule = f"does not work with {config.describe_setting(key)}, which {reason}; {advice}"
        yield config.problem(_KEY, rule, key)


def notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield that the default changes nothing."""
    if config.given(_KEY) or not _has_them_in_16_bits(config):
        return
    for key, reason, _ in _obstacles(config):
        message = f"`{_KEY}` is off, though true by default: {config.describe_setting(key)} {reason}"
        yield Note((_KEY, key), f"{message}, so A_log, D and dt_bias are rounded to 16 bits")


def memory(run: LaidOutRun, rank: RankTensors) -> FeatureMemory:
    """Each tensor rank has an fp32 copy of such parameters in its layers."""
    if run.precision == "fp32" or not asks_for_fp32(run.config):
        return NO_MEMORY
    elements = 0
    for layer in run.layers:
        elements += sum(spec.shard_numel(run.layout.tp_size) for spec in selective_fp32(layer.parameters))
    return FeatureMemory(weights=_FP32 * -(-elements // run.layout.pp_size))


PAPER = FeaturePaper(problems=problems, memory=memory, notes=notes)
