"""Bits per byte of text of the training loss, if the token files know their bytes. Evaluations report theirs, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neox.engine import Engine, Feature, RunStart, StepResult, TrainedModel
from neox.evaluation.results import bits_per_byte


def build(model: TrainedModel, start: RunStart) -> BitsPerByte | None:
    """Return the feature; None for objectives without a loss per token."""
    if not model.objective.per_token:
        return None
    return BitsPerByte()


class BitsPerByte(Feature):
    """Reports `train/LOSS_bits_per_byte` of each loss per token."""

    def __init__(self) -> None:
        self._bytes_per_token: float | None = None

    def on_data(self, engine: Engine, data: Any) -> None:
        """Take the bytes for each token of the training data."""
        self._bytes_per_token = data.bytes_per_token

    def after_step(self, engine: Engine, result: StepResult) -> Mapping[str, float]:
        """Return the bits per byte of the step's losses."""
        if self._bytes_per_token is None:
            return {}
        numbers = {}
        for name in engine.objective.per_token:
            loss = result.scores.get(name)
            if loss is not None:
                numbers[f"train/{name}_bits_per_byte"] = bits_per_byte(loss, self._bytes_per_token)
        return numbers
