"""Choice of the next token from logits: penalties, filters and sampling.

Their order is that of Hugging Face's processors (repetition penalty, minimum length, temperature, top-k, top-p), so
that equal settings give equal distributions.

Legend: B sequences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from neox.errors import GenerationError
from neox.generation.request import SamplingParams

_IMPOSSIBLE = float("-inf")


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make seen tokens less likely (CTRL, arXiv:1909.05858).

    Args:
        logits: Logits [B, V].
        seen: Tokens in the context, bool [B, V].
        penalty: Divisor of positive and factor of negative logits.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the `k` largest logits of each row [B, V] (and ties with the smallest of them); others become -inf."""
    smallest = logits.topk(min(k, logits.size(-1)), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < smallest, _IMPOSSIBLE)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest tokens of each row [B, V], most probable first, whose probabilities together reach `p`."""
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    drop = before >= p
    drop[:, 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), _IMPOSSIBLE)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits: Logits [B, V].
        uniforms: Random numbers in [0, 1), float64 [B]; equal ones draw equal tokens on every device and rank.

    Returns:
        Ids [B].
    """
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    # `right=True` finds the first token whose sum is greater, so one of probability zero is never drawn.
    chosen = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    return chosen.squeeze(1).clamp_(max=logits.size(-1) - 1)


def sequence_uniforms(seed: int, sequences: Sequence[int], length: int) -> Tensor:
    """Return random numbers in [0, 1) for whole sequences, float64 [B, length].

    Each sequence has a generator of its own, seeded by `seed` and its number. So its numbers do not depend on its batch
    or on the ranks that compute it.
    """
    rows = []
    for sequence in sequences:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + sequence * 7_919) % 2**63)
        rows.append(torch.rand(length, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def check_logits(logits: Tensor) -> None:
    """Raise GenerationError if logits [B, V] are not finite; argmax would choose a token without an error."""
    # A row's maximum is NaN if any element is, and infinite after an overflow.
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
        raise_not_finite()


def raise_not_finite() -> NoReturn:
    """Raise the GenerationError for logits that are not finite."""
    raise GenerationError(
        "the model's logits are not finite (NaN or infinity): the weights are broken or overflow in "
        "this precision; check the training loss of this checkpoint, try an earlier one, or set inference_precision: "
        "fp32"
    )


class TokenChooser:
    """Chooser of the next tokens of a batch, which keeps the step and the tokens seen by each sequence."""

    def __init__(
        self,
        params: SamplingParams,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        vocab_size: int,
        eod: int,
        device: torch.device,
    ) -> None:
        """Start a batch.

        Args:
            params: Sampling settings.
            prompts: Token ids of each sequence.
            numbers: Number of each sequence, which seeds its random numbers together with `params.seed`.
            vocab_size: Size of the vocabulary V.
            eod: End-of-document id; it and `params.stop_ids` are impossible during the first `min_new_tokens`.
            device: Device of the logits.
        """
        self.params = params
        self.ends = tuple(token for token in (eod, *params.stop_ids) if token < vocab_size)
        self.step = 0
        self.uniforms = None
        if params.samples:
            self.uniforms = sequence_uniforms(params.seed, numbers, params.max_new_tokens).to(device)
        self.seen = None
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
            for row, prompt in enumerate(prompts):
                self.seen[row, torch.tensor(list(prompt), device=device)] = True

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose ids [B] from logits [B, V]. Raises GenerationError if they are not finite."""
        params = self.params
        if self.uniforms is None and self.seen is None:
            ids = self._most_probable(logits)
            self.step += 1
            return ids
        check_logits(logits)
        scores = logits.float()
        if self.seen is not None:
            scores = penalize_repetition(scores, self.seen, params.repetition_penalty)
        if self.step < params.min_new_tokens:
            scores = exclude(scores, self.ends)
        if self.uniforms is None:
            ids = scores.argmax(dim=-1)
        else:
            ids = draw(filter_logits(scores, params), self.uniforms[:, self.step])
        if self.seen is not None:
            self.seen.scatter_(1, ids[:, None], True)
        self.step += 1
        return ids

    def _most_probable(self, logits: Tensor) -> Tensor:
        """Choose greedily, without a copy of the logits and with few operations, which matter for small models."""
        values, ids = logits.max(dim=-1)  # the lower id wins a tie
        # The maximum shows a NaN or positive infinity in a row, and a row of negative infinities.
        if not all(map(math.isfinite, values.tolist())):
            raise_not_finite()
        if self.step < self.params.min_new_tokens and not set(self.ends).isdisjoint(ids.tolist()):
            ids = exclude(logits, self.ends).argmax(dim=-1)
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
