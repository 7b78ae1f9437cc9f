"""Incremental decoding of token ids to text, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from neox.tokenizer import Tokenizer
from neox.tokenizer.positions import added_text, is_complete, tail


def is_text(value: str) -> bool:
    """Return whether a string can be encoded as UTF-8; JSON can contain lone surrogates, which cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


class TextStream:
    """Text of one continuation, extended token by token.

    Only the last few tokens are decoded again at each step, so that the cost per token is constant. A token that ends
    inside a UTF-8 character adds no text until the character is complete. Special tokens have no text, but stop strings
    may contain their names.

    Attributes:
        stopped: Whether a stop string was found.
    """

    def __init__(self, codec: Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        """Start with no text.

        Args:
            codec: Tokenizer.
            stop: Strings that end the text.
            before: Ids that it continues.
        """
        self.codec = codec
        self.stop = tuple(stop)
        self.stopped = False
        self._ids = tail(codec, before)
        self._context = 0  # first of the ids that are decoded together
        self._read = len(self._ids)  # ids that are before the text, or in it already
        self._written = ""  # text so far with the names of special tokens, in which stop strings are searched
        self._names: list[tuple[int, int]] = []  # where these names stand
        self._returned = 0  # characters of `_written` that `push` has returned

    @property
    def text(self) -> str:
        """Text so far, cut before the first stop string."""
        return self._shown(0, len(self._written))

    def push(self, token: int) -> str:
        """Add one token and return newly final text, without a possible beginning of a stop string."""
        self._ids.append(token)
        name = self.codec.special_name(token)
        if name is not None:
            self._names.append((len(self._written), len(self._written) + len(name)))
            self._grow(name)
        else:
            known, now = self._decoded()
            new = added_text(known, now)
            if new and is_complete(now):
                self._grow(new)
                if is_complete(known):  # otherwise the prompt ends inside a character
                    self._context = self._read
                self._read = len(self._ids)
        end = len(self._written)
        if not self.stopped:
            end -= self._held_back()
        return self._take(end)

    def finish(self) -> str:
        """Return the remaining text after the last token, including an incomplete character."""
        if not self.stopped:
            known, now = self._decoded()
            if now.startswith(known):
                self._grow(now[len(known) :])
            else:  # an incomplete character breaks those before it, if they are written in bytes
                self._grow(self.codec.decode_shown(self._ids[self._read :]))
            self._read = len(self._ids)
        return self._take(len(self._written))

    def _decoded(self) -> tuple[str, str]:
        """Return the text of the last ids before the new ones, and the text of both."""
        known = self.codec.decode_shown(self._ids[self._context : self._read])
        return known, self.codec.decode_shown(self._ids[self._context :])

    def _grow(self, piece: str) -> None:
        """Append text and cut it at the earliest stop string, which may begin before the new part."""
        longest = max(map(len, self.stop), default=0)
        start = max(0, len(self._written) - longest)
        self._written += piece
        end = len(self._written)
        for word in self.stop:
            at = self._written.find(word, start)
            if at >= 0:
                end = min(end, at)
                self.stopped = True
        self._written = self._written[:end]

    def _held_back(self) -> int:
        """Return how many characters at the end of the text may be the beginning of a stop string."""
        longest = max(map(len, self.stop), default=1)
        for length in range(min(longest - 1, len(self._written)), 0, -1):
            tail_text = self._written[-length:]
            if any(word.startswith(tail_text) for word in self.stop):
                return length
        return 0

    def _take(self, end: int) -> str:
        """Return the text up to `end` that has not been returned before."""
        piece = self._shown(self._returned, end)
        self._returned = max(self._returned, end)
        return piece

    def _shown(self, start: int, end: int) -> str:
        """Return a part of the text without the names of special tokens."""
        parts = []
        for first, after in self._names:
            if after > start:
                parts.append(self._written[start : min(first, end)])
                start = after
        return "".join([*parts, self._written[start:end]])
