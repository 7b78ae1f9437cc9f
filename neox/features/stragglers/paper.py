"""The comparison of hosts on paper."""

from __future__ import annotations

from neox.plan.feature import FeaturePaper

PAPER = FeaturePaper(off=("straggler_steps=0",))
