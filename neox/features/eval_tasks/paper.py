"""Evaluation tasks in training on paper."""

from __future__ import annotations

from neox.plan.feature import FeaturePaper

PAPER = FeaturePaper(off=("eval_tasks=null",))
