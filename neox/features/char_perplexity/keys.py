"""Key of perplexities per character."""

from __future__ import annotations

from typing import Annotated

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes


class CharPerplexityKeys(Section):
    """Key of perplexities per character."""

    char_level_ppl: Annotated[
        bool, Excludes("objective", ("masked_lm",), reason="its loss is that of masked tokens only")
    ] = False
    """Also report the perplexity per character in evaluations, as `validation/lm_loss_char_ppl`: exp(loss x tokens /
    characters), over the tokens that enter the loss; of several sets all losses over all characters.
    These tokens are decoded to text, which takes time."""
