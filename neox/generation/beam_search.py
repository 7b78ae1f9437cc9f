"""Beam search: the continuation of one prompt with the best score.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from neox.generation.decoding import Continuation, LanguageModel, check_ids
from neox.generation.request import SamplingParams
from neox.generation.sampling import check_logits, penalize_repetition
from neox.tokenizer import Tokenizer
from neox.tokenizer.positions import text_after


class RunningBeam(NamedTuple):
    """A continuation that can grow.

    Attributes:
        tokens: New ids.
        log_probability: Sum of their log-probabilities.
        parent: Row in the batch of the beam that it extends by one token.
    """

    tokens: tuple[int, ...]
    log_probability: float
    parent: int


class FinishedBeam(NamedTuple):
    """A continuation that has ended.

    Attributes:
        tokens: New ids, with the end token if one ended it.
        score: Log-probability / length ** length_penalty.
    """

    tokens: tuple[int, ...]
    score: float


@torch.inference_mode()
def beam_search(model: LanguageModel, prompt: Sequence[int], params: SamplingParams, codec: Tokenizer) -> Continuation:
    """Continue one prompt by its best beam.

    Scores and stopping are those of Hugging Face's default (`early_stopping=False`). The search goes on while the best
    running beam, at its current length, could still beat the worst of `num_beams` finished ones.

    Args:
        model: Model to generate with.
        prompt: Token ids.
        params: Settings. Those for sampling are not used; `SamplingParams` refuses stop strings and stop ids with
            beams, so only the tokenizer's end ids end a beam.
        codec: Tokenizer.

    Raises:
        GenerationError: As `decode` does.
    """
    limit = params.token_limit(len(prompt), model.max_length)
    check_ids([prompt], model)
    num_beams = params.num_beams
    end_tokens = codec.end_ids
    banned_tokens = [token for token in end_tokens if token < model.vocab_size]  # before the minimum length
    # If all end tokens of all beams are among the best extensions, `num_beams` others are still left.
    num_candidates = (1 + len(end_tokens)) * num_beams

    decoding = model.begin([len(prompt)], len(prompt) + limit)
    tokens = torch.tensor([list(prompt)], device=model.device)  # then one token of each running beam
    seen: Tensor | None = None  # tokens in the context of each running beam, bool [beams, V]
    if params.repetition_penalty != 1.0:
        seen = torch.zeros(1, model.vocab_size, dtype=torch.bool, device=model.device)
        seen[0, tokens[0]] = True
    running = [RunningBeam((), 0.0, parent=0)]
    finished: list[FinishedBeam] = []

    for length in range(1, limit + 1):
        logits = decoding.feed(tokens)
        check_logits(logits)
        log_probabilities = logits.float().log_softmax(dim=-1)  # [beams, V]
        if seen is not None:
            log_probabilities = penalize_repetition(log_probabilities, seen, params.repetition_penalty)
        if length <= params.min_new_tokens:
            log_probabilities[:, banned_tokens] = float("-inf")
        candidates = _best_extensions(running, log_probabilities, num_candidates)

        # Only a candidate among the best `num_beams` may finish: lower ones lost to a running beam.
        is_last = length == limit
        for beam in candidates[:num_beams]:
            if is_last or beam.tokens[-1] in end_tokens:
                finished.append(FinishedBeam(beam.tokens, beam.log_probability / length**params.length_penalty))
        finished.sort(key=lambda beam: -beam.score)
        del finished[num_beams:]

        running = [beam for beam in candidates if beam.tokens[-1] not in end_tokens][:num_beams]
        if is_last or not running:
            break
        if len(finished) == num_beams:
            best_possible = running[0].log_probability / length**params.length_penalty
            if best_possible <= finished[-1].score:
                break

        parents = torch.tensor([beam.parent for beam in running], device=model.device)
        tokens = torch.tensor([beam.tokens[-1:] for beam in running], device=model.device)  # [beams, 1]
        decoding.reorder(parents)
        if seen is not None:
            seen = seen[parents].scatter_(1, tokens, True)

    new = list(finished[0].tokens)
    has_ended = new[-1] in end_tokens
    if has_ended:
        new.pop()
    return Continuation(tokens=new, text=text_after(codec, prompt, new), finished=has_ended)


def _best_extensions(running: list[RunningBeam], log_probabilities: Tensor, count: int) -> list[RunningBeam]:
    """Return the `count` best extensions of all beams by one token, best first; log-probabilities are [beams, V]."""
    before = torch.tensor([beam.log_probability for beam in running], device=log_probabilities.device)
    totals = log_probabilities + before.unsqueeze(1)  # [beams, V]
    values, indices = totals.flatten().topk(min(count, totals.numel()))
    extensions = []
    for value, index in zip(values.tolist(), indices.tolist(), strict=True):
        parent, token = divmod(index, totals.size(1))
        extensions.append(RunningBeam((*running[parent].tokens, token), value, parent))
    return extensions
