"""Whether decays and steps of recurrent blocks stay fp32 in 16 bits (`mamba_selective_fp32_params`)."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.devices.precision import choose_precision
from neox.plan.network.attention_config import asked_kinds
from neox.plan.network.recurrent_keys import SELECTIVE_FP32_KINDS


def asks_for_fp32(config: NeoXConfig) -> bool:
    """Return whether such parameters stay fp32 in 16 bits: only if memory holds fp32 weights for the optimizer."""
    return config.recurrent.mamba_selective_fp32_params and not list(obstacles_to_fp32(config))


def keeps_fp32(config: NeoXConfig) -> bool:
    """Return whether a run in 16 bits computes with fp32 values of such parameters."""
    return asks_for_fp32(config) and has_fp32_parameters_in_16_bits(config)


def has_fp32_parameters_in_16_bits(config: NeoXConfig) -> bool:
    """Return whether a run trains a network with such parameters in 16 bits."""
    if config.value("num_layers") is None or choose_precision(config, []) not in ("bf16", "fp16"):
        return False
    return not set(asked_kinds(config)).isdisjoint(SELECTIVE_FP32_KINDS)


def obstacles_to_fp32(config: NeoXConfig) -> Iterator[tuple[str, str, str]]:
    """Yield settings with which memory holds no fp32 weights: the key, why, and what else to do."""
    bf16 = config.deepspeed.bf16
    if bf16 is not None and bf16.has_bf16_states:
        yield "bf16.bf16_master_weights_and_grads", "keeps no weights in fp32", "remove one"
    if config.deepspeed.zero_optimization.states_directory is not None:
        key = "zero_optimization.offload_optimizer.device"
        yield key, "has the fp32 weights in files", "use device: cpu there, or set it to false"
