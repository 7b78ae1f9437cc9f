"""Decoding loops: sampling for batches of prompts, and beam search.

Shapes: B sequences, S tokens fed at once, V vocabulary. Every rank of a split model runs the same loop on the same
logits, so that all of them stop after the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from neox.errors import GenerationError
from neox.generation.request import SamplingParams
from neox.generation.sampling import TokenChooser, check_logits, penalize_repetition
from neox.generation.text_stream import TextStream
from neox.tokenizer import Tokenizer
from neox.tokenizer.positions import text_after


class Decoding(Protocol):
    """One batch during generation, with what it has read so far (a cache, or the tokens themselves)."""

    def feed(self, tokens: Tensor) -> Tensor:
        """Read tokens [B, S] (the first time left-padded) and return the logits [B, V] after the last of them."""
        ...

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows [B'] of the batch, in this order; a row may occur several times or not at all."""
        ...


class LanguageModel(Protocol):
    """Model that can continue prompts, on one rank or split over several.

    Attributes:
        vocab_size: Columns of the logits (the padded vocabulary).
        max_length: Longest sequence in tokens, prompt and continuation together.
        device: Device of the tokens.
    """

    vocab_size: int
    max_length: int
    device: torch.device

    def begin(self, lengths: Sequence[int], capacity: int) -> Decoding:
        """Start a batch.

        Args:
            lengths: Tokens of each prompt.
            capacity: Most tokens that a row will hold, padding included.
        """
        ...


OnText = Callable[[int, str], None]
"""Called with (row, new text) as soon as text of a continuation is final."""


@dataclass
class Continuation:
    """Continuation of one prompt.

    Attributes:
        tokens: New ids, without the end-of-document or stop token that may have ended them.
        text: Their text after the prompt, without special tokens.
        finished: Whether end-of-document, a stop token or a stop string ended it, not the length limit.
        logits: Logits of each token, [V] in float32, if they are wanted.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: bool = False
    logits: list[Tensor] = field(default_factory=list)


class _Row:
    """One sequence of a batch, which collects tokens until it ends."""

    def __init__(
        self,
        prompt: Sequence[int],
        limit: int,
        codec: Tokenizer,
        params: SamplingParams,
        on_text: Callable[[str], None] | None,
    ) -> None:
        self.result = Continuation()
        self.prompt = prompt
        self.limit = limit
        self.codec = codec
        self.ends = (codec.eod, *params.stop_ids)
        self.on_text = on_text
        self.stream: TextStream | None = None
        if params.stop or on_text:  # only to show text or to find stop strings is it decoded on the way
            self.stream = TextStream(codec, params.stop, prompt)
        self.done = False

    def add(self, token: int, logits: Tensor | None) -> None:
        """Append the next token; may set `done`."""
        result = self.result
        if token in self.ends:
            result.finished = True
            self.end()
            return
        result.tokens.append(token)
        if logits is not None:
            result.logits.append(logits)
        if self.stream:
            self._emit(self.stream.push(token))
            result.finished = self.stream.stopped
        if result.finished or len(result.tokens) == self.limit:
            self.end()

    def end(self) -> None:
        """Decode the text and accept no more tokens."""
        if self.done:
            return
        self.done = True
        if self.stream:
            self._emit(self.stream.finish())
            self.result.text = self.stream.text
        else:
            self.result.text = text_after(self.codec, self.prompt, self.result.tokens)

    def _emit(self, text: str) -> None:
        if self.on_text and text:
            self.on_text(text)


@torch.inference_mode()
def decode(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    codec: Tokenizer,
    *,
    numbers: Sequence[int] | None = None,
    on_text: OnText | None = None,
    keep_logits: bool = False,
    stopped: Callable[[], bool] | None = None,
) -> list[Continuation]:
    """Continue a batch of prompts greedily or by sampling.

    Args:
        model: Model to generate with.
        prompts: Token ids, of different lengths.
        params: Sampling settings.
        codec: Tokenizer.
        numbers: Number of each sequence in the whole run, which seeds its random numbers; by default in this batch.
        on_text: Function that is called with (row, new text) as soon as text is final.
        keep_logits: Whether continuations hold their logits.
        stopped: Function that is called after every step, and ends all continuations by returning true. Only for a
            single process, because ranks could disagree.

    Returns:
        Continuations in the order of the prompts.

    Raises:
        GenerationError: If prompts are empty or too long or have ids without rows, or logits are not finite.
    """
    limits = [params.token_limit(len(prompt), model.max_length) for prompt in prompts]
    check_ids(prompts, model)
    params = replace(params, stop_ids=(*codec.end_ids, *params.stop_ids))
    rows = []
    for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        on_row_text = None if on_text is None else partial(on_text, number)
        rows.append(_Row(prompt, limit, codec, params, on_row_text))
    if numbers is None:
        numbers = range(len(prompts))
    chooser = TokenChooser(params, prompts, numbers, model.vocab_size, codec.eod, model.device)
    tokens = _left_pad(prompts, min(codec.eod, model.vocab_size - 1), model.device)
    decoding = model.begin(list(map(len, prompts)), tokens.size(1) + max(limits))
    while True:
        logits = decoding.feed(tokens)
        ids = chooser(logits)
        for number, token in enumerate(ids.tolist()):
            row = rows[number]
            if not row.done:
                row.add(token, logits[number].float().cpu() if keep_logits else None)
        if stopped is not None and stopped():
            for row in rows:
                row.end()
        if all(row.done for row in rows):
            return [row.result for row in rows]
        tokens = ids[:, None]


def check_ids(prompts: Iterable[Sequence[int]], model: LanguageModel) -> None:
    """Raise GenerationError if a prompt has ids for which the model has no rows."""
    for prompt in prompts:
        unknown = max(prompt)
        if unknown >= model.vocab_size:
            raise GenerationError(
                f"the prompt holds token id {unknown}, and the model has rows for ids up to {model.vocab_size - 1} "
                "only; leave that token out, or give it a row with tools/resize_vocabulary.py"
            )


def _left_pad(prompts: Sequence[Sequence[int]], fill: int, device: torch.device) -> Tensor:
    """Return prompts as one tensor [B, longest], each ending at the right edge."""
    padded = torch.full((len(prompts), max(map(len, prompts))), fill)
    for row, prompt in zip(padded, prompts, strict=True):
        row[len(row) - len(prompt) :] = torch.tensor(list(prompt))
    return padded.to(device)


class _Beam(NamedTuple):
    """Running or finished beam.

    Attributes:
        tokens: New ids, with the end-of-document that ended it.
        score: Log-probability of a running beam; the final score of a finished one.
        parent: Number of the running beam that it extends.
    """

    tokens: tuple[int, ...]
    score: float
    parent: int = 0


@torch.inference_mode()
def beam_search(model: LanguageModel, prompt: Sequence[int], params: SamplingParams, codec: Tokenizer) -> Continuation:
    """Continue one prompt by its best beam.

    Scores and stopping are those of Hugging Face's default (`early_stopping=False`). A finished beam scores its
    log-probability / length ** length_penalty. The search goes on while the best running beam, at its current length,
    could still beat the worst of `num_beams` finished ones.

    Args:
        model: Model to generate with.
        prompt: Token ids.
        params: Settings; those for sampling are not used.
        codec: Tokenizer.

    Raises:
        GenerationError: As `decode` does.
    """
    limit = params.token_limit(len(prompt), model.max_length)
    check_ids([prompt], model)
    beams = params.num_beams
    ends = codec.end_ids
    decoding = model.begin([len(prompt)], len(prompt) + limit)
    running = [_Beam((), 0.0)]
    finished: list[_Beam] = []
    tokens = torch.tensor([list(prompt)], device=model.device)
    for length in range(1, limit + 1):
        scores = _log_probabilities(decoding.feed(tokens), prompt, running, params, ends)
        candidates = _best(scores, running, (1 + len(ends)) * beams)  # enough if all ends are among the best
        last = length == limit
        # Only a candidate among the best `num_beams` may finish: lower ones lost to a running beam.
        for beam in candidates[:beams]:
            if last or beam.tokens[-1] in ends:
                finished.append(_Beam(beam.tokens, beam.score / length**params.length_penalty))
        finished.sort(key=lambda beam: -beam.score)
        del finished[beams:]
        running = [beam for beam in candidates if beam.tokens[-1] not in ends][:beams]
        if last or not _can_improve(running, finished, length, params):
            break
        decoding.reorder(torch.tensor([beam.parent for beam in running], device=model.device))
        tokens = torch.tensor([beam.tokens[-1:] for beam in running], device=model.device)
    new = list(finished[0].tokens)
    ended = new[-1] in ends
    if ended:
        new.pop()
    return Continuation(tokens=new, text=text_after(codec, prompt, new), finished=ended)


def _log_probabilities(
    logits: Tensor, prompt: Sequence[int], running: list[_Beam], params: SamplingParams, ends: Sequence[int]
) -> Tensor:
    """Return log-probabilities [beams, V] after the penalties, without the ends before the minimum length."""
    check_logits(logits)
    scores = logits.float().log_softmax(dim=-1)
    if params.repetition_penalty != 1.0:
        seen = torch.zeros_like(scores, dtype=torch.bool)
        for row, beam in enumerate(running):
            seen[row, torch.tensor([*prompt, *beam.tokens], device=scores.device)] = True
        scores = penalize_repetition(scores, seen, params.repetition_penalty)
    if len(running[0].tokens) < params.min_new_tokens:
        scores[:, [token for token in ends if token < scores.size(1)]] = float("-inf")
    return scores


def _best(scores: Tensor, running: list[_Beam], count: int) -> list[_Beam]:
    """Return the `count` best extensions of all beams by one token, best first."""
    before = torch.tensor([beam.score for beam in running], device=scores.device)
    totals = scores + before.unsqueeze(1)
    values, indices = totals.flatten().topk(min(count, totals.numel()))
    extended = []
    for value, index in zip(values.tolist(), indices.tolist(), strict=True):
        parent, token = divmod(index, scores.size(1))
        extended.append(_Beam((*running[parent].tokens, token), value, parent))
    return extended


def _can_improve(running: list[_Beam], finished: list[_Beam], length: int, params: SamplingParams) -> bool:
    """Return whether a running beam could still score better than the worst of a full set of finished ones."""
    if not running:
        return False
    if len(finished) < params.num_beams:
        return True
    return bool(running[0].score / length**params.length_penalty > finished[-1].score)
