"""Interactive prompt loop on a terminal; `stop` ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from neox.errors import GenerationError
from neox.generation.completion import generate
from neox.generation.decoding import LanguageModel, OnText
from neox.generation.request import SamplingParams
from neox.generation.terminal_input import ReadLine, line_reader, typed_on_first_rank, waiting_group
from neox.parallel import ParallelGrid
from neox.tokenizer import Tokenizer

STOP = "stop"
_PROMPT = "Context prompt >>> "


def interact(
    model: LanguageModel,
    params: SamplingParams,
    codec: Tokenizer,
    grid: ParallelGrid,
    *,
    prompt_end: str = "\n",
    source: TextIO | None = None,
    sink: TextIO | None = None,
) -> None:
    """Answer prompts until `stop` or the end of the input. All ranks call it together; rank 0 reads and writes.

    Each prompt draws other random numbers, even if its text has been given before.

    Args:
        model: Model to generate with.
        params: Sampling settings.
        codec: Tokenizer.
        grid: Process groups.
        prompt_end: Text that ends a prompt; anything but a newline allows prompts of several lines.
        source: Input; None means stdin.
        sink: Output; None means stdout.
    """
    sink = sink or sys.stdout

    def write(text: str) -> None:
        if grid.rank == 0:
            sink.write(text)
            sink.flush()

    prompts: Iterator[str] = iter(())
    on_text: OnText | None = None
    if grid.rank == 0:
        prompts = _prompts(prompt_end, source, write)
        on_text = _without_number(write)
    group = waiting_group(grid)
    number = 0
    write(f"{settings_line(params)}; `{STOP}` ends\n")
    while True:
        prompt = typed_on_first_rank(lambda: next(prompts, None), grid, group)
        if prompt is None:
            return
        try:
            (done,) = generate(model, [prompt], params, codec, sequence_ids=[number], on_text=on_text)
        except GenerationError as error:
            write(f"{error}\n")
            continue
        if params.num_beams > 1:
            write(done.text)
        note = ""
        if not done.finished:
            note = f" (reached maximum_tokens or the context length, {done.length} tokens)"
        write(f"\n[{done.length / done.duration:,.1f} tokens/s]{note}\n")
        number += 1


def _without_number(write: Callable[[str], None]) -> OnText:
    """Return a function of (prompt number, text) that writes the text."""

    def write_text(_: int, text: str) -> None:
        write(text)

    return write_text


def settings_line(params: SamplingParams) -> str:
    """Return a one-line description of the settings, shown before the first prompt."""
    if params.num_beams > 1:
        method = f"beam search with {params.num_beams} beams"
    elif params.samples:
        method = f"temperature {params.temperature}, top_k {params.top_k}, top_p {params.top_p}, seed {params.seed}"
    else:
        method = "greedy"
    return f"{method}; up to {params.max_new_tokens} tokens"


def _prompts(prompt_end: str, source: TextIO | None, write: Callable[[str], None]) -> Iterator[str]:
    """Yield prompts as they are typed, also empty ones, which generate without a context."""
    read_line = line_reader(source, write)
    while True:
        text = _read_prompt(read_line, prompt_end)
        if text is None or text.strip() == STOP:
            return
        yield text


def _read_prompt(read_line: ReadLine, prompt_end: str) -> str | None:
    """Return one prompt without `prompt_end`, or None at the end of the input."""
    line = read_line(_PROMPT)
    if prompt_end == "\n" or line is None:
        return line
    text = line
    while prompt_end not in text and text.strip() != STOP:
        line = read_line("")
        if line is None:
            return text
        text += "\n" + line
    return text.split(prompt_end)[0]
