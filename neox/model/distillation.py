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

    def __call__(
        self, logits: Tensor, here: slice, first_column: int, *, needs_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted sums of divergence and cross entropy over a chunk, and the trained loss's gradient.

        Args:
            logits: This rank's logits of the chunk [r, V/T].
            here: Tokens of the chunk.
            first_column: This rank's first token of the vocabulary.
            needs_gradient: Whether to compute the gradient w.r.t. the logits.
        """
        scores = logits.float()
        weights = self.weights[here]  # [r]
        ids = torch.cat((self.teacher.ids[here], self.labels[here].unsqueeze(1)), dim=1)  # [r, K + 1]
        columns, elsewhere = _own_columns(ids - first_column, scores.shape[1])
        # The reverse divergence needs no softmax over all tokens.
        row_temperature = self.temperature if self.direction == "forward" else 1.0
        rows = _RowStatistics.of(scores, columns, elsewhere, row_temperature, self.grid)

        log_p = (self.teacher.logits[here].float() / self.temperature).log_softmax(1)  # [r, K]
        if self.direction == "forward":
            divergence = self._forward(rows, log_p)
        else:
            divergence = self._reverse(rows, log_p)
        cross_entropies = rows.log_sums - rows.picked[:, -1]  # [r]
        parts = torch.stack(((weights * divergence.values).sum(), (weights * cross_entropies).sum()))
        if not needs_gradient:
            return parts, None

        # All logits get the softmax (of the divergence, and of the cross entropy), the picked ones also their own part.
        divergence_share, entropy_share = self.factors
        divergence_weights = (divergence_share * weights).unsqueeze(1)  # [r, 1]
        entropy_weights = (entropy_share * weights).unsqueeze(1)
        tempered_factors = divergence.softmax_factor * divergence_weights
        if row_temperature == 1.0:
            gradient = scores.sub_(rows.log_sums.unsqueeze(1)).exp_().mul_(tempered_factors + entropy_weights)
        else:
            tempered = (scores / row_temperature).sub_(rows.tempered_log_sums.unsqueeze(1)).exp_()
            tempered.mul_(tempered_factors)
            gradient = scores.sub_(rows.log_sums.unsqueeze(1)).exp_().mul_(entropy_weights).add_(tempered)
        picked = torch.cat((divergence.teacher_gradient * divergence_weights, -entropy_weights), dim=1)
        gradient.scatter_add_(1, columns, picked.masked_fill(elsewhere, 0.0))
        return parts, gradient.to(logits.dtype)

    def _forward(self, rows: _RowStatistics, log_p: Tensor) -> _Divergence:
        """Return t^2 sum of p (log p - log q), where q is the student's softmax over all tokens."""
        temperature = self.temperature
        p = log_p.exp()  # [r, K]
        log_q = rows.picked[:, :-1] / temperature - rows.tempered_log_sums.unsqueeze(1)
        values = temperature**2 * (p * (log_p - log_q)).sum(1)
        return _Divergence(values, teacher_gradient=-temperature * p, softmax_factor=temperature)

    def _reverse(self, rows: _RowStatistics, log_p: Tensor) -> _Divergence:
        """Return t^2 sum of q' (log q' - log p), where q' is the student's softmax over the teacher's tokens."""
        temperature = self.temperature
        log_q = (rows.picked[:, :-1] / temperature).log_softmax(1)
        q = log_q.exp()  # [r, K]
        difference = log_q - log_p
        divergences = (q * difference).sum(1)
        teacher_gradient = temperature * q * (difference - divergences.unsqueeze(1))
        return _Divergence(temperature**2 * divergences, teacher_gradient, softmax_factor=0.0)


class _Divergence(NamedTuple):
    """Divergences of a chunk and their derivatives.

    Attributes:
        values: t^2 times the divergences [r].
        teacher_gradient: Derivatives by the logits of the teacher's tokens, apart from the softmax [r, K].
        softmax_factor: Factor of the softmax over all tokens in the derivatives by all logits.
    """

    values: Tensor
    teacher_gradient: Tensor
    softmax_factor: float


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
