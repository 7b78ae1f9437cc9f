"""Conversation on a terminal, which keeps its history."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import torch.distributed as dist

from neox.errors import GenerationError
from neox.generation.chat_format import AnswerStream, ChatFormat
from neox.generation.decoding import Continuation, LanguageModel, decode
from neox.generation.interactive import settings_line
from neox.generation.request import SamplingParams
from neox.generation.terminal_input import ReadLine, line_reader, typed_on_first_rank, waiting_group
from neox.parallel import ParallelGrid
from neox.tokenizer import Tokenizer
from neox.tokenizer.chat_messages import ChatError

HELP = """\
/system TEXT   set the system message; without TEXT remove it
/reset         forget the conversation, but not the system message
/help          this list
A line that ends with a backslash goes on in the next one. Ctrl-C stops an answer. Ctrl-D ends.
"""
_PROMPT = ">>> "
_NEXT_LINE = "... "
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


class Conversation:
    """Messages of a conversation, so far.

    Attributes:
        system: System message; None if there is none.
        turns: Questions and answers.
    """

    def __init__(self) -> None:
        self.system: str | None = None
        self.turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages, the system message first."""
        if self.system is None:
            return self.turns
        return [{"role": "system", "content": self.system}, *self.turns]

    def ask(self, text: str) -> None:
        """Add a question."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add the answer to the last question."""
        self.turns.append({"role": "assistant", "content": text})

    def withdraw(self) -> None:
        """Remove the last question, which has no answer."""
        self.turns.pop()

    def obey(self, line: str) -> str | None:
        """Carry out a command; return what to show, or None if the line is no command."""
        match = _COMMAND.fullmatch(line.strip())
        if match is None:
            return None
        command = match[1]
        text = match[2]
        if command == "reset":
            self.turns.clear()
            return "the conversation is forgotten\n"
        if command == "system":
            self.system = text
            return f"system message: {text}\n" if text else "no system message\n"
        if command == "help":
            return HELP
        return f"/{command} is no command\n{HELP}"


def converse(
    model: LanguageModel,
    params: SamplingParams,
    chat: ChatFormat,
    codec: Tokenizer,
    grid: ParallelGrid,
    *,
    source: TextIO | None = None,
    sink: TextIO | None = None,
) -> Conversation:
    """Answer questions until the end of the input. All ranks call it together; rank 0 reads and writes.

    Ctrl-C stops an answer. What has been said of it stays in the history.

    Args:
        model: Model to generate with.
        params: Sampling settings of an answer.
        chat: Form of conversations with the model.
        codec: Tokenizer.
        grid: Process groups.
        source: Input; None means stdin.
        sink: Output; None means stdout.

    Returns:
        The conversation, which is complete on rank 0.
    """
    shown = sink or sys.stdout

    def write(text: str) -> None:
        if grid.rank == 0:
            shown.write(text)
            shown.flush()

    conversation = Conversation()
    read_line = line_reader(source, write)
    group = waiting_group(grid)
    number = 0
    write(f"{settings_line(params)}; /help lists commands, Ctrl-D ends\n")
    with _interrupts(grid) as interrupts:
        while True:
            ids = typed_on_first_rank(
                lambda: _next_question(
                    conversation, read_line, write, lambda: _encode(conversation, model, params, chat)
                ),
                grid,
                group,
            )
            if ids is None:
                write("\n")
                return conversation
            try:
                started = time.monotonic()
                with interrupts.stopping(group) as should_stop:
                    result = _answer(model, ids, params, chat, codec, number, write, should_stop)
                    was_stopped = interrupts.requested
            except GenerationError as error:
                conversation.withdraw()
                write(f"{error}\n")
                continue
            conversation.answer(chat.answer(result.text))
            write(f"\n{_remark(result, was_stopped, time.monotonic() - started)}\n")
            number += 1


def _encode(conversation: Conversation, model: LanguageModel, params: SamplingParams, chat: ChatFormat) -> list[int]:
    """Return the ids of a conversation. Raises ChatError or GenerationError if the model cannot answer it."""
    ids = chat.encode(conversation.messages)
    params.token_limit(len(ids), model.max_length)
    return ids


def _next_question(
    conversation: Conversation, read_line: ReadLine, write: Callable[[str], None], encode: Callable[[], list[int]]
) -> list[int] | None:
    """Read lines up to the next question, and carry out commands; return ids, or None at the end of the input."""
    while True:
        try:
            text = _read_text(read_line)
        except KeyboardInterrupt:
            write("\n(Ctrl-D ends)\n")
            continue
        if text is None:
            return None
        said = conversation.obey(text)
        if said is not None:
            write(said)
            continue
        if not text.strip():
            continue
        conversation.ask(text)
        try:
            return encode()
        except (ChatError, GenerationError) as error:
            conversation.withdraw()
            write(f"{error}; /reset forgets the conversation so far\n")


def _read_text(read_line: ReadLine) -> str | None:
    """Return a line, with the next ones as long as they end with a backslash; None at the end of the input."""
    line = read_line(_PROMPT)
    if line is None:
        return None
    lines = [line]
    while lines[-1].endswith("\\"):
        line = read_line(_NEXT_LINE)
        lines[-1] = lines[-1].removesuffix("\\")
        if line is None:
            break
        lines.append(line)
    return "\n".join(lines)


def _answer(
    model: LanguageModel,
    ids: list[int],
    params: SamplingParams,
    chat: ChatFormat,
    codec: Tokenizer,
    number: int,
    write: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> Continuation:
    """Generate one answer, and show it as it comes."""
    stream = AnswerStream(chat.form.begin)

    def on_text(_: int, text: str) -> None:
        write(stream.push(text))

    (result,) = decode(
        model, [ids], chat.ending(params), codec, sequence_ids=[number], on_text=on_text, should_stop=should_stop
    )
    write(stream.finish())
    return result


def _remark(result: Continuation, was_stopped: bool, seconds: float) -> str:
    """Return a line about an answer: its speed, and why it ended if that is not its own end."""
    speed = f"[{len(result.tokens) / max(seconds, 1e-9):,.1f} tokens/s]"
    if was_stopped:
        return f"{speed} (stopped)"
    if not result.text.strip():
        return f"{speed} (an empty answer: the model ended at once)"
    if not result.finished:
        return f"{speed} (reached maximum_tokens or the context length, {len(result.tokens)} tokens)"
    return speed


class _Interrupts:
    """Ctrl-C while an answer is generated.

    Attributes:
        requested: Whether the user wants the answer to stop.
    """

    def __init__(self) -> None:
        self.requested = False
        self._is_answering = False

    def handle(self, *_: Any) -> None:
        """Take SIGINT."""
        if not self._is_answering:
            raise KeyboardInterrupt
        self.requested = True

    @contextmanager
    def stopping(self, group: dist.ProcessGroup | None) -> Iterator[Callable[[], bool]]:
        """Yield a function that says, equally on all ranks, whether to stop. All ranks call it after each token."""
        self.requested = False
        self._is_answering = True

        def should_stop() -> bool:
            agreed = [self.requested]
            if group is not None:
                dist.broadcast_object_list(agreed, src=0, group=group)
            return agreed[0]  # `requested` may have changed meanwhile: for the next token

        try:
            yield should_stop
        finally:
            self._is_answering = False


@contextmanager
def _interrupts(grid: ParallelGrid) -> Iterator[_Interrupts]:
    """Take Ctrl-C on rank 0 for the time of a conversation.

    The other ranks follow rank 0. They ignore Ctrl-C to their end, because the last one may reach them late.
    """
    interrupts = _Interrupts()
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield interrupts
        return
    if grid.rank != 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        yield interrupts
        return
    previous = signal.signal(signal.SIGINT, interrupts.handle)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)
