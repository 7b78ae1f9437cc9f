"""Metadata columns of a token dataset: `PREFIX.columns.jsonl`, with one JSON object per document, in order.

The settings in the sidecar list the columns, and hold the size and checksum of the file.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from neox.data.token_files.sidecar import Sidecar, read_sidecar
from neox.errors import DataError, os_errors
from neox.log import get_logger

_log = get_logger(__name__)
COLUMNS_STATE = ("columns_bytes", "columns_crc32")
_NAMES = "columns"


def columns_path(prefix: str | Path) -> Path:
    """Return `PREFIX.columns.jsonl`."""
    return Path(f"{prefix}.columns.jsonl")


def column_names(sidecar: Sidecar | None) -> tuple[str, ...]:
    """Return the names of the columns that a sidecar lists."""
    if sidecar is None:
        return ()
    return tuple(sidecar.settings.get(_NAMES, ()))


def without_columns(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a sidecar without those of columns."""
    return {name: value for name, value in settings.items() if name not in (_NAMES, *COLUMNS_STATE)}


def column_lines(prefix: str | Path) -> Iterator[bytes]:
    """Yield the JSON line of each document, with its newline.

    Raises:
        DataError: If the dataset has no columns. At the end also if the file has changed since it was written.
    """
    sidecar = read_sidecar(prefix)
    path = columns_path(prefix)
    if sidecar is None or not column_names(sidecar):
        raise DataError(f"{prefix} has no columns: keep some with preprocess_data.py --columns NAME ...")
    documents = 0
    crc = 0
    with os_errors(DataError, f"{path} cannot be read"), open(path, "rb") as file:
        for line in file:
            documents += 1
            if documents > sidecar.documents:
                break
            crc = zlib.crc32(line, crc)
            yield line
    if documents != sidecar.documents:
        raise DataError(f"{path} does not have one line for each of {sidecar.documents:,} documents: preprocess again")
    if crc != sidecar.settings[COLUMNS_STATE[1]]:
        raise DataError(f"{path} has changed since it was written (its checksum differs): preprocess again")


def column_values(prefix: str | Path, column: str) -> Iterator[str]:
    """Yield the value of a column for each document as text. Values that are not text are written as JSON.

    Raises:
        DataError: If there is no such column, or as in `column_lines`.
    """
    names = column_names(read_sidecar(prefix))
    if names and column not in names:
        raise DataError(f"{prefix} has no column {column!r}; it has {', '.join(names)}")
    for line in column_lines(prefix):
        value = orjson.loads(line)[column]
        if isinstance(value, str):
            yield value
        else:
            yield orjson.dumps(value).decode()


def joined_columns(prefixes: Sequence[str | Path]) -> tuple[str, ...]:
    """Return the columns of all datasets; none, with a warning, if they differ."""
    kept = {prefix: column_names(read_sidecar(prefix)) for prefix in prefixes}
    columns = next(iter(kept.values()), ())
    for prefix, names in kept.items():
        if names != columns:
            listed = ", ".join(names) or "none"
            first = ", ".join(columns) or "none"
            _log.warning("columns are dropped: %s has %s, but the first one has %s", prefix, listed, first)
            return ()
    return columns
