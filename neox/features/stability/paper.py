"""Numbers of stability on paper."""

from __future__ import annotations

from neox.plan.feature import NO_MEMORY, FeatureMemory, FeaturePaper, RankTensors
from neox.plan.layout import Workload

_FP32 = 4


def memory(run: Workload, rank: RankTensors) -> FeatureMemory:
    """The fp32 weights are copied before each part of an update, and compared after it: on the host if offloaded."""
    if run.config.logging.log_stability_every is None or run.layout.offloads_states:
        return NO_MEMORY
    return FeatureMemory(during_update=_FP32 * rank.updated_at_once)


PAPER = FeaturePaper(memory=memory, off=("log_stability_every=null",))
