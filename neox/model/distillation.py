"""Distillation loss: KL divergence between teacher and student over the teacher's K largest logits.

    p         softmax of the teacher's K logits divided by the temperature t
    q         softmax of all logits of the student divided by t
    q'        softmax of the student's logits of the same K tokens divided by t
    forward   t^2 sum over K of p (log p - log q)                  arXiv:1503.02531
    reverse   t^2 sum over K of q' (log q' - log p)                arXiv:2306.08543

With K = V they are the exact divergences KL(p || q) and KL(q || p), times t^2.

Legend: R tokens, r tokens of a chunk, K logits of the teacher, V vocabulary, T tensor ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from neox.parallel import ParallelGrid, gather_tensor_ranks

Direction = Literal["forward", "reverse"]


class TeacherLogits(NamedTuple):
    """The largest logits of a teacher.

    Attributes:
        ids: Their token ids, int64 [R, K].
        logits: Their values, fp32 [R, K]. A constant added to all logits of a row changes nothing.
    """

    ids: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Distillation:
    """KL divergence and cross entropy of one chunk of tokens at a time (a `neox.model.cross_entropy.ChunkLoss`).

    Attributes:
        teacher: Logits of the teacher.
        labels: Next tokens [R].
        weights: Weights of the tokens [R].
        direction: Direction of the divergence.
        temperature: Temperature of both distributions.
        share: Weight w of the divergence; the cross entropy has the weight 1 - w.
        grid: Process groups.
    """

    teacher: TeacherLogits
    labels: Tensor
    weights: Tensor
    direction: Direction
    temperature: float
    share: float
    grid: ParallelGrid

    @property
    def factors(self) -> tuple[float, ...]:
        """Weights of the divergence and of the cross entropy in the trained loss."""
        return (self.share, 1.0 - self.share)

    @property
    def _row_temperature(self) -> float:
        """Temperature of the softmax over all tokens; 1 for the reverse divergence, which uses only K tokens."""
        if self.direction == "reverse":
            return 1.0
        return self.temperature

    def __call__(
        self, logits: Tensor, here: slice, first_column: int, *, needs_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted sums of divergence and cross entropy over a chunk, and the trained loss's gradient."""
        scores = logits.float()
        weights = self.weights[here]
        ids = torch.cat((self.teacher.ids[here], self.labels[here].unsqueeze(1)), dim=1)  # [r, K + 1]
        columns, elsewhere = _own_columns(ids - first_column, scores.shape[1])
        rows = _RowStatistics.of(scores, columns, elsewhere, self._row_temperature, self.grid)
        divergences, teacher_gradient, softmax_factor = self._divergences(rows, here)
        cross_entropies = rows.log_sums - rows.picked[:, -1]
        parts = torch.stack(((weights * divergences).sum(), (weights * cross_entropies).sum()))
        if not needs_gradient:
            return parts, None
        divergence_share, entropy_share = self.factors
        divergence_weights = (divergence_share * weights).unsqueeze(1)  # [r, 1]
        entropy_weights = (entropy_share * weights).unsqueeze(1)
        gradient = self._softmax_gradient(scores, rows, softmax_factor * divergence_weights, entropy_weights)
        picked = torch.cat((teacher_gradient * divergence_weights, -entropy_weights), dim=1)
        gradient.scatter_add_(1, columns, picked.masked_fill(elsewhere, 0.0))
        return parts, gradient.to(logits.dtype)

    def _softmax_gradient(
        self, scores: Tensor, rows: _RowStatistics, tempered_factors: Tensor, factors: Tensor
    ) -> Tensor:
        """Return the part of the gradient that all logits get: the softmax with and without temperature, times factors.

        Args:
            scores: This rank's logits [r, V/T]; overwritten with the result.
            rows: Statistics of the rows.
            tempered_factors: Factors of the softmax of the logits divided by the temperature [r, 1].
            factors: Factors of the softmax without temperature [r, 1].
        """
        if self._row_temperature == 1.0:
            return scores.sub_(rows.log_sums.unsqueeze(1)).exp_().mul_(tempered_factors + factors)
        tempered = (scores / self.temperature).sub_(rows.tempered_log_sums.unsqueeze(1)).exp_().mul_(tempered_factors)
        return scores.sub_(rows.log_sums.unsqueeze(1)).exp_().mul_(factors).add_(tempered)

    def _divergences(self, rows: _RowStatistics, here: slice) -> tuple[Tensor, Tensor, float]:
        """Return the divergences of a chunk, and their derivatives.

        Returns:
            The divergences [r]; their derivatives with respect to the logits of the teacher's tokens [r, K]; and the
            factor of the softmax in the derivatives with respect to all logits.
        """
        temperature = self.temperature
        log_p = (self.teacher.logits[here].float() / temperature).log_softmax(1)
        own = rows.picked[:, :-1] / temperature
        if self.direction == "forward":
            p = log_p.exp()
            log_q = own - rows.tempered_log_sums.unsqueeze(1)
            divergences = (p * (log_p - log_q)).sum(1)
            return temperature**2 * divergences, -temperature * p, temperature
        log_q = own.log_softmax(1)
        q = log_q.exp()
        difference = log_q - log_p
        divergences = (q * difference).sum(1)
        return temperature**2 * divergences, temperature * q * (difference - divergences.unsqueeze(1)), 0.0


class _RowStatistics(NamedTuple):
    """Numbers computed from whole rows of logits (over all tensor ranks), in fp32.

    Attributes:
        picked: Logits of the teacher's tokens and of the label [r, K + 1].
        log_sums: logsumexp of the logits [r].
        tempered_log_sums: logsumexp of the logits divided by the temperature [r].
    """

    picked: Tensor
    log_sums: Tensor
    tempered_log_sums: Tensor

    @classmethod
    def of(
        cls, scores: Tensor, columns: Tensor, elsewhere: Tensor, temperature: float, grid: ParallelGrid
    ) -> _RowStatistics:
        """Compute the statistics of rows that are split over tensor ranks.

        Args:
            scores: This rank's logits [r, V/T].
            columns: Columns of the picked tokens in `scores` [r, K + 1].
            elsewhere: Whether another rank holds the token [r, K + 1].
            temperature: The temperature.
            grid: Process groups.
        """
        picked = scores.gather(1, columns).masked_fill(elsewhere, 0.0)
        log_sums = scores.logsumexp(1)
        tempered_log_sums = log_sums
        if temperature != 1.0:
            tempered_log_sums = (scores / temperature).logsumexp(1)
        if grid.tp_size == 1:
            return cls(picked, log_sums, tempered_log_sums)
        sums = gather_tensor_ranks(torch.stack((log_sums, tempered_log_sums)), grid).logsumexp(0)  # [T, 2, r] -> [2, r]
        return cls(gather_tensor_ranks(picked, grid).sum(0), sums[0], sums[1])


def _own_columns(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the columns of ids on this rank, and whether another rank holds them instead. Their column is then 0.

    Args:
        ids: Ids, counted from this rank's first one.
        size: Number of this rank's columns.
    """
    elsewhere = (ids < 0) | (ids >= size)
    return ids.masked_fill(elsewhere, 0), elsewhere
