"""Prompts in, completions out: batches, beams, and what is told about each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from neox.generation.beam_search import beam_search
from neox.generation.decoding import Continuation, LanguageModel, OnText, decode
from neox.generation.params import SamplingParams
from neox.generation.request import encode_prompts
from neox.generation.text_stream import TextCodec


@dataclass(frozen=True)
class Completion:
    """One prompt and what followed.

    text: the continuation alone. length: its tokens, the end-of-document not counted. finished: it ended by itself and
    not by the length limit. duration: seconds its batch took. logits: one list of the vocabulary's logits per token.
    """

    context: str
    text: str
    length: int
    finished: bool
    duration: float
    tokens: tuple[int, ...] = field(default=(), repr=False)
    logits: list[list[float]] | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return what a line of the output file holds."""
        record: dict[str, Any] = {
            "context": self.context,
            "text": self.text,
            "length": self.length,
            "finished": self.finished,
            "duration": self.duration,
        }
        if self.logits is not None:
            record["logits"] = self.logits
        return record


def generate(
    model: LanguageModel,
    prompts: Sequence[str],
    params: SamplingParams,
    codec: TextCodec,
    *,
    batch_size: int = 8,
    numbers: Sequence[int] | None = None,
    on_text: OnText | None = None,
    keep_logits: bool = False,
    done: Callable[[int], object] | None = None,
) -> list[Completion]:
    """Continue each prompt, in batches of similar lengths; results come in the order of the prompts.

    An empty prompt generates without a context. numbers: each prompt's place in the whole run, which decides what is
    drawn for it (default: its place here). on_text: told (prompt number, new text) on the way; not with beams.
    done: told how many prompts are through, batch by batch.
    Raises GenerationError before anything is generated for prompts that do not fit, and on logits that are not numbers.
    """
    ids = encode_prompts(prompts, codec, params, model.max_length)
    places = list(numbers) if numbers is not None else list(range(len(ids)))
    completed: dict[int, Completion] = {}
    order = sorted(range(len(ids)), key=lambda n: -len(ids[n]))
    width = 1 if params.num_beams > 1 else batch_size
    for start in range(0, len(order), width):
        batch = order[start : start + width]
        started = time.perf_counter()
        if params.num_beams > 1:
            results = [beam_search(model, ids[batch[0]], params, codec)]
        else:
            told = None if on_text is None else lambda row, text, batch=batch: on_text(batch[row], text)
            results = decode(
                model,
                [ids[n] for n in batch],
                params,
                codec,
                numbers=[places[n] for n in batch],
                on_text=told,
                keep_logits=keep_logits,
            )
        seconds = time.perf_counter() - started
        completed.update(
            (n, _completion(prompts[n], result, seconds, keep_logits)) for n, result in zip(batch, results, strict=True)
        )
        if done:
            done(len(batch))
    return [completed[n] for n in range(len(ids))]


def _completion(context: str, result: Continuation, seconds: float, keep_logits: bool) -> Completion:
    return Completion(
        context=context,
        text=result.text,
        length=len(result.tokens),
        finished=result.finished,
        duration=seconds,
        tokens=tuple(result.tokens),
        logits=[row.tolist() for row in result.logits] if keep_logits else None,
    )
