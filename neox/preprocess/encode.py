"""Encoding of blocks of JSON lines to token ids: the values that all encoders share, and the encoder of plain texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, compress

import numpy as np

from neox.corpus import BadInput, LineBlock, Position, parse_texts
from neox.data.token_files.indexed_dataset import IGNORED
from neox.errors import TokenizerError, needs_package
from neox.preprocess.sentences import sentence_splitter
from neox.preprocess.settings import PreprocessSettings
from neox.tokenizer import HFTokenizer, Tokenizer
from neox.tokenizer.accelerators import choose_encoder, first_difference, longest_piece
from neox.tokenizer.words import cut_reason

# The tokenizer is about a hundred times slower than an accelerator, so only a short text of each block is checked.
_CHECKED_CHARS = 2048
_CHECKED_AMONG = 16


@dataclass(frozen=True)
class EncodeJob:
    """Settings of encoding, the same for every worker.

    Attributes:
        settings: Settings of the run.
        dtype: Dtype of the ids.
        sample: Texts with which an accelerator is checked. They are the same for all workers, so that all choose the
            same accelerator.
        piece_bytes: Largest size of a text that is encoded at once. A longer one is a bad input.
    """

    settings: PreprocessSettings
    dtype: str
    sample: tuple[str, ...]
    piece_bytes: int

    def marks_tokenizer(self, built: Tokenizer | None, purpose: str) -> HFTokenizer:
        """Return the tokenizer for texts in which special tokens mark roles and answers.

        Args:
            built: The job's tokenizer, if it is already built.
            purpose: Who needs it, as the subject of the message: `chat templates need`.

        Raises:
            TokenizerError: If it does not recognize special tokens in texts.
        """
        tokenizer = built or self.settings.tokenizer.build()
        if not isinstance(tokenizer, HFTokenizer) or not tokenizer.special_in_text:
            raise TokenizerError(f"{purpose} a tokenizer that recognizes special tokens in texts, not {tokenizer.name}")
        return tokenizer


@dataclass(frozen=True)
class EncodedKey:
    """Documents of one key in a block.

    Attributes:
        ids: Ids of all documents [all tokens].
        lengths: Number of tokens of each document, int32 [documents], or of each sentence, int32 [sentences].
        counts: Number of sentences of each document, int32 [documents]; None if documents are whole.
        metadata: JSON line of the kept columns of each document; empty if none are kept.
        document_bytes: UTF-8 bytes of the texts that became the ids; None if the ids are not those of plain texts.
    """

    ids: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray | None = None
    metadata: bytes = b""
    document_bytes: int | None = None

    @classmethod
    def of(cls, documents: Sequence[np.ndarray]) -> EncodedKey:
        """Return whole documents, each int32 [tokens]; there may be none."""
        lengths = np.array([len(document) for document in documents], np.int32)
        nothing = np.empty(0, np.int32)  # numpy cannot join an empty list
        return cls(np.concatenate([nothing, *documents]), lengths)


@dataclass(frozen=True)
class EncodedBlock:
    """Encoded block.

    Attributes:
        end: Start of the next block.
        keys: Documents of each key.
        bad: Bad lines.
        not_strict: Number of lines that only gpt-neox's parser reads.
        text_bytes: Size of the block.
        accelerator: Name of the accelerator; None if it has not been chosen yet.
        note: Message that says which faster accelerators are not used and why; None if there is none.
        filtered: Number of lines that filters leave out.
        losses: What chat templates leave out, each with its number of lines.
    """

    end: Position
    keys: tuple[EncodedKey, ...]
    bad: tuple[BadInput, ...]
    not_strict: int
    text_bytes: int
    accelerator: str | None
    note: str | None
    filtered: int = 0
    losses: Mapping[str, int] = field(default_factory=dict)


class BlockEncoder:
    """Encoder of blocks in this process."""

    def __init__(self, job: EncodeJob, tokenizer: Tokenizer | None = None) -> None:
        """Choose an accelerator.

        Args:
            job: Settings of encoding.
            tokenizer: Tokenizer of the job, if it is already built.

        Raises:
            TokenizerError: If the tokenizer or a required accelerator is not available.
        """
        self.job = job
        self.tokenizer = tokenizer or job.settings.tokenizer.build()
        self.dtype = np.dtype(job.dtype)
        self.fix = load_ftfy() if job.settings.ftfy else None
        self.split: Callable[[str], list[str]] | None = None
        if job.settings.sentences is not None:
            self.split = sentence_splitter(job.settings.sentences)
        choice = choose_encoder(self.tokenizer, job.settings.accelerator, job.sample)
        self.encoder = choice.encoder
        self.note = choice.note

    def encode(self, block: LineBlock) -> EncodedBlock:
        """Encode each document of a block. Documents without ids are left out."""
        settings = self.job.settings
        problem = self._problem if self.encoder.needs_cuts else None
        found = parse_texts(block, settings.text_keys, problem, settings.kept_columns)
        keys = list(map(self._encode_key, found.columns, found.metadata))
        if settings.mask_before:
            labels = labels_after(keys[0], settings.mask_before)
            keys.append(EncodedKey(labels, keys[0].lengths, metadata=keys[0].metadata))
        return EncodedBlock(
            end=block.end,
            keys=tuple(keys),
            bad=tuple(found.bad),
            not_strict=found.not_strict,
            text_bytes=len(block.data),
            accelerator=self.encoder.name,
            note=self.note,
            filtered=found.filtered,
        )

    def _problem(self, text: str) -> str | None:
        """Return a message if a text needs too much memory at once, otherwise None."""
        allowed = self.job.piece_bytes
        if 4 * len(text) <= allowed:
            return None
        size = longest_piece(text, allowed // 8, may_cut=self._may_cut)
        if size <= allowed:
            return None
        return (
            f"{size:,} bytes of text without a place where they may be cut, more than the {allowed:,} that memory "
            "allows (--memory-mb; the accelerator fastokens, if it supports the tokenizer, needs no such place)"
        )

    @cached_property
    def _may_cut(self) -> bool:
        return cut_reason(self.tokenizer) is None

    def _encode_key(self, texts: list[str], metadata: list[bytes]) -> EncodedKey:
        """Encode the texts of one key, each with a line of metadata."""
        if self.fix is not None:
            texts = list(map(self.fix, texts))
            metadata = list(compress(metadata, texts))
            texts = list(filter(None, texts))
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if self.split is not None:
            sentences = self._encode_sentences([self.split(text) for text in texts], metadata)
            return replace(sentences, document_bytes=size)
        ids, lengths = self._encode_texts(texts)
        kept = b"".join(compress(metadata, lengths > 0))
        lengths = lengths[lengths > 0]
        if self.job.settings.append_eod:
            ended = with_eod(ids, lengths, self.tokenizer.eod, self.dtype)
            return replace(ended, metadata=kept, document_bytes=size)
        return EncodedKey(ids.astype(self.dtype), lengths.astype(np.int32), metadata=kept, document_bytes=size)

    def _encode_sentences(self, documents: list[list[str]], metadata: list[bytes]) -> EncodedKey:
        """Encode documents that are divided into sentences. Sentences without ids are left out."""
        sentences = list(chain.from_iterable(documents))
        owners = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
        ids, lengths = self._encode_texts(sentences)
        counts = np.bincount(owners[lengths > 0], minlength=len(documents))
        return EncodedKey(
            ids=ids.astype(self.dtype),
            lengths=lengths[lengths > 0].astype(np.int32),
            counts=counts[counts > 0].astype(np.int32),
            metadata=b"".join(compress(metadata, counts > 0)),
        )

    def _encode_texts(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts [all tokens], and the length of each [texts]. Raises TokenizerError if wrong."""
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        ids, lengths = self.encoder.encode_flat(texts)
        if self.encoder.name == "off":
            return ids, lengths

        # An accelerator's ids of one short text, if there is one, are compared with those of the tokenizer itself.
        start = len(ids) % len(texts)
        for text in texts[start : start + _CHECKED_AMONG]:
            if len(text) <= _CHECKED_CHARS:
                difference = first_difference(self.encoder, self.tokenizer, [text])
                if difference is not None:
                    raise TokenizerError(f"{difference}. Run again with --accelerator off --restart")
                break
        return ids, lengths


def labels_after(documents: EncodedKey, pattern: Sequence[int]) -> np.ndarray:
    """Return labels as gpt-neox makes them: tokens up to the first occurrence of a pattern are IGNORED.

    Args:
        documents: Encoded documents.
        pattern: Ids after which a document is trained. A document without them is trained as a whole.

    Returns:
        Label of each token [all tokens].
    """
    ids = documents.ids
    is_start = np.ones(max(0, len(ids) - len(pattern) + 1), dtype=bool)  # whether the pattern starts at each token
    for place, token in enumerate(pattern):
        is_start &= ids[place : place + len(is_start)] == token
    pattern_ends = np.flatnonzero(is_start) + len(pattern)
    document_ends = np.cumsum(documents.lengths, dtype=np.int64)
    document_starts = document_ends - documents.lengths
    labels = ids.copy()
    for begin, end in zip(document_starts.tolist(), document_ends.tolist(), strict=True):
        first = int(np.searchsorted(pattern_ends, begin + len(pattern)))
        if first < len(pattern_ends) and pattern_ends[first] <= end:
            labels[begin : pattern_ends[first]] = IGNORED
    return labels


def with_eod(ids: np.ndarray, lengths: np.ndarray, eod: int, dtype: np.dtype) -> EncodedKey:
    """Append the end-of-document id to each document.

    Args:
        ids: Ids of all documents [all tokens].
        lengths: Number of tokens of each document [documents].
        eod: End-of-document id.
        dtype: Dtype of the result.
    """
    lengths = lengths + 1
    last_tokens = np.cumsum(lengths) - 1
    is_text = np.ones(len(ids) + len(lengths), bool)
    is_text[last_tokens] = False
    result = np.empty(len(is_text), dtype)
    result[is_text] = ids
    result[last_tokens] = eod
    return EncodedKey(result, lengths.astype(np.int32))


def load_ftfy() -> Callable[[str], str]:
    """Return `ftfy.fix_text`. Raises TokenizerError if the package is not installed."""
    with needs_package(TokenizerError, "--ftfy", "ftfy", "requirements-corpus.txt"):
        import ftfy
    return ftfy.fix_text
