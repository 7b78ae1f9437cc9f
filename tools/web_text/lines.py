"""Documents of whole files: read in order, written as lines in compressed frames."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import orjson
import zstandard

from neox.corpus import BadInput, parse_records, read_blocks
from neox.errors import DataError
from neox.files import atomic_write
from neox.log import progress
from neox.storage import size_of
from tools.web_text.step import Job, Record, S

T = TypeVar("T", bound=Any)
_FRAME_BYTES = 1 << 20
_MIB = 1 << 20


def read_records(job: Job[S], key: str = "text") -> Iterator[Record]:
    """Yield the documents of all inputs of a job in order, and count them, their bytes and bad inputs.

    Args:
        job: The job.
        key: Key of the text.

    Raises:
        DataError: If an input cannot be read, or too many are bad.
    """
    settings = job.settings
    counts = job.counts
    with progress(f"{job.name}: reading", total_bytes(job.files), "B") as bar:
        for file in job.files:
            for block in read_blocks(
                file,
                block_bytes=_FRAME_BYTES,
                max_line_bytes=settings.max_line_mb * _MIB,
                limit_flag="--max-line-mb",
                consumed=bar.update,
            ):
                records = [block] if isinstance(block, BadInput) else parse_records(block, key)
                for record in records:
                    if isinstance(record, BadInput):
                        counts.add_bad(record, settings.skip_bad)
                        continue
                    counts.documents_in += 1
                    counts.bytes_in += text_bytes(record, key)
                    yield record


def total_bytes(files: Iterable[str]) -> int:
    """Return the size of some files."""
    return sum(map(size_of, files))


def write_lines(path: Path, lines: Iterable[bytes]) -> int:
    """Write lines atomically to a `.jsonl` or `.jsonl.zst` file; equal lines give equal bytes.

    Args:
        path: File to create or replace.
        lines: Lines with their newlines, as of `encode_line`.

    Returns:
        Number of lines.
    """
    count = 0
    with atomic_write(path) as file:
        for batch in batches(lines, _FRAME_BYTES):
            file.write(compress_lines(batch, path))
            count += len(batch)
        if not count:
            file.write(empty_file(path))
    return count


def batches(items: Iterable[T], limit: int, size: Callable[[T], int] = len) -> Iterator[list[T]]:
    """Yield items in lists; each but the last weighs at least `limit`, and less without its last item.

    Args:
        items: Items in order.
        limit: Weight at which a list is complete.
        size: Function that returns the weight of an item.
    """
    batch: list[T] = []
    weight = 0
    for item in items:
        batch.append(item)
        weight += size(item)
        if weight >= limit:
            yield batch
            batch = []
            weight = 0
    if batch:
        yield batch


def empty_file(path: Path) -> bytes:
    """Return the content of a file without documents."""
    if not path.name.endswith(".zst"):
        return b""
    return _compressed(b"")


def text_bytes(record: Record, key: str = "text") -> int:
    """Return the number of UTF-8 bytes of a record's text."""
    text = record.get(key) or ""
    if isinstance(text, str):
        text = text.encode()
    return len(text)


def encode_line(record: Record) -> bytes:
    """Return a record as a JSON line. Raises DataError if a value cannot be written as JSON."""
    try:
        return orjson.dumps(record) + b"\n"
    except TypeError:
        try:  # integers of more than 64 bits
            return json.dumps(record, ensure_ascii=False).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise DataError(f"a document cannot be written as JSON: {error}") from error


def compress_lines(lines: list[bytes], path: Path) -> bytes:
    """Return lines as they are written to `path`: as one zstd frame with a checksum if its name ends with `.zst`."""
    data = b"".join(lines)
    if not data or not path.name.endswith(".zst"):
        return data
    return _compressed(data)


def _compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)
