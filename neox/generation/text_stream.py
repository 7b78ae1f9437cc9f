"""Token ids to text while they come, and the strings that end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = "\ufffd"  # what decoding gives for the first bytes of a character whose last are still to come


class TextCodec(Protocol):
    """The part of a tokenizer that generation needs."""

    eod: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8: JSON can also spell halves of pairs, which no tokenizer takes."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


class TextStream:
    """Text of one continuation, growing token by token.

    Decoding the last few tokens again at each step (not all of them) keeps the cost per token constant; a token that
    ends inside a UTF-8 character adds nothing until the character is whole. `stop` strings cut the text and set
    `stopped`; text that could be the beginning of one is held back from `push`, not from `text`.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str] = ()) -> None:
        self.codec, self.stop = codec, tuple(stop)
        self.text = ""
        self.stopped = False
        self._ids: list[int] = []
        self._context = 0  # ids from here on are decoded together ...
        self._read = 0  # ... and those before here are in `text` already
        self._given = 0  # characters that `push` has returned

    def push(self, token: int) -> str:
        """Add one token and return the text that is certain to stay."""
        self._ids.append(token)
        known = self.codec.decode(self._ids[self._context : self._read])
        now = self.codec.decode(self._ids[self._context :])
        if len(now) > len(known) and not now.endswith(_INCOMPLETE):
            self._grow(now[len(known) :])
            self._context, self._read = self._read, len(self._ids)
        return self._take(len(self.text) - (0 if self.stopped else self._held_back()))

    def finish(self) -> str:
        """No more tokens: return what was held back, an incomplete character included."""
        if not self.stopped:
            known = self.codec.decode(self._ids[self._context : self._read])
            self._grow(self.codec.decode(self._ids[self._context :])[len(known) :])
            self._read = len(self._ids)
        return self._take(len(self.text))

    def _grow(self, piece: str) -> None:
        """Append a piece and cut at the earliest stop string, which may have begun before the piece."""
        longest = max(map(len, self.stop), default=0)
        start = max(0, len(self.text) - longest)
        self.text += piece
        ends = [at for at in (self.text.find(word, start) for word in self.stop) if at >= 0]
        if ends:
            self.text, self.stopped = self.text[: min(ends)], True

    def _held_back(self) -> int:
        """Characters at the end of the text that may turn out to be the beginning of a stop string."""
        for length in range(min(max(map(len, self.stop), default=1) - 1, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(word.startswith(tail) for word in self.stop):
                return length
        return 0

    def _take(self, end: int) -> str:
        piece = self.text[self._given : end]
        self._given = max(self._given, end)
        return piece
