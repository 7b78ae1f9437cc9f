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
from neox.problems import Problem

_KEY = "mamba_selective_fp32_params"
_FP32 = 4


def asks_for_fp32(config: NeoXConfig) -> bool:
    """Return whether such parameters stay fp32 in 16 bits: not if the weights that the optimizer updates are bf16."""
    bf16 = config.deepspeed.bf16
    return config.recurrent.mamba_selective_fp32_params and not (bf16 is not None and bf16.has_bf16_states)


def problems(config: NeoXConfig) -> Iterator[Problem]:
    """Fp32 values come from the optimizer's weights, which are fp32 and in memory."""
    if not config.recurrent.mamba_selective_fp32_params or choose_precision(config, []) not in ("bf16", "fp16"):
        return
    if config.value("num_layers") is None or set(asked_kinds(config)).isdisjoint(SELECTIVE_FP32_KINDS):
        return
    bf16 = config.deepspeed.bf16
    if config.given(_KEY) and bf16 is not None and bf16.has_bf16_states:
        states = "bf16.bf16_master_weights_and_grads"
        rule = f"does not work with {config.describe_setting(states)}, which keeps no weights in fp32; remove one"
        yield config.problem(_KEY, rule, states)
    directory = config.deepspeed.zero_optimization.states_directory
    if directory is not None:
        device = "zero_optimization.offload_optimizer.device"
        rule = (
            f"(the default is true) does not work with {config.describe_setting(device)}: the fp32 weights are in "
            "files; use device: cpu, or set it to false"
        )
        yield config.problem_about(f"`{_KEY}` {rule}", _KEY, device)


def memory(run: LaidOutRun, rank: RankTensors) -> FeatureMemory:
    """Each tensor rank has an fp32 copy of such parameters in its layers."""
    if run.precision == "fp32" or not asks_for_fp32(run.config):
        return NO_MEMORY
    elements = 0
    for layer in run.layers:
        elements += sum(spec.shard_numel(run.layout.tp_size) for spec in selective_fp32(layer.parameters))
    return FeatureMemory(weights=_FP32 * -(-elements // run.layout.pp_size))


PAPER = FeaturePaper(problems=problems, memory=memory)
