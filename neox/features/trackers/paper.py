"""Trackers on paper."""

from __future__ import annotations

from neox.plan.feature import FeaturePaper

PAPER = FeaturePaper(off=("use_wandb=false", "tensorboard_dir=null"))
