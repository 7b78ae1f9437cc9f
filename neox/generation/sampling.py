"""Choice of the next token from logits: penalties, filters and sampling.

Their order is that of Hugging Face's processors (repetition penalty, minimum length, temperature, top-k, top-p), so
that equal settings give equal distributions.

Legend: B sequences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from neox.errors import GenerationError
from neox.generation.request import SamplingParams

_IMPOSSIBLE = float("-inf")
_SEED_STRIDE = 1_000_003
_SEQUENCE_STRIDE = 7_919
"""Primes that keep the seeds of sequences apart: other seeds or sequences give other generators."""
_NOT_FINITE = (
    "the model's logits are not finite (NaN or infinity): the weights are broken or overflow in "
    "this precision; check the training loss of this checkpoint, try an earlier one, or set inference_precision: "
    "fp32"
)


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make seen tokens less likely (CTRL, arXiv:1909.05858).

    Args:
        logits: Logits [B, V].
        seen: Tokens in the context, bool [B, V].
        penalty: Divisor of positive and factor of negative logits.
    """
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, lowered, logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the `k` largest logits of each row [B, V] (and ties with the smallest of them); others become -inf."""
    smallest = logits.topk(min(k, logits.size(-1)), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < smallest, _IMPOSSIBLE)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest tokens of each row [B, V], most probable first, whose probabilities together reach `p`."""
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    more_probable = probabilities.cumsum(dim=-1) - probabilities  # of all tokens before each one in the order
    drop = more_probable >= p
    drop[:, 0] = False  # the most probable one stays
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), _IMPOSSIBLE)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row: the first token v with p(0) + ... + p(v) > uniform.

    Args:
        logits: Logits [B, V].
        uniforms: Random numbers in [0, 1), float64 [B]; equal ones draw equal tokens on every device and rank.

    Returns:
        Ids [B].
    """
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    # Rounding leaves the last sum a little off 1. `right=True` finds a sum that is greater, not equal, so that a token
    # of probability 0 is never drawn.
    chosen = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    return chosen.squeeze(1).clamp_(max=logits.size(-1) - 1)


def sequence_uniforms(seed: int, sequence_ids: Sequence[int], length: int) -> Tensor:
    """Return random numbers in [0, 1) for whole sequences, float64 [B, length].

    Each sequence has a generator of its own, seeded by `seed` and its number. So its numbers do not depend on its batch
    or on the ranks that compute it.
    """
    rows = []
    for sequence in sequence_ids:
        generator = torch.Generator().manual_seed((seed * _SEED_STRIDE + sequence * _SEQUENCE_STRIDE) % 2**63)
        rows.append(torch.rand(length, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def check_logits(logits: Tensor) -> None:
    """Raise GenerationError if logits [B, V] are not finite; argmax would choose a token without an error."""
    # A row's maximum is NaN if any element is, and infinite after an overflow.
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
        raise GenerationError(_NOT_FINITE)


class TokenChooser:
    """Chooses the next tokens of a batch, one call for each step.

    Attributes:
        step: Number of tokens that were chosen for each sequence.
        uniforms: Random numbers of each sequence and step, [B, max_new_tokens]; None for greedy decoding.
        seen: Tokens in the context of each sequence, bool [B, V]; None without a repetition penalty.
        end_tokens: Ids that are impossible during the first `min_new_tokens`.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompts: Sequence[Sequence[int]],
        sequence_ids: Sequence[int],
        vocab_size: int,
        eod: int,
        device: torch.device,
    ) -> None:
        """Start a batch.

        Args:
            params: Sampling settings.
            prompts: Token ids of each sequence.
            sequence_ids: Number of each sequence, which seeds its random numbers together with `params.seed`.
            vocab_size: Size of the vocabulary V.
            eod: End-of-document id, an end token beside `params.stop_ids`.
            device: Device of the logits.
        """
        self.params = params
        self.step = 0
        self.end_tokens = tuple(token for token in (eod, *params.stop_ids) if token < vocab_size)
        self.uniforms: Tensor | None = None
        if params.samples:
            self.uniforms = sequence_uniforms(params.seed, sequence_ids, params.max_new_tokens).to(device)
        self.seen: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
            for row, prompt in enumerate(prompts):
                self.seen[row, torch.tensor(list(prompt), device=device)] = True

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose ids [B] from logits [B, V]. Raises GenerationError if they are not finite."""
        if self.uniforms is None and self.seen is None:
            ids = self._most_probable(logits)
        else:
            ids = self._from_scores(logits)
        self.step += 1
        return ids

    def _most_probable(self, logits: Tensor) -> Tensor:
        """Choose greedily, without a copy of the logits and with few operations, which matter for small models."""
        values, ids = logits.max(dim=-1)  # the lower id wins a tie
        # The maximum shows a NaN or positive infinity in a row, and a row of negative infinities.
        if not all(map(math.isfinite, values.tolist())):
            raise GenerationError(_NOT_FINITE)
        must_go_on = self.step < self.params.min_new_tokens
        if must_go_on and not set(self.end_tokens).isdisjoint(ids.tolist()):
            ids = exclude(logits, self.end_tokens).argmax(dim=-1)
        return ids

    def _from_scores(self, logits: Tensor) -> Tensor:
        """Choose after the repetition penalty, or draw, or both."""
        check_logits(logits)
        scores = logits.float()
        if self.seen is not None:
            scores = penalize_repetition(scores, self.seen, self.params.repetition_penalty)
        if self.step < self.params.min_new_tokens:
            scores = exclude(scores, self.end_tokens)
        if self.uniforms is None:
            ids = scores.argmax(dim=-1)
        else:
            ids = draw(filter_logits(scores, self.params), self.uniforms[:, self.step])
        if self.seen is not None:
            self.seen.scatter_(1, ids[:, None], True)
        return ids


def exclude(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return logits [B, V] with some tokens made impossible."""
    return logits.index_fill(1, torch.tensor(list(tokens), device=logits.device), _IMPOSSIBLE)


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Apply temperature, top-k and top-p to logits [B, V]."""
    logits = logits / params.temperature
    if params.top_k:
        logits = keep_top_k(logits, params.top_k)
    if 0 < params.top_p < 1:
        logits = keep_top_p(logits, params.top_p)
    return logits
