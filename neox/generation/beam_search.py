"""Beam search: the most probable continuation among those that a few beams reach.

Scores and stopping are those of Hugging Face's default (`early_stopping=False`): a beam that ends is worth its
log-probability / length ** length_penalty, and the search goes on while the best running beam, at its length now, could
still beat the worst of `num_beams` finished ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from neox.generation.decoding import Continuation, LanguageModel, room
from neox.generation.params import SamplingParams
from neox.generation.sampling import check_logits, penalize_repetition
from neox.generation.text_stream import TextCodec


@dataclass(frozen=True)
class _Beam:
    """A running or finished beam: new ids (the end-of-document that ended it included), and what it is worth."""

    tokens: tuple[int, ...]
    score: float


@torch.inference_mode()
def beam_search(model: LanguageModel, prompt: Sequence[int], params: SamplingParams, codec: TextCodec) -> Continuation:
    """Continue one prompt (ids) by its best beam. Raises GenerationError like `decode`."""
    limit = room(model, prompt, params)
    beams = params.num_beams
    decoding = model.begin([len(prompt)], len(prompt) + limit)
    running = [_Beam((), 0.0)]
    finished: list[_Beam] = []
    tokens = torch.tensor([list(prompt)], device=model.device)
    for length in range(1, limit + 1):
        scores = _log_probabilities(decoding.feed(tokens), prompt, running, params, codec.eod)
        parents, candidates = _best(scores, running, 2 * beams)
        last = length == limit
        # Only a candidate among the best `num_beams` may end: one that ends further down lost to a running one.
        for beam in candidates[:beams]:
            if last or beam.tokens[-1] == codec.eod:
                finished.append(_Beam(beam.tokens, beam.score / length**params.length_penalty))
        finished = sorted(finished, key=lambda beam: -beam.score)[:beams]
        going = [i for i, beam in enumerate(candidates) if beam.tokens[-1] != codec.eod][:beams]
        running = [candidates[i] for i in going]
        if last or not _can_improve(running, finished, length, params):
            break
        decoding.reorder(torch.tensor([parents[i] for i in going], device=model.device))
        tokens = torch.tensor([[beam.tokens[-1]] for beam in running], device=model.device)
    best = finished[0].tokens
    ended = best[-1] == codec.eod
    new = list(best[:-1] if ended else best)
    return Continuation(tokens=new, text=codec.decode(new), finished=ended)


def _log_probabilities(
    logits: Tensor, prompt: Sequence[int], running: list[_Beam], params: SamplingParams, eod: int
) -> Tensor:
    """Return log-probabilities [beams, V] after the penalties, end-of-document forbidden before the minimum."""
    check_logits(logits)
    scores = logits.float().log_softmax(dim=-1)
    if params.repetition_penalty != 1.0:
        seen = torch.zeros_like(scores, dtype=torch.bool)
        for row, beam in enumerate(running):
            seen[row, torch.tensor([*prompt, *beam.tokens], device=scores.device)] = True
        scores = penalize_repetition(scores, seen, params.repetition_penalty)
    if len(running[0].tokens) < params.min_new_tokens:
        scores[:, eod] = float("-inf")
    return scores


def _best(scores: Tensor, running: list[_Beam], count: int) -> tuple[list[int], list[_Beam]]:
    """Return the `count` best one-token extensions of all beams, best first, and the beam each came from."""
    totals = scores + torch.tensor([[beam.score] for beam in running], device=scores.device)
    values, places = totals.flatten().topk(min(count, totals.numel()))
    width = scores.size(1)
    parents = [place // width for place in places.tolist()]
    extended = [
        _Beam((*running[parent].tokens, place % width), value)
        for parent, place, value in zip(parents, places.tolist(), values.tolist(), strict=True)
    ]
    return parents, extended


def _can_improve(running: list[_Beam], finished: list[_Beam], length: int, params: SamplingParams) -> bool:
    """Whether a running beam could still end better than the worst of a full set of finished ones."""
    if not running:
        return False
    if len(finished) < params.num_beams:
        return True
    return running[0].score / length**params.length_penalty > finished[-1].score
