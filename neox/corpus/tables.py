"""Reading of tables as JSON lines: Parquet, Arrow and CSV files. Line N is row N.

If the only wanted column of a Parquet or Arrow file holds texts, they are passed on directly instead of as JSON.
Tables are read in pieces of about 256 KiB: Parquet one row group at a time, Arrow one record batch at a time.
"""

from __future__ import annotations

import base64
import csv
import io
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, time
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

import orjson

from neox.corpus.contents import OTHER_ENCODING
from neox.corpus.document import BAD_ROW, NOT_UTF_8, CorruptInput, TextRows
from neox.errors import DataError, needs_package
from neox.storage import is_remote

_PIECE_BYTES = 1 << 18
_MOST_ROWS = 4096
_MAX_CELL = (1 << 31) - 1
_ARROW_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
OffsetFormat = Literal["i", "q"]
"""Format of Arrow's text offsets, in the notation of `memoryview`."""
_OFFSET_FORMATS: Mapping[str, OffsetFormat] = {"string": "i", "large_string": "q"}
NULL_FILLING = (".parquet", ".arrow")
"""Suffixes of tables whose objects have the keys of all rows, with nulls."""

Chunk = bytes | TextRows
"""Piece of JSON lines, which may start and end inside a line, or whole rows of texts."""
TableReader = Callable[[str, IO[bytes], int, Sequence[str] | None], Iterator[Chunk]]
"""Function of a path, its open file, the number of rows to skip, and the wanted columns."""


def parquet_rows(path: str, file: IO[bytes], skip: int, columns: Sequence[str] | None) -> Iterator[Chunk]:
    """Yield the rows of a Parquet file. Row groups that are skipped are not read.

    Raises:
        CorruptInput: If the file is damaged.
        DataError: If pyarrow is not installed.
    """
    with _arrow_errors(path, "Parquet"):
        from pyarrow import parquet

        with parquet.ParquetFile(file, buffer_size=_PIECE_BYTES, page_checksum_verification=True) as table:
            names = _chosen(table.schema_arrow.names, columns)
            for number in range(table.num_row_groups):
                group = table.metadata.row_group(number)
                if skip >= group.num_rows:
                    skip -= group.num_rows
                    continue
                row_bytes = group.total_byte_size // max(group.num_rows, 1)
                rows = max(1, min(_MOST_ROWS, _PIECE_BYTES // max(row_bytes, 1)))
                seen = 0
                for batch in table.iter_batches(rows, row_groups=[number], columns=names, use_threads=False):
                    seen += batch.num_rows
                    yield from _batch_rows(batch.slice(min(skip, batch.num_rows)), names)
                    skip = max(0, skip - batch.num_rows)
                if seen != group.num_rows:
                    raise CorruptInput(f"row group {number} holds {seen:,} rows instead of {group.num_rows:,}")


def arrow_rows(path: str, file: IO[bytes], skip: int, columns: Sequence[str] | None) -> Iterator[Chunk]:
    """Yield the rows of an Arrow file or stream; `datasets` saves streams. Raises as `parquet_rows`."""
    with _arrow_errors(path, "Arrow"):
        for batch in _arrow_batches(path, file):
            if skip >= batch.num_rows:
                skip -= batch.num_rows
                continue
            names = _chosen(batch.schema.names, columns)
            if names is not None:
                batch = batch.select(names)
            batch.validate(full=True)  # reading does not check offsets and text
            rows = max(1, min(_MOST_ROWS, _PIECE_BYTES * batch.num_rows // max(batch.nbytes, 1)))
            for start in range(skip, batch.num_rows, rows):
                yield from _batch_rows(batch.slice(start, rows), names)
            skip = 0


def _arrow_batches(path: str, file: IO[bytes]) -> Iterator[Any]:
    """Yield the record batches of an Arrow file or stream. A local file is mapped, not read into memory."""
    import pyarrow
    from pyarrow import ipc

    begin = file.read(len(_ARROW_MAGIC))
    file.seek(-min(len(_END_OF_STREAM), file.seek(0, io.SEEK_END)), io.SEEK_END)
    end = file.read()
    file.seek(0)
    source = file if is_remote(path) else pyarrow.memory_map(path)
    if begin == _ARROW_MAGIC:
        with ipc.open_file(source) as reader:
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
        return
    if end != _END_OF_STREAM:
        raise CorruptInput("the Arrow stream is truncated: its end marker is missing")
    with ipc.open_stream(source) as stream:
        yield from stream


@contextmanager
def _arrow_errors(path: str, what: str) -> Iterator[None]:
    """Raise DataError without pyarrow, and CorruptInput instead of pyarrow's errors."""
    with needs_package(DataError, f"{path}, a file in {what},", "pyarrow", "requirements-corpus.txt"):
        import pyarrow
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
        if isinstance(error, DataError):
            raise
        reason = str(error).splitlines()[:1] or [type(error).__name__]
        raise CorruptInput(f"the {what} file is damaged, truncated or not {what} ({reason[0]})") from error


def _chosen(names: Sequence[str], wanted: Sequence[str] | None) -> list[str] | None:
    """Return the columns to read, or None for all of them.

    Args:
        names: Columns of the table.
        wanted: Wanted columns, or dotted paths that start with one (`meta.lang`); None for all columns. If one is
            missing, all columns are read, so that the error message can list them.
    """
    duplicates = Counter(names) - Counter(set(names))
    if duplicates:
        raise CorruptInput(f"several columns are named {', '.join(map(repr, duplicates))}")
    if wanted is None:
        return None
    chosen = []
    for path in wanted:
        parts = path.split(".")
        while parts and ".".join(parts) not in names:
            parts.pop()
        if not parts:
            return None
        if ".".join(parts) not in chosen:
            chosen.append(".".join(parts))
    return chosen


def _batch_rows(batch: Any, names: Sequence[str] | None) -> Iterator[Chunk]:
    """Yield the rows of a record batch in one chunk. `names` are the chosen columns; None if all are read."""
    if not batch.num_rows:
        return
    offset_format = None
    if names is not None and batch.num_columns == 1:
        offset_format = _OFFSET_FORMATS.get(str(batch.schema.types[0]))
    if offset_format is None:
        yield _batch_lines(batch)
    else:
        yield _batch_texts(batch.schema.names[0], batch.column(0), offset_format)


def _batch_texts(column: str, array: Any, offset_format: OffsetFormat) -> TextRows:
    """Return the texts of a column.

    Args:
        column: Name of the column.
        array: Array of Arrow's type `string` or `large_string`.
        offset_format: Format of its offsets.
    """
    nulls: Sequence[bool] = ()
    if array.null_count:
        nulls = array.is_null().to_pylist()
        array = array.fill_null("")  # the bytes of a null are undefined
    _, offsets, data = array.buffers()
    ends = memoryview(offsets).cast("B").cast(offset_format)[array.offset : array.offset + len(array) + 1].tolist()
    lengths = list(map(operator.sub, ends[1:], ends))
    for number, is_null in enumerate(nulls):
        if is_null:
            lengths[number] = -1
    return TextRows(column, memoryview(data or b"")[ends[0] : ends[-1]], lengths)


def _batch_lines(batch: Any) -> bytes:
    """Return the rows of a record batch as JSON lines."""
    try:
        lines = [_dumps(row) for row in batch.to_pylist(maps_as_pydicts="strict")]
    except (UnicodeDecodeError, TypeError, ValueError, OverflowError, KeyError):  # one of the rows is bad
        lines = [_row_line(batch, number) for number in range(batch.num_rows)]
    lines.append(b"")
    return b"\n".join(lines)


def _row_line(batch: Any, number: int) -> bytes:
    """Return a row as a JSON line, or as a bad row with the reason."""
    try:
        return _dumps(batch.slice(number, 1).to_pylist(maps_as_pydicts="strict")[0])
    except UnicodeDecodeError:
        return BAD_ROW + NOT_UTF_8.encode()
    except KeyError:
        return BAD_ROW + b"a map in it has the same key twice"
    except (TypeError, ValueError, OverflowError) as error:
        return BAD_ROW + f"it cannot be written as JSON ({error})".replace("\n", " ").encode(errors="replace")


def _dumps(row: Mapping[str, Any]) -> bytes:
    """Return a row as JSON. Maps are objects, also those whose keys are numbers or dates."""
    return orjson.dumps(row, default=_as_json, option=orjson.OPT_NON_STR_KEYS)


def _as_json(value: Any) -> Any:
    """Convert a value that JSON does not support. Bytes become an object, because they are not text."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, tuple | set):
        return list(value)
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value)


def csv_lines(path: str, file: IO[bytes], skip: int, columns: Sequence[str] | None) -> Iterator[Chunk]:
    """Yield the rows of a CSV or TSV file as JSON lines. All values are texts; the first row has the column names.

    Semicolons separate the columns of a CSV file whose first row has no commas, as Excel writes it in many languages.

    Raises:
        CorruptInput: If the file is not UTF-8 or not CSV.
    """
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    csv.field_size_limit(_MAX_CELL)
    try:
        header = text.readline()
    except UnicodeDecodeError as error:
        raise CorruptInput(f"the text is not UTF-8 ({error.reason}) at its begin; {OTHER_ENCODING}") from None
    delimiter = ","
    if ".tsv" in Path(path).name:
        delimiter = "\t"
    elif "," not in header and len(next(csv.reader([header], delimiter=";"), [])) > 1:
        delimiter = ";"
    rows = csv.reader(chain((header,), text), delimiter=delimiter, strict=True)
    lines: list[bytes] = []
    size = 0
    problem = ""
    try:
        names = next(rows, [])
        _chosen(names, None)
        _check_delimiter(names, delimiter)
        for row in rows:
            if skip:
                skip -= 1
                continue
            lines.append(_csv_line(names, row))
            size += len(lines[-1]) + 1
            if size > _PIECE_BYTES:
                yield b"\n".join([*lines, b""])
                lines = []
                size = 0
    except UnicodeDecodeError as error:
        problem = f"the text is not UTF-8 ({error.reason}), after line {rows.line_num:,} of the file; {OTHER_ENCODING}"
    except csv.Error as error:
        problem = f"it is not CSV ({error}), in line {rows.line_num:,} of the file"
    if lines:
        yield b"\n".join([*lines, b""])
    if problem:
        raise CorruptInput(problem)


def _check_delimiter(names: Sequence[str], delimiter: str) -> None:
    """Raise CorruptInput if the only name of a column holds other delimiters."""
    for other, what, way in (
        ("\t", "tabs", "give it a name that ends with .tsv"),
        (";", "semicolons", "give it a name that ends with .csv"),
        (",", "commas", "give it a name that ends with .csv"),
    ):
        if len(names) == 1 and other in names[0] and (other == "\t") != (delimiter == "\t"):
            raise CorruptInput(f"{what} separate its columns: {way}")


def _csv_line(names: Sequence[str], row: Sequence[str]) -> bytes:
    """Return a row as a JSON line; an empty row is an empty line."""
    if not row:
        return b""
    if len(row) != len(names):
        return BAD_ROW + f"the row has {len(row)} fields instead of {len(names)}".encode()
    return orjson.dumps(dict(zip(names, row, strict=True)))
