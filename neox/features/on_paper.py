"""The halves of all features that need no torch: the `PAPER` of every `neox/features/NAME/paper.py`, by name.

Only `plan` and `preflight` read them.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from neox.plan.feature import FeaturePaper


def _papers() -> tuple[FeaturePaper, ...]:
    found = []
    for file in sorted(Path(__file__).parent.glob("*/paper.py")):
        paper: FeaturePaper = importlib.import_module(f"neox.features.{file.parent.name}.paper").PAPER
        found.append(paper)
    return tuple(found)


PAPERS = _papers()
