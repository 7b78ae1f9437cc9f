"""From logits to the next token: penalties, filters, and the draw.

The order is that of Hugging Face's processors (repetition penalty, minimum length, temperature, top-k, top-p), so that
equal settings give equal distributions there. Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from neox.errors import GenerationError
from neox.generation.params import SamplingParams

_NEVER = float("-inf")


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens that were seen less likely: logits [B, V], seen bool [B, V]."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Forbid all but the `k` largest logits of each row (ties with the smallest of them stay)."""
    smallest = logits.topk(min(k, logits.size(-1)), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < smallest, _NEVER)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Forbid all but the fewest tokens, most probable first, whose probabilities together reach `p`."""
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    drop = before >= p
    drop[:, 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), _NEVER)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverting the distribution function.

    logits [B, V]; uniforms float64 [B] in [0, 1). They draw the same tokens on every device and rank.
    """
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    # `right=True` finds the first token whose sum is greater, so one of probability zero is never drawn.
    chosen = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    return chosen.squeeze(1).clamp_(max=logits.size(-1) - 1)


def sequence_uniforms(seed: int, sequences: list[int], length: int) -> Tensor:
    """Random numbers for whole sequences, float64 [B, length].

    Each sequence has its own generator (from the seed and its number), so that neither the batch it happens to be in
    nor the ranks that compute it change what is drawn.
    """
    rows = []
    for sequence in sequences:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + sequence * 7_919) % 2**63)
        rows.append(torch.rand(length, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def check_logits(logits: Tensor) -> None:
    """Refuse logits that are not numbers, which argmax would turn into token ids without a word."""
    # The largest of a row is NaN if any is; infinities of the sort that fp16 overflow makes are found too.
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
        raise_not_finite()


def raise_not_finite() -> NoReturn:
    raise GenerationError(
        "the model's logits are not finite (NaN or infinity): the weights are broken, or overflow "
        "in this precision; look at the training loss of this checkpoint, try an earlier one, or generate in fp32"
    )


class TokenChooser:
    """Choose the next tokens of a batch, remembering what each sequence has said.

    prompts: token ids of each sequence; numbers: what tells each sequence's random numbers apart; eod: id of
    end-of-document, impossible during the first `min_new_tokens`.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompts: list[list[int]],
        numbers: list[int],
        vocab_size: int,
        eod: int,
        device: torch.device,
    ) -> None:
        self.params, self.eod = params, eod
        self.step = 0
        self.uniforms = None
        if params.samples:
            self.uniforms = sequence_uniforms(params.seed, numbers, params.max_new_tokens).to(device)
        self.seen = None
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
            for row, prompt in enumerate(prompts):
                self.seen[row, torch.tensor(prompt, device=device)] = True

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose from logits [B, V] -> ids [B]. Raises GenerationError where they are not numbers."""
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
            scores = without(scores, self.eod)
        if self.uniforms is None:
            ids = scores.argmax(dim=-1)
        else:
            ids = draw(filter_logits(scores, params), self.uniforms[:, self.step])
        if self.seen is not None:
            self.seen.scatter_(1, ids[:, None], True)
        self.step += 1
        return ids

    def _most_probable(self, logits: Tensor) -> Tensor:
        """Choose greedily with no copy of the logits and few operations, which count at a small model's step."""
        values, ids = logits.max(dim=-1)  # the lower id wins a tie
        # Where a row holds NaN or a positive infinity, the largest is one; a row of negative ones is found too.
        if not all(map(math.isfinite, values.tolist())):
            raise_not_finite()
        if self.step < self.params.min_new_tokens and self.eod in ids.tolist():
            ids = without(logits, self.eod).argmax(dim=-1)
        return ids


def without(logits: Tensor, token: int) -> Tensor:
    """Return logits [B, V] that forbid a token."""
    return logits.index_fill(1, torch.tensor([token], device=logits.device), _NEVER)


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Apply temperature, top-k and top-p to logits [B, V]."""
    logits = logits / params.temperature
    if params.top_k:
        logits = keep_top_k(logits, params.top_k)
    if 0 < params.top_p < 1:
        logits = keep_top_p(logits, params.top_p)
    return logits
