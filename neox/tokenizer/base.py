"""Tokenizer interface, and the tokenizer of bytes."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import orjson

END_OF_DOCUMENT = "<|endoftext|>"
PADDING = "<|padding|>"


class Tokenizer(ABC):
    """Conversion between text and token ids.

    Attributes:
        name: NeoX's name of the type (`HFTokenizer`), part of the content hash.
        vocab_size: Number of ids; every id is below it. The model pads it further.
        eod: Id that ends a document.
        pad: Id of `<|padding|>`, None if the vocabulary has none.
    """

    name: str
    vocab_size: int
    eod: int
    pad: int | None = None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end-of-document id at the end."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, equal to `encode` one by one."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; special tokens such as end-of-document are written out."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary, such as `[MASK]`; None if it has none."""
        return None

    def word_continuations(self) -> list[bool]:
        """Return whether each id continues the word of the id before it."""
        return [False] * self.vocab_size

    @abstractmethod
    def _content(self) -> Any:
        """Return everything that determines what ids mean, as JSON."""

    @cached_property
    def content_hash(self) -> str:
        """sha256 (hex) of the type, the vocabulary and how text is split: what an id means.

        It does not depend on white space in files, nor on `special_in_text`.
        """
        content = orjson.dumps([self.name, self._content()], option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(content).hexdigest()


class CharLevelTokenizer(Tokenizer):
    """gpt-neox's character tokenizer: the UTF-8 bytes of the text, end-of-document 0, padding 1, vocabulary 512.

    gpt-neox decodes ids below 32 as spaces; here every byte is decoded as it was, and ids above 255 and the end of a
    document as U+FFFD.
    """

    name = "CharLevelTokenizer"
    vocab_size = 512
    eod = 0
    pad = 1

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        runs = bytes(i if 0 < i < 256 else 0 for i in ids).split(b"\0")
        return "\ufffd".join(run.decode("utf-8", "replace") for run in runs)

    def _content(self) -> Any:
        return "utf-8 bytes, eod 0, pad 1, vocabulary 512"
