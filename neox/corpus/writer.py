"""Documents as `.jsonl.zst` in the Pile's form, with checksums, and never half a file under the final name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import orjson
import zstandard

from neox.corpus.document import Document
from neox.errors import DataError
from neox.files import atomic_write


def write_documents(path: str | Path, documents: Iterable[Document], *, level: int = 3) -> int:
    """Write documents as lines `{"text": ..., "meta": ...}` in one zstd frame with a checksum; return how many.

    The file is written beside its name (`.partial`) and renamed once it is whole and on disk; after an error nothing is
    left. Raises DataError if it cannot be written or a text cannot be encoded.
    """
    path = Path(path)
    if not path.name.endswith(".jsonl.zst"):
        raise DataError(f"{path}: documents are written as .jsonl.zst; choose a name that ends so")
    count = 0
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
    try:
        with atomic_write(path) as file, compressor.stream_writer(file, closefd=False) as stream:
            for document in documents:
                stream.write(_line(document, count, path))
                count += 1
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error
    return count


def _line(document: Document, number: int, path: Path) -> bytes:
    try:
        return orjson.dumps({"text": document.text, "meta": dict(document.meta)}) + b"\n"
    except TypeError as error:
        raise DataError(f"{path}: document {number} cannot be written as JSON: {error}") from error
