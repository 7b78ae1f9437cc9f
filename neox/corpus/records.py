"""Documents from JSON lines and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson
import ujson
import zstandard

from neox.corpus.blocks import DEFAULT_MAX_LINE_BYTES, LineBlock, read_blocks
from neox.corpus.document import BadInput, Document, SkipBudget
from neox.corpus.streams import expand_inputs
from neox.errors import DataError, os_errors
from neox.files import atomic_write
from neox.log import get_logger

_log = get_logger(__name__)
_BLOCK_BYTES = 1 << 18
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PARAGRAPH = "\n\n"
_ARCHIVE_CHARS = 1 << 30
T = TypeVar("T")


class BadRecord(Exception):
    """Defect of one line; the message says which."""


def read_documents(
    path: str | Path | Sequence[str | Path],
    key: str = "text",
    *,
    skip_bad: int | None = 0,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
) -> Iterator[Document]:
    """Yield the documents of files and directories in order; documents with empty text are left out.

    Args:
        path: A file, a directory, or several of them.
        key: JSON key of the text.
        skip_bad: Number of bad inputs (lines, or the damaged rest of a file) that may be skipped, each with a warning;
            None allows none, and the error names no flag that would.
        max_line_bytes: Limit of a line, which is held in memory.

    Raises:
        DataError: If an input does not exist, or for the first bad input beyond `skip_bad`, with its location.
    """
    paths = [path] if isinstance(path, str | Path) else path
    budget = SkipBudget(skip_bad, report=lambda bad: _log.warning("skipped %s", bad))
    for file in expand_inputs(paths):
        for block in read_blocks(file, block_bytes=_BLOCK_BYTES, max_line_bytes=max_line_bytes):
            if isinstance(block, BadInput):
                budget.add(block)
                continue
            for found in _parse(block, [key]):
                if isinstance(found, BadInput):
                    budget.add(found)
                    continue
                record, (text,), _ = found
                if text:
                    meta = record.get("meta") if isinstance(record, dict) else None
                    yield Document(text, meta if isinstance(meta, Mapping) else {})


def write_documents(path: str | Path, documents: Iterable[Document], *, level: int = 3) -> int:
    """Write documents atomically as lines `{"text": ..., "meta": ...}` in one zstd frame with a checksum.

    Args:
        path: File to write, named `.jsonl.zst`.
        documents: Written as they come.
        level: Compression level of zstd.

    Returns:
        Number of documents.

    Raises:
        DataError: If the file cannot be written, or a document cannot be encoded as JSON.
    """
    path = Path(path)
    if not path.name.endswith(".jsonl.zst"):
        raise DataError(f"{path}: documents are written as .jsonl.zst; choose a name that ends so")
    count = 0
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
    with (
        os_errors(DataError, f"{path} cannot be written"),
        atomic_write(path) as file,
        compressor.stream_writer(file, closefd=False) as stream,
    ):
        for document in documents:
            stream.write(_line(document, count, path))
            count += 1
    return count


def write_archive(directory: str | Path, documents: Iterable[Document]) -> int:
    """Write documents as an archive of lm-dataformat: `data_N_timeT_default.jsonl.zst` of about a gigabyte each.

    Args:
        directory: Directory to write, which must not hold anything.
        documents: Written as they come.

    Returns:
        Number of documents.

    Raises:
        DataError: If the directory is not empty, or cannot be written. What was written is removed after an error.
    """
    from lm_dataformat import Archive  # which loads multiprocessing and others, for one option

    directory = Path(directory)
    count = size = 0
    with os_errors(DataError, f"{directory} cannot be written"):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise DataError(f"{directory} exists and is not empty: an archive is written into a directory of its own")
        archive = Archive(str(directory))
        try:
            for document in documents:
                archive.add_data(document.text, dict(document.meta))
                count, size = count + 1, size + len(document.text)
                if size > _ARCHIVE_CHARS:
                    archive.commit()
                    size = 0
            if size or not count:
                archive.commit()
        except BaseException:
            for written in directory.glob("data_*.jsonl.zst"):
                written.unlink()
            raise
        finally:
            archive.fh.close()
            (directory / "current_chunk_incomplete").unlink(missing_ok=True)
    return count


class BlockTexts(NamedTuple):
    """Texts of a block.

    Attributes:
        columns: The texts of each key, without empty ones.
        bad: The bad lines.
        not_strict: Number of lines that are JSON for gpt-neox's parser (ujson) only: NaN, control characters, leading
            zeros and the like.
    """

    columns: list[list[str]]
    bad: list[BadInput]
    not_strict: int


def parse_texts(
    block: LineBlock, keys: Sequence[str], problem: Callable[[str], str | None] | None = None
) -> BlockTexts:
    """Return the texts of a block.

    A line that is a JSON string is a document itself (lm-dataformat's old form), for the key `text` only. A list of
    strings is joined by blank lines, as in lm-dataformat. A line that is bad for one key is left out for every key.

    Args:
        block: Lines to parse.
        keys: JSON keys of texts.
        problem: Returns the defect of a text, None if it has none.
    """
    columns: list[list[str]] = [[] for _ in keys]
    bad: list[BadInput] = []
    not_strict = 0
    for found in _parse(block, keys, problem):
        if isinstance(found, BadInput):
            bad.append(found)
            continue
        not_strict += not found[2]
        for column, text in zip(columns, found[1], strict=True):
            if text:
                column.append(text)
    return BlockTexts(columns, bad, not_strict)


def parse_records(block: LineBlock, key: str = "text") -> Iterator[dict[str, Any] | BadInput]:
    """Yield each line of a block as an object with all its keys, its text under `key` a string; or why it is bad.

    A line that is a JSON string becomes `{"text": ...}`, and a list of strings is joined, as in `parse_texts`.
    """
    for found in _parse(block, [key], to_be_written=True):
        if isinstance(found, BadInput):
            yield found
        else:
            record, (text,), _ = found
            yield {**record, key: text} if isinstance(record, dict) else {key: text}


def convert_lines(block: LineBlock, convert: Callable[[Any, bool], T]) -> Iterator[T | BadInput]:
    """Yield what a function makes of each line of a block that is not blank, or why the line is bad.

    Args:
        block: Lines to parse.
        convert: Takes the JSON value of a line, and whether it is strict JSON; raises BadRecord for a bad one.
    """
    line, offset = block.start.line, block.start.offset
    for data in block.data.split(b"\n"):
        if data and not data.isspace():
            try:
                yield convert(*_load(data, first=line == 1))
            except BadRecord as error:
                yield BadInput(block.file, line, offset, str(error))
        line += 1
        offset += len(data) + 1


def _parse(
    block: LineBlock,
    keys: Sequence[str],
    problem: Callable[[str], str | None] | None = None,
    *,
    to_be_written: bool = False,
) -> Iterator[tuple[Any, list[str], bool] | BadInput]:
    """Yield the JSON value, its texts and whether it is strict JSON for each line that is not blank, or its defect."""

    def texts_of(record: Any, strict: bool) -> tuple[Any, list[str], bool]:
        texts = [_text(record, key) for key in keys]
        if not strict:
            _check_characters(record if to_be_written else texts)
        reasons = map(problem, texts) if problem is not None else ()
        if (reason := next(filter(None, reasons), None)) is not None:
            raise BadRecord(reason)
        return record, texts, strict

    yield from convert_lines(block, texts_of)


def _text(record: Any, key: str) -> str:
    """Return the text of a JSON value under `key`. Raises BadRecord if it has none."""
    if type(record) is dict:
        try:
            text = record[key]
        except KeyError:
            raise BadRecord(f"no key {key!r} (it has {', '.join(map(repr, list(record)[:8])) or 'none'})") from None
        if type(text) is list and all(type(part) is str for part in text):
            text = _PARAGRAPH.join(text)
        if type(text) is not str:
            raise BadRecord(f"{key!r} is {kind_of(text)}, not text")
        return text
    if type(record) is str:
        if key != "text":
            raise BadRecord(f"no key {key!r}: the line is a bare string")
        return record
    raise BadRecord(f"the line is {kind_of(record)}, not an object")


def kind_of(value: Any) -> str:
    """Return what a JSON value is, in words."""
    names = {type(None): "null", bool: "true or false", list: "a list", dict: "an object", int: "a number", str: "text"}
    return names.get(type(value), "a number" if isinstance(value, float) else type(value).__name__)


def _load(data: bytes, *, first: bool) -> tuple[Any, bool]:
    """Return the JSON value of a line, and whether it is strict JSON. Raises BadRecord."""
    try:
        return orjson.loads(data), True
    except orjson.JSONDecodeError as error:
        return _load_slowly(data, error, first=first), False


def _load_slowly(data: bytes, error: orjson.JSONDecodeError, *, first: bool) -> Any:
    """Parse what ujson, gpt-neox's parser, accepts and orjson does not, and a byte order mark."""
    if b"\0" in data:
        raise BadRecord(f"NUL byte at position {data.index(0)} of the line") from None
    if first:
        data = data.removeprefix(_BYTE_ORDER_MARK)
    try:
        return ujson.loads(data.decode("utf-8"))
    except UnicodeDecodeError as problem:
        raise BadRecord(f"not UTF-8 at position {problem.start} of the line") from None
    except (ValueError, RecursionError):
        raise BadRecord(f"not JSON ({error})") from None


def _check_characters(value: Any) -> None:
    """Raise BadRecord for a lone surrogate, which no tokenizer takes, or a number that JSON cannot hold."""
    try:
        orjson.dumps(value)
    except TypeError as error:
        raise BadRecord(f"it cannot be written as JSON: a lone surrogate (half of a character), or {error}") from None


def _line(document: Document, number: int, path: Path) -> bytes:
    try:
        return orjson.dumps({"text": document.text, "meta": dict(document.meta)}) + b"\n"
    except TypeError as error:
        raise DataError(f"{path}: document {number} cannot be written as JSON: {error}") from error
