"""Encoding of blocks of JSON lines to token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from neox.corpus import BadInput, LineBlock, Position, parse_texts
from neox.data.indexed_dataset import IGNORED
from neox.errors import TokenizerError, needs_package
from neox.preprocess.sentences import sentence_splitter
from neox.preprocess.settings import PreprocessSettings
from neox.tokenizer import Tokenizer
from neox.tokenizer.flat import choose_encoder, first_difference, longest_piece
from neox.tokenizer.words import cut_reason

_CHECKED_CHARS = 2048  # the tokenizer is about a hundred times slower than an accelerator, so checks must be small
_CHECKED_AMONG = 16


@dataclass(frozen=True)
class EncodeJob:
    """Settings of encoding, the same for every worker.

    Attributes:
        settings: Settings of the run.
        dtype: Of the ids.
        sample: Texts to check the accelerator with, so that all workers choose the same one.
        piece_bytes: Limit of text that a tokenizer encodes at once; a longer piece is a bad input.
    """

    settings: PreprocessSettings
    dtype: str
    sample: tuple[str, ...]
    piece_bytes: int


@dataclass(frozen=True)
class EncodedKey:
    """Documents of one key in a block.

    Attributes:
        ids: Ids of all documents [all tokens].
        lengths: Tokens of each document, int32 [documents], or of each sentence [sentences].
        counts: Sentences of each document, int32 [documents]; None for whole documents.
    """

    ids: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray | None = None


@dataclass(frozen=True)
class EncodedBlock:
    """Encoded block.

    Attributes:
        end: Start of the next block.
        keys: Documents of each key.
        bad: Bad lines.
        not_strict: Number of lines that only gpt-neox's parser reads.
        text_bytes: Size of the block.
        accelerator: Accelerator used; None before it is chosen.
        note: Faster accelerators that are not used, and why; None if there is nothing to say.
    """

    end: Position
    keys: tuple[EncodedKey, ...]
    bad: tuple[BadInput, ...]
    not_strict: int
    text_bytes: int
    accelerator: str | None
    note: str | None


class BlockEncoder:
    """Encoder of blocks in this process."""

    def __init__(self, job: EncodeJob, tokenizer: Tokenizer | None = None) -> None:
        """Choose an accelerator.

        Args:
            job: Settings of encoding.
            tokenizer: The tokenizer of the job (default: it is built).

        Raises:
            TokenizerError: If the tokenizer or a required accelerator is not available.
        """
        self.job = job
        self.tokenizer = tokenizer or job.settings.tokenizer.build()
        self.dtype = np.dtype(job.dtype)
        self.fix = load_ftfy() if job.settings.ftfy else None
        sentences = job.settings.sentences
        self.split = None if sentences is None else sentence_splitter(sentences)
        choice = choose_encoder(self.tokenizer, job.settings.accelerator, job.sample)
        self.encoder, self.note = choice.encoder, choice.note

    def encode(self, block: LineBlock) -> EncodedBlock:
        """Encode each document of a block; documents without ids are left out."""
        found = parse_texts(block, self.job.settings.text_keys, self._problem if self.encoder.needs_cuts else None)
        keys = tuple(self._encode_key(texts) for texts in found.columns)
        if pattern := self.job.settings.mask_before:
            keys = (*keys, EncodedKey(labels_after(keys[0], pattern), keys[0].lengths))
        bad, size = tuple(found.bad), len(block.data)
        return EncodedBlock(block.end, keys, bad, found.not_strict, size, self.encoder.name, self.note)

    def _problem(self, text: str) -> str | None:
        """Return why a text needs too much memory at once; None if it does not."""
        allowed = self.job.piece_bytes
        if 4 * len(text) <= allowed:
            return None
        size = longest_piece(text, allowed // 8, may_cut=self._may_cut)
        if size <= allowed:
            return None
        return (
            f"{size:,} bytes of text without a position where they may be cut, more than the {allowed:,} that memory "
            "allows (--memory-mb; the accelerator fastokens, if it supports the tokenizer, needs no such position)"
        )

    @cached_property
    def _may_cut(self) -> bool:
        return cut_reason(self.tokenizer) is None

    def _encode_key(self, texts: list[str]) -> EncodedKey:
        if self.fix is not None:
            texts = [fixed for text in texts if (fixed := self.fix(text))]
        owners = None  # document of each sentence
        if self.split is not None:
            split = [self.split(text) for text in texts]
            owners = np.repeat(np.arange(len(split)), [len(parts) for parts in split])
            texts = [sentence for parts in split for sentence in parts]
        if not texts:
            empty = None if owners is None else np.empty(0, np.int32)
            return EncodedKey(np.empty(0, self.dtype), np.empty(0, np.int32), empty)
        ids, lengths = self.encoder.encode_flat(texts)
        self._check_one(texts, len(ids))
        if owners is not None:
            counts = np.bincount(owners[lengths > 0])
            kept = lengths[lengths > 0].astype(np.int32)
            return EncodedKey(ids.astype(self.dtype), kept, counts[counts > 0].astype(np.int32))
        lengths = lengths[lengths > 0]
        if self.job.settings.append_eod:
            return EncodedKey(*_closed(ids, lengths, self.tokenizer.eod, self.dtype))
        return EncodedKey(ids.astype(self.dtype), lengths.astype(np.int32))

    def _check_one(self, texts: Sequence[str], seed: int) -> None:
        """Compare one short document of each block, if it has one, with the tokenizer's own ids."""
        if self.encoder.name == "off":
            return
        start = seed % len(texts)
        short = (text for text in texts[start : start + _CHECKED_AMONG] if len(text) <= _CHECKED_CHARS)
        difference = first_difference(self.encoder, self.tokenizer, list(islice(short, 1)))
        if difference is not None:
            raise TokenizerError(f"{difference}. Run again with --accelerator off --restart")


def labels_after(documents: EncodedKey, pattern: Sequence[int]) -> np.ndarray:
    """Return ids, IGNORED in each document up to the end of the first occurrence of a pattern (gpt-neox's labels).

    A document without the pattern is kept whole.
    """
    ids, labels = documents.ids, documents.ids.copy()
    found = np.ones(max(0, len(ids) - len(pattern) + 1), dtype=bool)
    for place, token in enumerate(pattern):
        found &= ids[place : place + len(found)] == token
    matches = np.flatnonzero(found) + len(pattern)  # the end of each occurrence
    ends = np.cumsum(documents.lengths, dtype=np.int64)
    for begin, end in zip((ends - documents.lengths).tolist(), ends.tolist(), strict=True):
        first = int(np.searchsorted(matches, begin + len(pattern)))
        if first < len(matches) and matches[first] <= end:
            labels[begin : matches[first]] = IGNORED
    return labels


def _closed(ids: np.ndarray, lengths: np.ndarray, eod: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Append the end-of-document id to each document."""
    lengths = lengths + 1
    last = np.cumsum(lengths) - 1
    out = np.empty(len(ids) + len(lengths), dtype)
    keep = np.ones(len(out), bool)
    keep[last] = False
    out[keep] = ids
    out[last] = eod
    return out, lengths.astype(np.int32)


def load_ftfy() -> Callable[[str], str]:
    """Return `ftfy.fix_text`. Raises TokenizerError if the package is missing."""
    with needs_package(TokenizerError, "--ftfy", "ftfy", "requirements-corpus.txt"):
        import ftfy
    return ftfy.fix_text
