"""The reference model on paper."""

from __future__ import annotations

from neox.plan.feature import NO_MEMORY, FeatureMemory, FeaturePaper, RankTensors
from neox.plan.layout import LaidOutRun


def memory(run: LaidOutRun, rank: RankTensors) -> FeatureMemory:
    """`reference_model: copy` holds the weights a second time, divided as the trained ones are."""
    if not run.config.preferences.copies_reference:
        return NO_MEMORY
    return FeatureMemory(weights=rank.weight_bytes)


PAPER = FeaturePaper(memory=memory)
