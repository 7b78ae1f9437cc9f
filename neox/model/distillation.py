"""Distance of a network's distribution of next tokens from a teacher's, whose largest logits are known.

    p         softmax of the teacher's K logits, divided by the temperature t
    q         softmax of the network's logits, divided by t
    forward   t^2 sum over K of p (log p - log q)                  arXiv:1503.02531
    reverse   t^2 sum over K of q' (log q' - log p)                arXiv:2306.08543; q' is q over these K tokens only

With as many logits as the vocabulary has, both are the whole divergences.

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
        ids: Their tokens, int64 [R, K].
        logits: Their values up to a constant for each token, fp32 [R, K].
    """

    ids: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Distillation:
    """Divergence from the teacher and cross entropy of chunks of tokens (`neox.model.cross_entropy.ChunkLoss`).

    Attributes:
        teacher: Logits of the teacher.
        labels: Next tokens [R].
        weights: Weights of the tokens [R].
        direction: Direction of the divergence.
        temperature: Temperature of both distributions.
        share: Factor of the divergence; that of the cross entropy is the rest up to 1.
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
        """Factors of divergence and cross entropy in the trained loss."""
        return (self.share, 1.0 - self.share)

    @property
    def _row_temperature(self) -> float:
        """Temperature of the softmax of whole rows: the reverse divergence needs none of all tokens."""
        if self.direction == "reverse":
            return 1.0
        return self.temperature

    def __call__(
        self, logits: Tensor, here: slice, first_column: int, *, needs_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return divergence and cross entropy of a chunk, and the gradient of the trained loss."""
        scores = logits.float()
        weights = self.weights[here]
        ids = torch.cat((self.teacher.ids[here], self.labels[here].unsqueeze(1)), dim=1)  # [r, K + 1]
        columns, elsewhere = _own_columns(ids - first_column, scores.shape[1])
        found = _Sums.of(scores, columns, elsewhere, self._row_temperature, self.grid)
        divergences, of_teacher, of_softmax = self._divergences(found, here)
        cross_entropies = found.log_sums - found.picked[:, -1]
        parts = torch.stack(((weights * divergences).sum(), (weights * cross_entropies).sum()))
        if not needs_gradient:
            return parts, None
        of_divergence, of_entropy = self.factors
        scale = (of_divergence * weights).unsqueeze(1)  # [r, 1]
        rest = (of_entropy * weights).unsqueeze(1)
        gradient = self._of_softmax(scores, found, of_softmax * scale, rest)
        picked = torch.cat((of_teacher * scale, -rest), dim=1)
        gradient.scatter_add_(1, columns, picked.masked_fill(elsewhere, 0.0))
        return parts, gradient.to(logits.dtype)

    def _of_softmax(self, scores: Tensor, found: _Sums, warm_factors: Tensor, factors: Tensor) -> Tensor:
        """Return the softmax of whole rows with the temperature and without it, each with its factors, in their place.

        Args:
            scores: This rank's logits [r, V/T], which are overwritten.
            found: Sums of the rows.
            warm_factors: Factors of the softmax of the logits divided by the temperature [r, 1].
            factors: Factors of the softmax [r, 1].
        """
        if self._row_temperature == 1.0:
            return scores.sub_(found.log_sums.unsqueeze(1)).exp_().mul_(warm_factors + factors)
        warm = (scores / self.temperature).sub_(found.warm_log_sums.unsqueeze(1)).exp_().mul_(warm_factors)
        return scores.sub_(found.log_sums.unsqueeze(1)).exp_().mul_(factors).add_(warm)

    def _divergences(self, found: _Sums, here: slice) -> tuple[Tensor, Tensor, float]:
        """Return the divergences of a chunk [r], and their derivatives.

        Returns:
            The divergences; their derivatives by the logits of the teacher's tokens [r, K]; and the factor of the whole
            softmax in the derivatives by all logits.
        """
        temperature = self.temperature
        log_p = (self.teacher.logits[here].float() / temperature).log_softmax(1)
        own = found.picked[:, :-1] / temperature
        if self.direction == "forward":
            p = log_p.exp()
            log_q = own - found.warm_log_sums.unsqueeze(1)
            divergences = (p * (log_p - log_q)).sum(1)
            return temperature**2 * divergences, -temperature * p, temperature
        log_q = own.log_softmax(1)
        q = log_q.exp()
        difference = log_q - log_p
        divergences = (q * difference).sum(1)
        return temperature**2 * divergences, temperature * q * (difference - divergences.unsqueeze(1)), 0.0


class _Sums(NamedTuple):
    """What is needed of whole rows of logits, in fp32.

    Attributes:
        picked: Logits of some tokens [r, K + 1].
        log_sums: Logarithms of the sums of the exponentials [r].
        warm_log_sums: The same of the logits divided by the temperature [r].
    """

    picked: Tensor
    log_sums: Tensor
    warm_log_sums: Tensor

    @classmethod
    def of(cls, scores: Tensor, columns: Tensor, elsewhere: Tensor, temperature: float, grid: ParallelGrid) -> _Sums:
        """Return the sums of rows that tensor ranks divide.

        Args:
            scores: This rank's logits [r, V/T].
            columns: Columns of the picked tokens here [r, K + 1].
            elsewhere: Whether another rank has them [r, K + 1].
            temperature: The temperature.
            grid: Process groups.
        """
        picked = scores.gather(1, columns).masked_fill(elsewhere, 0.0)
        log_sums = scores.logsumexp(1)
        warm_log_sums = log_sums
        if temperature != 1.0:
            warm_log_sums = (scores / temperature).logsumexp(1)
        if grid.tp_size == 1:
            return cls(picked, log_sums, warm_log_sums)
        sums = gather_tensor_ranks(torch.stack((log_sums, warm_log_sums)), grid).logsumexp(0)  # [T, 2, r] -> [2, r]
        return cls(gather_tensor_ranks(picked, grid).sum(0), sums[0], sums[1])


def _own_columns(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return columns of ids that count from this rank's first one, and whether another rank has them."""
    elsewhere = (ids < 0) | (ids >= size)
    return ids.masked_fill(elsewhere, 0), elsewhere
