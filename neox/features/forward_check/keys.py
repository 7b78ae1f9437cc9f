"""Key of the check of loaded checkpoints."""

from __future__ import annotations

from typing import Annotated

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWithAny


class ForwardCheckKeys(Section):
    """Key of the check of loaded checkpoints."""

    checkpoint_validation_with_forward_pass: Annotated[
        bool,
        OnlyWithAny(("load", "save")),
        Excludes("objective", ("masked_lm",), reason="the check is for causal networks"),
    ] = False
    """Keep the logits of a fixed input in checkpoints, and compare them after loading."""
