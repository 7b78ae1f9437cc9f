"""Documents of whole files: read in order, written as lines in compressed frames."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import orjson
import zstandard

from neox.corpus import BadInput, parse_records, read_blocks
from neox.errors import DataError
from neox.files import atomic_write
from neox.log import progress
from tools.web_text.step import Job, Record, S

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
    settings, counts = job.settings, job.counts
    with progress(f"{job.name}: reading", sum(os.path.getsize(file) for file in job.files), "B") as bar:
        for file in job.files:
            for block in read_blocks(
                file,
                block_bytes=_FRAME_BYTES,
                max_line_bytes=settings.max_line_mb * _MIB,
                limit_flag="--max-line-mb",
                consumed=bar.update,
            ):
                for record in [block] if isinstance(block, BadInput) else parse_records(block, key):
                    if isinstance(record, BadInput):
                        counts.add_bad(record, settings.skip_bad)
                        continue
                    counts.documents_in += 1
                    counts.bytes_in += text_bytes(record, key)
                    yield record


def write_lines(path: Path, lines: Iterable[bytes]) -> int:
    """Write lines atomically to a `.jsonl` or `.jsonl.zst` file; equal lines give equal bytes.

    Args:
        path: File to create or replace.
        lines: Lines with their newlines, as of `encode_line`.

    Returns:
        Number of lines.
    """
    held, size, count = list[bytes](), 0, 0
    with atomic_write(path) as file:
        for line in lines:
            held.append(line)
            size += len(line)
            count += 1
            if size >= _FRAME_BYTES:
                file.write(compress_lines(held, path))
                held, size = [], 0
        file.write(compress_lines(held, path))
        if not count:
            file.write(empty_file(path))
    return count


def empty_file(path: Path) -> bytes:
    """Return the content of a file without documents."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(b"") if path.name.endswith(".zst") else b""


def text_bytes(record: Record, key: str = "text") -> int:
    """Return the number of UTF-8 bytes of a record's text."""
    text = record.get(key) or ""
    return len(text.encode()) if isinstance(text, str) else len(text)


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
    compressed = data and path.name.endswith(".zst")
    return zstandard.ZstdCompressor(write_checksum=True).compress(data) if compressed else data
