"""What every tokenizer offers: text to ids and back, with a hash that says which tokenizer made a dataset."""

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
    """Text to ids and back.

    name: NeoX's name of the type (`HFTokenizer`), part of the content hash.
    """

    name: str

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids: every id is below it. The model pads it further."""

    @property
    @abstractmethod
    def eod(self) -> int:
        """The id that ends a document."""

    @property
    def pad(self) -> int | None:
        """The id of `<|padding|>`, where the vocabulary has one."""
        return None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without an end-of-document id of ours."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, equal to `encode` one by one."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, end-of-document and other special tokens written out."""

    @abstractmethod
    def _content(self) -> Any:
        """Return what decides what ids mean, as JSON-able data."""

    @cached_property
    def content_hash(self) -> str:
        """sha256 (hex) of the type, the vocabulary and how text is split: what an id means.

        White space in files plays no part, nor whether a literal end-of-document token in a text was read as one.
        """
        content = orjson.dumps([self.name, self._content()], option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(content).hexdigest()
