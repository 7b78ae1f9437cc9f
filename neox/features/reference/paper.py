"""The reference model on paper."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.feature import NO_MEMORY, FeatureMemory, FeaturePaper, RankTensors
from neox.plan.layout import Workload
from neox.plan.network.fp32_parameters import keeps_fp32
from neox.problems import Problem


def problems(config: NeoXConfig) -> Iterator[Problem]:
    """A copy holds weights in 16 bits. It would compute with the trained model's fp32 values."""
    if config.preferences.copies_reference and keeps_fp32(config):
        key = "mamba_selective_fp32_params"
        rule = (
            "copies no A_log, D and dt_bias, which recurrent blocks keep in fp32 beside the weights; use start, whose "
            f"log-probabilities are stored before training, or set {key}: false"
        )
        yield config.problem("reference_model", rule, key, "attention_config")


def memory(run: Workload, rank: RankTensors) -> FeatureMemory:
    """`reference_model: copy` holds the weights a second time, divided as the trained ones are."""
    if not run.config.preferences.copies_reference:
        return NO_MEMORY
    return FeatureMemory(weights=rank.weight_bytes)


PAPER = FeaturePaper(problems=problems, memory=memory)
