"""Completions of prompts: batches of similar lengths, divided among copies of the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from neox.generation.beam_search import beam_search
from neox.generation.decoding import LanguageModel, OnText, check_ids, decode
from neox.generation.request import Prompt, SamplingParams, encode_prompts
from neox.log import progress
from neox.parallel import ParallelGrid
from neox.tokenizer import Tokenizer

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Completion:
    """One prompt and its continuation.

    Attributes:
        context: The prompt.
        text: The continuation, without the prompt.
        length: Number of tokens of the continuation, without an end-of-document token.
        finished: Whether end-of-document or a stop string ended it, not the length limit.
        duration: Seconds that its batch took.
        tokens: Token ids of the continuation.
        logits: Logits of the vocabulary for each token, if they are wanted.
    """

    context: str
    text: str
    length: int
    finished: bool
    duration: float
    tokens: tuple[int, ...] = field(default=(), repr=False)
    logits: list[list[float]] | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the object that the output file holds."""
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
    prompts: Sequence[Prompt],
    params: SamplingParams,
    codec: Tokenizer,
    *,
    batch_size: int = 8,
    sequence_ids: Sequence[int] | None = None,
    on_text: OnText | None = None,
    keep_logits: bool = False,
    on_batch: Callable[[int], object] | None = None,
) -> list[Completion]:
    """Continue each prompt, in batches of similar lengths.

    Args:
        model: Model to generate with.
        prompts: Texts, or ids; an empty text generates without a context.
        params: Sampling settings.
        codec: Tokenizer.
        batch_size: Prompts per batch; beam search takes one at a time.
        sequence_ids: Number of each prompt in the whole run, which decides its random numbers; by default its number
            here.
        on_text: Function that is called with (prompt number, new text) during generation; not with beams.
        keep_logits: Whether completions hold their logits.
        on_batch: Function that is called after each batch with its number of prompts.

    Returns:
        Completions in the order of the prompts.

    Raises:
        GenerationError: If prompts do not fit, which is known before anything is generated, or logits are not finite.
    """
    ids = encode_prompts(prompts, codec, params, model.max_length)
    check_ids(ids, model)
    if sequence_ids is None:
        sequence_ids = range(len(ids))
    if params.num_beams > 1:
        batch_size = 1
    completions: dict[int, Completion] = {}
    longest_first = sorted(range(len(ids)), key=lambda n: -len(ids[n]))
    for start in range(0, len(longest_first), batch_size):
        batch = longest_first[start : start + batch_size]  # numbers of prompts
        started = time.perf_counter()
        if params.num_beams > 1:
            results = [beam_search(model, ids[batch[0]], params, codec)]
        else:
            results = decode(
                model,
                [ids[n] for n in batch],
                params,
                codec,
                sequence_ids=[sequence_ids[n] for n in batch],
                on_text=None if on_text is None else _with_prompt_number(on_text, batch),
                keep_logits=keep_logits,
            )
        seconds = time.perf_counter() - started
        for n, result in zip(batch, results, strict=True):
            prompt = prompts[n]
            completions[n] = Completion(
                context=prompt if isinstance(prompt, str) else codec.decode_shown(prompt),
                text=result.text,
                length=len(result.tokens),
                finished=result.finished,
                duration=seconds,
                tokens=tuple(result.tokens),
                logits=[row.tolist() for row in result.logits] if keep_logits else None,
            )
        if on_batch is not None:
            on_batch(len(batch))
    return [completions[n] for n in range(len(ids))]


def _with_prompt_number(on_text: OnText, numbers: Sequence[int]) -> OnText:
    """Return a callback for rows of a batch that calls `on_text` with the prompts' numbers."""
    return lambda row, text: on_text(numbers[row], text)


def generate_all(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    codec: Tokenizer,
    grid: ParallelGrid,
    *,
    batch_size: int = 8,
) -> list[Completion]:
    """Continue prompts, divided among the data-parallel ranks; every rank gets all completions."""
    encode_prompts(prompts, codec, params, model.max_length)  # raises on all ranks, before anything starts

    def generate_part(numbers: Sequence[int]) -> list[Completion]:
        part = [prompts[n] for n in numbers]
        if grid.rank != 0:
            return generate(model, part, params, codec, batch_size=batch_size, sequence_ids=numbers)
        with progress("generate", len(part), "prompts") as bar:
            update = bar.update
            return generate(model, part, params, codec, batch_size=batch_size, sequence_ids=numbers, on_batch=update)

    return over_replicas(range(len(prompts)), generate_part, grid)


def over_replicas(
    items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[Result]], grid: ParallelGrid
) -> list[Result]:
    """Divide items among the data-parallel ranks and gather the results.

    Args:
        items: The same items on all ranks.
        work: Function of some items that returns one picklable result for each. It may communicate with the ranks of
            its own copy of the model.
        grid: Process groups.

    Returns:
        `work(items)`, in the order of the items, on every rank.
    """
    part = list(work(items[grid.dp_rank :: grid.dp_size]))
    if grid.dp_size == 1:
        return part
    parts: list[list[Result]] = [[] for _ in range(grid.dp_size)]
    dist.all_gather_object(parts, part, group=grid.dp_group)
    return [parts[n % grid.dp_size][n // grid.dp_size] for n in range(len(items))]
