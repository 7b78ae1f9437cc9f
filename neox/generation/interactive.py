"""A prompt loop: type, read on while tokens come, type again; `stop` ends it."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TextIO

import torch.distributed as dist

from neox.errors import GenerationError
from neox.generation.completion import generate
from neox.generation.decoding import LanguageModel
from neox.generation.params import SamplingParams
from neox.generation.text_stream import TextCodec
from neox.launch import report_progress
from neox.parallel import ParallelGrid

STOP = "stop"
_REASSURE_SECONDS = 60.0
_ASK = "Context prompt >>> "


def interact(
    model: LanguageModel,
    params: SamplingParams,
    codec: TextCodec,
    grid: ParallelGrid,
    *,
    prompt_end: str = "\n",
    source: TextIO | None = None,
    sink: TextIO | None = None,
) -> None:
    """Answer prompts until `stop` or the end of the input; all ranks take part, rank 0 reads and writes.

    prompt_end: what ends a prompt; with anything but a line's end, prompts may have several lines. source, sink: stdin
    and stdout if None. The n-th prompt draws other random numbers than the first with the same text.
    """
    sink = sink or sys.stdout
    reader = _prompts(prompt_end, source, sink) if grid.rank == 0 else iter(())
    number = 0
    _write(sink, grid, f"{settings_line(params)}\n")
    group = _prompt_group(grid)
    while (prompt := _agreed(reader, grid, group)) is not None:
        say = _speaker(sink) if grid.rank == 0 else None
        try:
            (done,) = generate(model, [prompt], params, codec, numbers=[number], on_text=say)
        except GenerationError as error:
            _write(sink, grid, f"{error}\n")
            continue
        if params.num_beams > 1:
            _write(sink, grid, done.text)
        ended = "" if done.finished else f" (cut after maximum_tokens or at the context's end, {done.length} tokens)"
        _write(sink, grid, f"\n[{done.length / done.duration:,.1f} tokens/s]{ended}\n")
        number += 1


def settings_line(params: SamplingParams) -> str:
    """Return what a person should know about the settings before the first prompt."""
    if params.num_beams > 1:
        how = f"beam search with {params.num_beams} beams"
    elif params.samples:
        how = f"temperature {params.temperature}, top_k {params.top_k}, top_p {params.top_p}, seed {params.seed}"
    else:
        how = "greedy"
    return f"{how}; up to {params.max_new_tokens} tokens; `{STOP}` ends"


def _prompts(prompt_end: str, source: TextIO | None, sink: TextIO) -> Iterator[str]:
    """Yield prompts as they are typed; empty ones are asked for again."""
    ask = _terminal_asker() if source is None and sys.stdin.isatty() else _plain_asker(source or sys.stdin, sink)
    while True:
        text = _read_prompt(ask, prompt_end)
        if text is None or text.strip() == STOP:
            return
        if text.strip():
            yield text
        else:
            sink.write(f"(empty: type some text, or `{STOP}` to end)\n")
            sink.flush()


def _read_prompt(ask: Callable[[str], str | None], prompt_end: str) -> str | None:
    """Return one prompt without what ends it, or None at the end of the input."""
    line = ask(_ASK)
    if prompt_end == "\n" or line is None:
        return line
    text = line
    while prompt_end not in text and text.strip() != STOP:
        line = ask("")
        if line is None:
            return text
        text += "\n" + line
    return text.split(prompt_end)[0]


def _terminal_asker() -> Callable[[str], str | None]:
    """Ask through `input`, whose line editing and history come with readline where Python has it."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")

    def ask(text: str) -> str | None:
        try:
            return input(text)
        except EOFError:
            return None

    return ask


def _plain_asker(source: TextIO, sink: TextIO) -> Callable[[str], str | None]:
    def ask(text: str) -> str | None:
        sink.write(text)
        sink.flush()
        line = source.readline()
        return line.removesuffix("\n") if line else None

    return ask


def _prompt_group(grid: ParallelGrid) -> dist.ProcessGroup | None:
    """A group of all ranks in which one may wait for a person for days; the others' time limits are for computers."""
    if grid.world_size == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(days=30))


def _agreed(reader: Iterator[str], grid: ParallelGrid, group: dist.ProcessGroup | None) -> str | None:
    """Return the next prompt that rank 0 reads, on every rank; None at the end."""
    with _patience():
        box = [next(reader, None)]
        if group is not None:
            dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


@contextmanager
def _patience() -> Iterator[None]:
    """Tell the launcher now and then that this rank is not stuck: a person is thinking."""
    over = threading.Event()

    def reassure() -> None:
        while not over.wait(_REASSURE_SECONDS):
            report_progress()

    thread = threading.Thread(target=reassure, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _speaker(sink: TextIO) -> Callable[[int, str], None]:
    def say(number: int, text: str) -> None:
        sink.write(text)
        sink.flush()

    return say


def _write(sink: TextIO, grid: ParallelGrid, text: str) -> None:
    if grid.rank == 0:
        sink.write(text)
        sink.flush()
