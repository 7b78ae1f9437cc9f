"""Parameters that stay fp32, on paper."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.feature import NO_MEMORY, FeatureMemory, FeaturePaper, RankTensors
from neox.plan.layout import Workload
from neox.plan.network.fp32_parameters import asks_for_fp32, has_fp32_parameters_in_16_bits, obstacles_to_fp32
from neox.problems import Note, Problem

_KEY = "mamba_selective_fp32_params"
_FP32 = 4


def problems(config: NeoXConfig) -> Iterator[Problem]:
    """Fp32 values come from the optimizer's weights, which are fp32 and in memory."""
    if not (
        config.given(_KEY) and config.recurrent.mamba_selective_fp32_params and has_fp32_parameters_in_16_bits(config)
    ):
        return
    for key, reason, advice in obstacles_to_fp32(config):
        rule = f"does not work with {config.describe_setting(key)}, which {reason}; {advice}"
        yield config.problem(_KEY, rule, key)


def notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield that the default changes nothing."""
    if config.given(_KEY) or not has_fp32_parameters_in_16_bits(config):
        return
    for key, reason, _ in obstacles_to_fp32(config):
        message = f"`{_KEY}` is off, though true by default: {config.describe_setting(key)} {reason}"
        yield Note((_KEY, key), f"{message}, so A_log, D and dt_bias are rounded to 16 bits")


def memory(run: Workload, rank: RankTensors) -> FeatureMemory:
    """Each rank has an fp32 copy of such parameters in its layers."""
    if run.precision == "fp32" or not asks_for_fp32(run.config):
        return NO_MEMORY
    return FeatureMemory(weights=_FP32 * rank.of_decays)


PAPER = FeaturePaper(problems=problems, memory=memory, notes=notes)
