"""The decoding loop: continuations of a batch of prompts, greedily or by sampling. Beams are in `beam_search`.

    prompts     left-padded to [B, longest prompt]; a cache for them and all new tokens (`LanguageModel.begin`)
      |
      v         one step: `decode`
    feed        tokens [B, S] -> logits [B, V]        S is the longest prompt at first, then 1 (`generation.runner`)
    choose      penalties, filters, draw -> ids [B]   (`generation.sampling.TokenChooser`)
    add         each row takes its id: is it the end, a stop string, the limit? Text that is final goes to `on_text`
      |         (`generation.text_stream`)
      +-------> until all rows are complete

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
from neox.generation.sampling import TokenChooser
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

    def token_scores(self, tokens: Tensor, labels: Tensor, count: int) -> TokenScores:
        """Return log-probabilities of labels [B, S] given tokens [B, S], and the `count` most probable tokens."""
        ...


class TokenScores(NamedTuple):
    """Natural logarithms of probabilities over the whole vocabulary, fp32 on the CPU.

    Attributes:
        labels: Of the labels [B, S].
        top_ids: The most probable tokens at each position [B, S, count].
        top: Their log-probabilities [B, S, count].
    """

    labels: Tensor
    top_ids: Tensor
    top: Tensor


OnText = Callable[[int, str], None]
"""Called with (row, new text) as soon as text of a continuation is final."""


@dataclass
class Continuation:
    """Continuation of one prompt.

    Attributes:
        tokens: New ids, without the end token that may have ended them. Those of a stop string are among them.
        text: Their text after the prompt, without special tokens, and cut before a stop string.
        finished: Whether an end token or a stop string ended it, not the length limit.
        end_token: The end token that ended it; None if something else did.
        logits: Logits of each token, [V] in float32, if they are wanted.
        scores: Scores of prompt, tokens and end token from the second on, in a batch of one, if they are wanted.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: bool = False
    end_token: int | None = None
    logits: list[Tensor] = field(default_factory=list)
    scores: TokenScores | None = None

    @property
    def all_tokens(self) -> list[int]:
        """New ids with the end token."""
        return self.tokens if self.end_token is None else [*self.tokens, self.end_token]


class _GrowingRow:
    """One row of a batch, which takes tokens until it is complete.

        its next token                            | what happens
        ------------------------------------------+---------------------------------------
        is an end token                           | token left out, finished, complete
        ends the text with a stop string          | token kept,     finished, complete
        is the last one of the limit              | token kept,               complete
        any other                                 | token kept
        (the caller stops the batch: `complete`)  |                           complete

    Attributes:
        result: What is returned for the row.
        is_complete: Whether it takes no more tokens.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        limit: int,
        codec: Tokenizer,
        params: SamplingParams,
        on_text: Callable[[str], None] | None,
    ) -> None:
        self.result = Continuation()
        self.is_complete = False
        self.prompt = prompt
        self.limit = limit
        self.codec = codec
        self.end_tokens = (codec.eod, *params.stop_ids)
        self.on_text = on_text
        # Tokens are decoded one by one only if text is shown or stop strings are searched; else once at the end.
        self.stream: TextStream | None = None
        if params.stop or on_text:
            self.stream = TextStream(codec, params.stop, prompt)

    def add(self, token: int, logits: Tensor | None) -> None:
        """Take the next token."""
        result = self.result
        if token in self.end_tokens:
            result.finished = True
            result.end_token = token
            self.complete()
            return
        result.tokens.append(token)
        if logits is not None:
            result.logits.append(logits)
        if self.stream is not None:
            self._show(self.stream.push(token))
            result.finished = self.stream.stopped
        if result.finished or len(result.tokens) == self.limit:
            self.complete()

    def complete(self) -> None:
        """Decode the text and take no more tokens."""
        if self.is_complete:
            return
        self.is_complete = True
        if self.stream is not None:
            self._show(self.stream.finish())
            self.result.text = self.stream.text
        else:
            self.result.text = text_after(self.codec, self.prompt, self.result.tokens)

    def _show(self, text: str) -> None:
        if self.on_text is not None and text:
            self.on_text(text)


@torch.inference_mode()
def decode(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    codec: Tokenizer,
    *,
    sequence_ids: Sequence[int] | None = None,
    on_text: OnText | None = None,
    keep_logits: bool = False,
    should_stop: Callable[[], bool] | None = None,
) -> list[Continuation]:
    """Continue a batch of prompts greedily or by sampling.

    Args:
        model: Model to generate with.
        prompts: Token ids, of different lengths.
        params: Sampling settings.
        codec: Tokenizer.
        sequence_ids: Number of each sequence in the whole run, which seeds its random numbers; by default its row.
        on_text: Function that is called with (row, new text) as soon as text is final.
        keep_logits: Whether continuations hold their logits.
        should_stop: Function that is called after every step, and completes all rows by returning true. Only for a
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
        rows.append(_GrowingRow(prompt, limit, codec, params, on_row_text))
    if sequence_ids is None:
        sequence_ids = range(len(prompts))
    chooser = TokenChooser(params, prompts, sequence_ids, model.vocab_size, codec.eod, model.device)
    fill = min(codec.eod, model.vocab_size - 1)
    padded = torch.full((len(prompts), max(map(len, prompts))), fill)  # [B, longest prompt], each at the right edge
    for padded_row, prompt in zip(padded, prompts, strict=True):
        padded_row[len(padded_row) - len(prompt) :] = torch.tensor(list(prompt))
    tokens = padded.to(model.device)
    decoding = model.begin(list(map(len, prompts)), tokens.size(1) + max(limits))
    while True:
        logits = decoding.feed(tokens)  # [B, V]
        ids = chooser(logits)  # [B]
        # A complete row stays in the batch, and its tokens are ignored. To leave it out would copy the cache, and a GPU
        # would record its step again.
        for number, token in enumerate(ids.tolist()):
            row = rows[number]
            if not row.is_complete:
                row.add(token, logits[number].float().cpu() if keep_logits else None)
        if should_stop is not None and should_stop():
            for row in rows:
                row.complete()
        if all(row.is_complete for row in rows):
            return [row.result for row in rows]
        tokens = ids[:, None]  # [B, 1]


def check_ids(prompts: Iterable[Sequence[int]], model: LanguageModel) -> None:
    """Raise GenerationError if a prompt has ids for which the model has no rows."""
    for prompt in prompts:
        unknown = max(prompt)
        if unknown >= model.vocab_size:
            raise GenerationError(
                f"the prompt holds token id {unknown}, and the model has rows for ids up to {model.vocab_size - 1} "
                "only; leave that token out, or give it a row with tools/resize_vocabulary.py"
            )
