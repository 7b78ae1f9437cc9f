"""The decoding loop: prompts of different lengths in one batch, one new token per step.

Shapes: B sequences, S tokens fed at once, V vocabulary. Every rank of a model that is split over ranks runs this same
loop on the same logits, so all of them stop after the same step and nobody waits for a peer that has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from neox.generation.params import SamplingParams
from neox.generation.sampling import TokenChooser
from neox.generation.text_stream import TextCodec, TextStream


class Decoding(Protocol):
    """One batch on its way: what it has read so far is inside (a cache, or the tokens themselves)."""

    def feed(self, tokens: Tensor) -> Tensor:
        """Read tokens [B, S] (the first time left-padded) and return the logits [B, V] after the last of them."""
        ...

    def reorder(self, rows: Tensor) -> None:
        """Go on with these rows [B'] of what was read: sequences are dropped, doubled or moved."""
        ...


class LanguageModel(Protocol):
    """What generation asks of a model, wherever its layers are."""

    vocab_size: int
    """Columns of the logits (the padded vocabulary)."""
    max_length: int
    """Longest sequence in tokens, prompt and continuation together."""
    device: torch.device

    def begin(self, lengths: Sequence[int], capacity: int) -> Decoding:
        """Start a batch of prompts of `lengths` tokens that will be at most `capacity` tokens wide."""
        ...


OnText = Callable[[int, str], None]
"""Told (row, new text) as soon as text of a continuation is certain."""


@dataclass
class Continuation:
    """What one prompt was continued with.

    tokens: new ids, without the end-of-document that may have ended them. finished: ended by itself (end-of-document
    or a stop string) and not by the length. logits: [tokens, V] float32 where asked for.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: bool = False
    logits: list[Tensor] = field(default_factory=list)


def room(model: LanguageModel, prompt: Sequence[int], params: SamplingParams) -> int:
    """Return how many tokens may follow `prompt` (ids). Raises GenerationError if it is empty or too long."""
    return params.room(len(prompt), model.max_length)


def left_pad(prompts: Sequence[Sequence[int]], fill: int, device: torch.device) -> Tensor:
    """Return prompts as one tensor [B, longest], each ending at the right edge."""
    width = max(map(len, prompts))
    return torch.tensor([[fill] * (width - len(p)) + list(p) for p in prompts], device=device)


class _Row:
    """One sequence of the batch: collects tokens until it ends."""

    def __init__(
        self, limit: int, codec: TextCodec, params: SamplingParams, on_text: Callable[[str], None] | None
    ) -> None:
        self.result = Continuation()
        self.limit, self.eod = limit, codec.eod
        self.on_text = on_text
        # Text is needed on the way only to show it or to find stop strings in it.
        self.stream = TextStream(codec, params.stop) if params.stop or on_text else None
        self.codec = codec
        self.done = False

    def add(self, token: int, logits: Tensor | None) -> None:
        """Take the next token; may set `done`."""
        result = self.result
        if token == self.eod:
            result.finished = True
            self._end()
            return
        result.tokens.append(token)
        if logits is not None:
            result.logits.append(logits)
        if self.stream:
            self._say(self.stream.push(token))
            result.finished = self.stream.stopped
        if result.finished or len(result.tokens) == self.limit:
            self._end()

    def leave(self) -> None:
        """Take no more tokens."""
        if not self.done:
            self._end()

    def _say(self, text: str) -> None:
        if self.on_text and text:
            self.on_text(text)

    def _end(self) -> None:
        self.done = True
        if self.stream:
            self._say(self.stream.finish())
            self.result.text = self.stream.text
        else:
            self.result.text = self.codec.decode(self.result.tokens)


@torch.inference_mode()
def decode(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    codec: TextCodec,
    *,
    numbers: Sequence[int] | None = None,
    on_text: OnText | None = None,
    keep_logits: bool = False,
    stopped: Callable[[], bool] | None = None,
) -> list[Continuation]:
    """Continue a batch of prompts (ids), greedily or by sampling.

    numbers: what tells the sequences' random numbers apart (their place in the whole run; default: in this batch).
    stopped: asked after every step whether to leave it at what there is (on one process only: ranks would disagree).
    Raises GenerationError for empty or over-long prompts and for logits that are not numbers.
    """
    limits = [room(model, prompt, params) for prompt in prompts]
    rows = [
        _Row(limit, codec, params, None if on_text is None else _told(on_text, number))
        for number, limit in enumerate(limits)
    ]
    chooser = TokenChooser(
        params,
        [list(p) for p in prompts],
        list(numbers or range(len(prompts))),
        model.vocab_size,
        codec.eod,
        model.device,
    )
    tokens = left_pad(prompts, codec.eod, model.device)
    decoding = model.begin([len(p) for p in prompts], tokens.size(1) + max(limits))
    while True:
        logits = decoding.feed(tokens)
        ids = chooser(logits)
        for number, (row, token) in enumerate(zip(rows, ids.tolist(), strict=True)):
            if not row.done:
                row.add(token, logits[number].float().cpu() if keep_logits else None)
        if stopped is not None and stopped():
            for row in rows:
                row.leave()
        if all(row.done for row in rows):
            return [row.result for row in rows]
        tokens = ids[:, None]


def _told(on_text: OnText, number: int) -> Callable[[str], None]:
    return lambda text: on_text(number, text)
