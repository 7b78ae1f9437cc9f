"""Keys of the best checkpoint."""

from __future__ import annotations

from typing import Annotated, Literal

from neox.config.sections.base import Section
from neox.config.sections.conditions import OnlyWith


class BestCheckpointKeys(Section):
    """Keys of the best checkpoint."""

    save_best: Annotated[str | None, OnlyWith("save")] = None
    """Scalar of evaluations in training, such as `validation/lm_loss` or `eval/lambada_openai_acc`. The checkpoint with
    its best value, among those of steps that are evaluated too, gets the name `best` in `save` (a link; `best.json` has
    the value) and is not deleted by keep_last_n_checkpoints."""

    save_best_goal: Annotated[Literal["min", "max"] | None, OnlyWith("save_best")] = None
    """Whether the smallest or the largest value of save_best is the best. By default it is what the name says: the
    smallest loss, perplexity or bits per byte, the largest accuracy, exact match, F1, BLEU or margin. For other names
    it has to be given."""
