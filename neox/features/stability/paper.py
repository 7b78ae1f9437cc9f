"""Numbers of stability on paper."""

from __future__ import annotations

from neox.plan.feature import FeaturePaper

PAPER = FeaturePaper(off=("log_stability_every=null",))
