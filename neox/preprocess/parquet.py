"""Parquet files as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from neox.errors import DataError, needs_package
from neox.files import write_text

_PARQUET = ".parquet"


def as_lines(path: str, output_prefix: str) -> str:
    """Return a file of JSON lines with the rows of a Parquet file; other paths are returned unchanged.

    The file is `OUTPUT_PREFIX.NAME.jsonl`, in which line N is row N. It is written again only if the Parquet file is
    newer.

    Raises:
        DataError: If the file cannot be read, or pyarrow is not installed.
    """
    source = Path(path)
    if source.suffix != _PARQUET:
        return path
    lines = Path(f"{output_prefix}.{source.stem}.jsonl")
    if not lines.exists() or lines.stat().st_mtime < source.stat().st_mtime:
        lines.parent.mkdir(parents=True, exist_ok=True)
        write_text(lines, (json.dumps(row, ensure_ascii=False) + "\n" for row in parquet_rows(source)))
    return str(lines)


def parquet_rows(path: Path) -> Iterator[Any]:
    """Yield the rows of a Parquet file. Raises DataError as `as_lines`."""
    with needs_package(DataError, f"{path}, a Parquet file,", "pyarrow", "requirements-corpus.txt"):
        import pyarrow
        from pyarrow import parquet
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
