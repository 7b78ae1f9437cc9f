"""Normalisation of losses: what the losses of a step's labels are divided by.

Engines average over the micro batches and data ranks of a step. So that a step's loss is a mean over all of its labels,
or over all of its samples, the labels of each micro batch get weights that depend on the whole step.

Legend: B samples of a micro batch, L labels of a sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor


class LossNormalization(ABC):
    """A way to weight the labels of a step.

    Attributes:
        divides_micro_batches: Whether each micro batch has a divisor of its own.
    """

    divides_micro_batches = False

    @abstractmethod
    def amount(self, mask: Tensor) -> Tensor | None:
        """Return what a micro batch adds to the step's divisor, as an fp32 scalar; None if each has its own divisor.

        Args:
            mask: 1 for each label that counts, 0 for others, [B, L].
        """

    @abstractmethod
    def weights(self, mask: Tensor, share: float) -> Tensor:
        """Return the weight of each label [B, L]; a micro batch's loss is the weighted sum of its labels' losses.

        Args:
            mask: 1 for each label that counts, 0 for others, [B, L].
            share: Number of micro batches of the step over all data ranks, divided by the step's amount.
        """


class OverMicroBatch(LossNormalization):
    """Mean over the labels of each micro batch, and then over micro batches (gpt-neox)."""

    divides_micro_batches = True

    def amount(self, mask: Tensor) -> Tensor | None:
        """Return None: each micro batch has its own divisor."""
        return None

    def weights(self, mask: Tensor, share: float) -> Tensor:
        """Divide by the number of labels of the micro batch; 0 if it has none."""
        return mask / mask.sum().clamp(min=1.0)


class OverTokens(LossNormalization):
    """Mean over all labels of the step, so that the loss does not depend on how the batch is cut."""

    def amount(self, mask: Tensor) -> Tensor | None:
        """Return the number of labels."""
        return mask.sum()

    def weights(self, mask: Tensor, share: float) -> Tensor:
        """Divide by the number of labels of the step."""
        return mask * share


class OverSamples(LossNormalization):
    """Mean over the samples of the step of each one's mean; samples without labels do not count."""

    def amount(self, mask: Tensor) -> Tensor | None:
        """Return the number of samples that have labels."""
        return (mask.sum(1) > 0).float().sum()

    def weights(self, mask: Tensor, share: float) -> Tensor:
        """Divide by the number of labels of the sample, and by the number of samples of the step."""
        return mask / mask.sum(1, keepdim=True).clamp(min=1.0) * share


LOSS_NORMALIZATIONS: Mapping[str, LossNormalization] = MappingProxyType(
    {"micro_batch": OverMicroBatch(), "tokens": OverTokens(), "samples": OverSamples()}
)
"""Value of `loss_normalization` -> normalisation."""
