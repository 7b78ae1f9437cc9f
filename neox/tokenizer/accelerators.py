"""Encoders that turn many texts into one array of ids. Accelerators are checked against the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from neox.errors import TokenizerError, install_command
from neox.tokenizer.base import END_OF_DOCUMENT, Tokenizer
from neox.tokenizer.words import WordEncoder, cut, cut_reason

ACCELERATORS = ("auto", "off", "fastokens", "words")
_BATCH_CHARS = 1 << 18
_DIFFICULT_TEXTS = (
    "",
    " ",
    "\n\n \t\r\n  x",
    "it's we'll I'M '' 'tis they'd've",
    "naïve café Å e\u0301 \u1e9b\u0323 a\u0316\u0301 ﬁ Ⅷ ½ x²",
    "日本語 中文 한국어 \u1112\u1161\u11ab العربية हिन्दी ไทย",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 \u200b\u200d\ufeff\u00a0\u2028\u3000",
    f"a{END_OF_DOCUMENT}b {END_OF_DOCUMENT} {END_OF_DOCUMENT}{END_OF_DOCUMENT}<|padding|><|endof",
    "def f(x):\n        return x  +  1.5e-10\t# __init__\n",
    "\0\x01\x1b\x1c\x1f\x7f\x85",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 8 + " " * 40 + "=" * 80 + "1234567890" * 8,
)


class FlatEncoder(Protocol):
    """Encoder of many texts.

    Attributes:
        name: Name of the accelerator; `off` for none.
        needs_cuts: Whether the encoder needs memory in proportion to a piece of text that cannot be cut (about 110
            bytes for each byte of the piece).
    """

    name: str
    needs_cuts: bool

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts, uint32 [all tokens], and the length of each, int64 [texts]."""


class PlainEncoder:
    """Encoder that calls the tokenizer itself.

    The tokenizer's results are large, so it gets batches of bounded size. Long texts are cut into pieces at places
    where a cut does not change their ids.
    """

    name = "off"
    needs_cuts = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _may_cut(self) -> bool:
        return cut_reason(self._tokenizer) is None

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts, uint32 [all tokens], and the length of each, int64 [texts]."""
        ids = [np.empty(0, np.uint32)]
        lengths = np.zeros(len(texts), dtype=np.int64)
        for owners, pieces in self._batches(texts):
            for owner, piece_ids in zip(owners, self._tokenizer.encode_batch(pieces), strict=True):
                lengths[owner] += len(piece_ids)
                ids.append(np.array(piece_ids, dtype=np.uint32))
        return np.concatenate(ids), lengths

    def _batches(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
        """Yield batches of pieces, each with the numbers of the texts to which its pieces belong."""
        owners: list[int] = []
        pieces: list[str] = []
        size = 0
        for number, text in enumerate(texts):
            pieces_of_text: Iterable[str] = (text,)
            if len(text) > _BATCH_CHARS and self._may_cut:
                pieces_of_text = cut(text, _BATCH_CHARS)
            for piece in pieces_of_text:
                owners.append(number)
                pieces.append(piece)
                size += len(piece)
                if size >= _BATCH_CHARS:
                    yield owners, pieces
                    owners = []
                    pieces = []
                    size = 0
        if pieces:
            yield owners, pieces


class FastokensEncoder:
    """Encoder of the package `fastokens`, which reads the same `tokenizer.json`."""

    name = "fastokens"
    needs_cuts = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        from neox.tokenizer.huggingface import HFTokenizer

        if not isinstance(tokenizer, HFTokenizer):
            raise TokenizerError(f"fastokens reads Hugging Face tokenizers only, and this is a {tokenizer.name}")
        try:
            import fastokens
        except ImportError as error:
            raise TokenizerError(f"fastokens is not installed: {install_command('requirements-corpus.txt')}") from error
        try:
            self._backend = fastokens.Tokenizer.from_json_str(tokenizer.to_json())
        except Exception as error:  # the package documents no exception types
            raise TokenizerError(f"fastokens cannot read this tokenizer ({error})") from error
        self._split_special = not tokenizer.special_in_text

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts, uint32 [all tokens], and the length of each, int64 [texts]."""
        ids, offsets = self._backend.encode_batch_flat(list(texts), True, self._split_special)
        return np.frombuffer(ids, np.uint32), np.diff(np.frombuffer(offsets, np.uint64).astype(np.int64))


@dataclass(frozen=True)
class EncoderChoice:
    """Result of `choose_encoder`.

    Attributes:
        encoder: Encoder to use.
        note: Message for the user that says which faster encoders are not used and why; None if there is none.
    """

    encoder: FlatEncoder
    note: str | None = None


def make_encoder(tokenizer: Tokenizer, name: str) -> FlatEncoder:
    """Return the encoder with a name of ACCELERATORS, except `auto`.

    Raises:
        TokenizerError: If the name is unknown, or the encoder does not support the tokenizer.
    """
    if name == "fastokens":
        return FastokensEncoder(tokenizer)
    if name == "words":
        return WordEncoder(tokenizer)
    if name == "off":
        return PlainEncoder(tokenizer)
    raise TokenizerError(f"accelerator {name!r} is unknown; known: {', '.join(ACCELERATORS)}")


def choose_encoder(tokenizer: Tokenizer, wanted: str, sample: Sequence[str]) -> EncoderChoice:
    """Choose an encoder. It gives the same ids as the tokenizer for difficult texts and for a sample of the input.

    Args:
        tokenizer: Tokenizer with the right ids.
        wanted: Name of an accelerator. `auto` chooses the fastest one that passes the check, and `off` the tokenizer
            itself. An accelerator given by name must pass.
        sample: Texts of the input.

    Raises:
        TokenizerError: If the name is unknown, or the accelerator given by name does not pass.
    """
    if wanted == "off":
        return EncoderChoice(PlainEncoder(tokenizer))
    if wanted != "auto":
        return EncoderChoice(_checked_encoder(tokenizer, wanted, sample))
    rejected: list[str] = []
    encoder: FlatEncoder = PlainEncoder(tokenizer)
    for name in ("fastokens", "words"):
        try:
            encoder = _checked_encoder(tokenizer, name, sample)
            break
        except TokenizerError as error:
            rejected.append(str(error))
    if not rejected:
        return EncoderChoice(encoder)
    speed = {"words": "several times slower than with fastokens", "off": "many times slower than with an accelerator"}
    return EncoderChoice(encoder, f"tokenizing {speed[encoder.name]}: {'; '.join(rejected)}")


def _checked_encoder(tokenizer: Tokenizer, name: str, sample: Sequence[str]) -> FlatEncoder:
    """Return an encoder that has passed the check. Raises TokenizerError if it does not pass or is not available."""
    encoder = make_encoder(tokenizer, name)
    difference = first_difference(encoder, tokenizer, [*_DIFFICULT_TEXTS, *sample])
    if difference is not None:
        raise TokenizerError(difference)
    return encoder


def longest_piece(text: str, size: int, *, may_cut: bool) -> int:
    """Return the size in bytes of the longest piece of a text that is encoded at once.

    Args:
        text: The text.
        size: Number of characters after which a piece ends at the next possible position.
        may_cut: Whether texts may be cut for this tokenizer (see `cut_reason`).
    """
    if not may_cut:
        return len(text.encode())
    return max(len(piece.encode()) for piece in cut(text, size))


def first_difference(encoder: FlatEncoder, tokenizer: Tokenizer, texts: Sequence[str]) -> str | None:
    """Return a description of the first text to which an encoder gives other ids than the tokenizer.

    Returns:
        The description; None if there is no difference.
    """
    flat, lengths = encoder.encode_flat(texts)
    ends = np.cumsum(lengths)
    for text, ids, end, length in zip(texts, tokenizer.encode_batch(texts), ends, lengths, strict=True):
        if not np.array_equal(flat[end - length : end], np.asarray(ids, dtype=np.uint32)):
            return f"{encoder.name} gives other ids than `tokenizers` for {text[:60]!r}"
    return None
