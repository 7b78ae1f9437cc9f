"""Texts to be scored: one long text, documents, or a token file. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from neox.corpus import read_documents
from neox.data import IndexedDataset, check_fits
from neox.errors import EvaluationError
from neox.tokenizer import Tokenizer


def read_text(path: str | Path) -> str:
    """Return the whole file as one text. Raises EvaluationError where it is none, or empty."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: cannot be read as text ({error})") from error
    if not text.strip():
        raise EvaluationError(f"{path}: holds no text")
    return text


def read_passages(path: str | Path) -> Iterator[str]:
    """Yield passages with words in them: a line of a `.txt` each, or a document.

    Raises EvaluationError for a file without any, DataError for one that is broken.
    """
    lines = read_text(path).splitlines() if Path(path).suffix == ".txt" else read_corpus(path)
    found = False
    for text in lines:
        if text.strip():
            found = True
            yield text
    if not found:
        raise EvaluationError(f"{path}: holds no passages; expected a line of text each, or .jsonl with `text`")


def read_corpus(path: str | Path) -> Iterator[str]:
    """Yield the texts of a corpus. Raises EvaluationError for one without any, DataError for one that is broken."""
    found = False
    for document in read_documents(path, skip_bad=None):
        found = True
        yield document.text
    if not found:
        raise EvaluationError(f"{path}: holds no documents with text")


def is_token_file(path: str | Path) -> bool:
    """Whether a path names a `.bin` and `.idx`: either of them, or what they have in common."""
    return Path(f"{_prefix(path)}.idx").exists()


def open_token_file(path: str | Path, tokenizer: Tokenizer) -> IndexedDataset:
    """Open a token file that this tokenizer made, as far as its sidecar tells. Raises DataError."""
    dataset = IndexedDataset(_prefix(path))
    check_fits(dataset, vocab_size=tokenizer.vocab_size, tokenizer_hash=tokenizer.content_hash)
    return dataset


def token_documents(path: str | Path, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield each document's ids after an end-of-document, int32. Raises EvaluationError for ids that the tokenizer
    lacks."""
    dataset, found = open_token_file(path, tokenizer), False
    if dataset.num_tokens and (largest := int(dataset.tokens.max())) >= tokenizer.vocab_size:
        raise EvaluationError(
            f"{path}: holds token {largest}, and the tokenizer has {tokenizer.vocab_size}; another tokenizer made "
            "the file"
        )
    for first, last in zip(dataset.document_index[:-1], dataset.document_index[1:], strict=True):
        sequences = [dataset[sequence] for sequence in range(first, last)]
        if any(map(len, sequences)):
            found = True
            yield np.concatenate(([tokenizer.eod], *sequences), dtype=np.int32)
    if not found:
        raise EvaluationError(f"{path}: holds no documents with text")


def check_readable(kind: str, path: str, tokenizer: Tokenizer | None) -> None:
    """Raise EvaluationError or DataError where a text of this kind is not what it should be, as its beginning tells."""
    if kind == "wikitext":
        read_text(path)
    elif kind == "lambada":
        next(read_passages(path))
    elif not is_token_file(path):
        next(read_corpus(path))
    elif tokenizer is not None:
        open_token_file(path, tokenizer)


def _prefix(path: str | Path) -> str:
    return str(path).removesuffix(".bin").removesuffix(".idx")
