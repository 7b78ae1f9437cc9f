"""The comparison of weights of data ranks on paper."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.feature import FeaturePaper


def recovery_lines(config: NeoXConfig) -> Iterator[str]:
    """Yield how often weights are compared."""
    every = config.healing.check_replicas_every
    if every is not None:
        yield f"weights of data ranks compared every {every} steps"


PAPER = FeaturePaper(recovery_lines=recovery_lines)
