"""Interface of tokenizers, and the tokenizer of bytes."""

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
        name: NeoX's name of the type, such as `HFTokenizer`. It is part of the content hash.
        vocab_size: Number of ids. Every id is smaller. The model pads its vocabulary further.
        eod: Id of the token that ends a document.
        further_end_ids: Ids at which generation ends, too, by the settings that came with the tokenizer.
        pad: Id of `<|padding|>`; None if the vocabulary has none.
        bos: Id of the token that a configuration names as the beginning of texts; None if it names none.
        before_text: Ids that `encode` writes before each text, such as that of `<s>`.
        after_text: Ids that `encode` writes after each text.
        original_hash: `content_hash` without the tokens that `added_tokens` has added, whose other ids mean the same.
            None if none were added.
    """

    name: str
    vocab_size: int
    eod: int
    pad: int | None = None
    bos: int | None = None
    before_text: tuple[int, ...] = ()
    after_text: tuple[int, ...] = ()
    original_hash: str | None = None
    further_end_ids: tuple[int, ...] = ()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids at which generation ends: the end of a document, and those of its settings."""
        return (self.eod, *(number for number in self.further_end_ids if number != self.eod))

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text between `before_text` and `after_text`. No end-of-document id is added."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text. They are the same as those of `encode`."""
        return [self.encode(text) for text in texts]

    def encode_bare(self, text: str) -> list[int]:
        """Return the ids of a text alone, such as one that a chat template has made with all special tokens."""
        return self.encode(text)

    def encode_inside(self, text: str) -> list[int]:
        """Return the ids of a text that follows another text: also without the blank that some write before the first.

        A token that would hold characters of both texts is not made.
        """
        return self.encode_bare(text)

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including the names of special tokens."""

    def decode_shown(self, ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens."""
        return self.decode(ids)

    def special_name(self, token: int) -> str | None:
        """Return the text of a special token, which `decode_shown` leaves out; None for other tokens."""
        return None

    def token_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, such as `[MASK]`; None if there is no such token."""
        return None

    def word_continuations(self) -> list[bool]:
        """Return, for each id of the vocabulary, whether it continues the word of the id before it."""
        return [False] * self.vocab_size

    @abstractmethod
    def _content(self) -> Any:
        """Return everything that determines the meaning of ids, as a JSON value."""

    @property
    def known_hashes(self) -> tuple[str, ...]:
        """Hashes of the tokenizers whose ids all mean the same here: its own, and that without added tokens."""
        if self.original_hash is None:
            return (self.content_hash,)
        return (self.content_hash, self.original_hash)

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of everything that determines the meaning of ids, in hexadecimal.

        It covers the type, the vocabulary and the rules that split a text. It does not depend on white space in files
        or on `special_in_text`.
        """
        content = orjson.dumps([self.name, self._content()], option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(content).hexdigest()


class CharLevelTokenizer(Tokenizer):
    """gpt-neox's character tokenizer. The ids are the UTF-8 bytes of the text.

    gpt-neox decodes ids below 32 as spaces. Here every byte is decoded to itself. Ids that are no bytes, and the end of
    a document, are decoded to U+FFFD.
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
        data = bytearray()
        for i in ids:
            if 0 < i < 256:
                data.append(i)
            else:
                data.append(self.eod)
        parts = bytes(data).split(bytes([self.eod]))
        return "\ufffd".join(part.decode("utf-8", "replace") for part in parts)

    def _content(self) -> Any:
        return "utf-8 bytes, eod 0, pad 1, vocabulary 512"
