"""Exports in training on paper."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.feature import FeaturePaper
from neox.problems import Problem


def problems(config: NeoXConfig) -> Iterator[Problem]:
    """An address of the hub has two parts."""
    repository = config.checkpoint.hf_export_hub
    if repository is not None and repository.count("/") != 1:
        yield config.problem("hf_export_hub", "must be USER/NAME, a repository of the Hugging Face hub")


PAPER = FeaturePaper(problems=problems, off=("hf_export=null",))
