"""Incremental decoding of token ids to text, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = "\ufffd"  # result of decoding an incomplete UTF-8 character


class TextCodec(Protocol):
    """Tokenizer methods that generation needs."""

    @property
    def eod(self) -> int:
        """End-of-document id."""
        ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids at which a continuation ends, the end-of-document id among them."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return token ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return text."""
        ...


def is_text(value: str) -> bool:
    """Return whether a string can be encoded as UTF-8; JSON can contain lone surrogates, which cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


class TextStream:
    """Text of one continuation, extended token by token.

    Only the last few tokens are decoded again at each step, so that the cost per token is constant. A token that ends
    inside a UTF-8 character adds no text until the character is complete.

    Attributes:
        text: Text so far, cut before the first stop string.
        stopped: Whether a stop string was found.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str] = ()) -> None:
        """Start with no text; `stop` strings end it."""
        self.codec = codec
        self.stop = tuple(stop)
        self.text = ""
        self.stopped = False
        self._ids: list[int] = []
        self._context = 0  # first of the ids that are decoded together
        self._read = 0  # ids that are in `text` already
        self._returned = 0  # characters that `push` has returned

    def push(self, token: int) -> str:
        """Add one token and return newly final text, without a possible beginning of a stop string."""
        self._ids.append(token)
        known = self.codec.decode(self._ids[self._context : self._read])
        now = self.codec.decode(self._ids[self._context :])
        if len(now) > len(known) and not now.endswith(_INCOMPLETE):
            self._grow(now[len(known) :])
            self._context = self._read
            self._read = len(self._ids)
        end = len(self.text)
        if not self.stopped:
            end -= self._held_back()
        return self._take(end)

    def finish(self) -> str:
        """Return the remaining text after the last token, including an incomplete character."""
        if not self.stopped:
            known = self.codec.decode(self._ids[self._context : self._read])
            self._grow(self.codec.decode(self._ids[self._context :])[len(known) :])
            self._read = len(self._ids)
        return self._take(len(self.text))

    def _grow(self, piece: str) -> None:
        """Append text and cut it at the earliest stop string, which may begin before the new part."""
        longest = max(map(len, self.stop), default=0)
        start = max(0, len(self.text) - longest)
        self.text += piece
        end = len(self.text)
        for word in self.stop:
            at = self.text.find(word, start)
            if at >= 0:
                end = min(end, at)
                self.stopped = True
        self.text = self.text[:end]

    def _held_back(self) -> int:
        """Return how many characters at the end of the text may be the beginning of a stop string."""
        longest = max(map(len, self.stop), default=1)
        for length in range(min(longest - 1, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(word.startswith(tail) for word in self.stop):
                return length
        return 0

    def _take(self, end: int) -> str:
        """Return the text up to `end` that has not been returned before."""
        piece = self.text[self._returned : end]
        self._returned = max(self._returned, end)
        return piece
