"""Lines and rows of blocks as JSON values, texts and documents; writing of documents.

    LineBlock               whole lines, or texts of a table's rows (`neox.corpus.blocks`)
        |  convert_lines    JSON value of each line, filters, then a function of the caller's
        +-- parse_texts     texts under keys, for token files
        +-- parse_records   whole objects, for steps that change them
        +-- read_documents  one `Document` after another

A bad line is a `BadInput` with its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson
import ujson
import zstandard

from neox.corpus.blocks import DEFAULT_MAX_LINE_BYTES, LineBlock, read_blocks
from neox.corpus.contents import BYTE_ORDER_MARK, OTHER_ENCODING
from neox.corpus.document import BAD_ROW, NOT_UTF_8, BadInput, Document, SkipBudget, TextRows
from neox.corpus.fields import FieldError, Filter, look_up
from neox.corpus.inputs import expand_inputs
from neox.errors import DataError, os_errors
from neox.files import atomic_write
from neox.log import get_logger

_log = get_logger(__name__)
_BLOCK_BYTES = 1 << 18
_PARAGRAPH = "\n\n"
_ARCHIVE_CHARS = 1 << 30
T = TypeVar("T")


class BadRecord(Exception):
    """A line is not a document. The message says why."""


class ParsedLine(NamedTuple):
    """Line of JSON that holds a document.

    Attributes:
        record: JSON value of the line.
        texts: Text under each key.
        strict: Whether the line is strict JSON. If not, only gpt-neox's parser (ujson) accepts it: NaN, control
            characters, leading zeros and the like.
        metadata: Wanted metadata as a JSON line; empty if none are wanted.
    """

    record: Any
    texts: list[str]
    strict: bool
    metadata: bytes = b""


def read_documents(
    path: str | Path | Sequence[str | Path],
    key: str = "text",
    *,
    skip_bad: int | None = 0,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    filters: Sequence[Filter] = (),
    columns: Sequence[str] | None = None,
) -> Iterator[Document]:
    """Yield the documents of files and directories in order, except those with empty text.

    Args:
        path: A file, a directory, an address, or several of them.
        key: JSON key of the text, a path with dots, or a template (see `neox.corpus.fields.look_up`).
        skip_bad: Number of bad inputs (lines, or the damaged rest of a file) that may be skipped, each with a warning.
            None allows none, and the error then names no flag that would.
        max_line_bytes: Largest size of a line. A line is held in memory.
        filters: Conditions that a document must meet.
        columns: Columns of tables to read; None for all of them, which metadata need.

    Raises:
        DataError: If an input does not exist, or there are more bad inputs than `skip_bad`. The message locates the
            first one beyond the limit.
    """
    paths: Sequence[str | Path]
    if isinstance(path, str | Path):
        paths = [path]
    else:
        paths = path
    budget = SkipBudget(skip_bad, report=lambda bad: _log.warning("skipped %s", bad))
    for file in expand_inputs(paths):
        for block in read_blocks(
            file, block_bytes=_BLOCK_BYTES, max_line_bytes=max_line_bytes, filters=tuple(filters), columns=columns
        ):
            if isinstance(block, BadInput):
                budget.add(block)
                continue
            for line in _parse(block, [key]):
                if isinstance(line, BadInput):
                    budget.add(line)
                elif line.texts[0]:
                    metadata: Mapping[str, Any] = {}
                    if isinstance(line.record, dict) and isinstance(line.record.get("meta"), dict):
                        metadata = line.record["meta"]
                    yield Document(line.texts[0], metadata)


def write_documents(path: str | Path, documents: Iterable[Document], *, level: int = 3) -> int:
    """Write documents as lines `{"text": ..., "meta": ...}` in one zstd frame with a checksum.

    The file appears only when it is complete.

    Args:
        path: File to write; its name ends with `.jsonl.zst`.
        documents: Documents to write. They are not held in memory.
        level: Compression level of zstd.

    Returns:
        Number of documents.

    Raises:
        DataError: If the file cannot be written, or a document cannot be encoded as JSON.
    """
    path = Path(path)
    if not path.name.endswith(".jsonl.zst"):
        raise DataError(f"{path}: documents are written as .jsonl.zst; choose a name with this ending")
    count = 0
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
    with (
        os_errors(DataError, f"{path} cannot be written"),
        atomic_write(path) as file,
        compressor.stream_writer(file, closefd=False) as stream,
    ):
        for document in documents:
            try:
                line = orjson.dumps({"text": document.text, "meta": dict(document.meta)})
            except TypeError as error:
                raise DataError(f"{path}: document {count} cannot be written as JSON: {error}") from error
            stream.write(line + b"\n")
            count += 1
    return count


def write_archive(directory: str | Path, documents: Iterable[Document]) -> int:
    """Write documents as an archive of lm-dataformat: files `data_N_timeT_default.jsonl.zst` of about a gigabyte each.

    Args:
        directory: Directory to write. It must be empty or not exist.
        documents: Documents to write. They are not held in memory.

    Returns:
        Number of documents.

    Raises:
        DataError: If the directory is not empty, or cannot be written. After an error, the written files are removed.
    """
    from lm_dataformat import Archive  # imports multiprocessing and others; only one option needs it

    directory = Path(directory)
    count = 0
    characters = 0  # of the current file
    with os_errors(DataError, f"{directory} cannot be written"):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise DataError(f"{directory} exists and is not empty: an archive is written into a directory of its own")
        archive = Archive(str(directory))
        try:
            for document in documents:
                archive.add_data(document.text, dict(document.meta))
                count += 1
                characters += len(document.text)
                if characters > _ARCHIVE_CHARS:
                    archive.commit()
                    characters = 0
            if characters or not count:
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
        columns: Texts of each key, without empty ones.
        bad: Bad lines.
        not_strict: Number of lines that are not strict JSON (see `ParsedLine`).
        filtered: Number of lines that filters leave out.
        metadata: JSON line of the wanted metadata for each text of each key; empty lines if none are wanted.
    """

    columns: list[list[str]]
    bad: list[BadInput]
    not_strict: int
    filtered: int
    metadata: list[list[bytes]]


def parse_texts(
    block: LineBlock,
    keys: Sequence[str],
    problem: Callable[[str], str | None] | None = None,
    metadata: Sequence[str] = (),
) -> BlockTexts:
    """Return the texts of a block.

    As in lm-dataformat, a line that is a JSON string is itself the text under the key `text`, and a list of strings is
    joined with blank lines between them. A line that is bad for one key is left out for every key.

    Args:
        block: Lines to parse.
        keys: JSON keys of texts.
        problem: Function that returns the defect of a text, or None if the text is good.
        metadata: Fields to return with each text. A line without one of them is bad.
    """
    columns: list[list[str]] = [[] for _ in keys]
    found: list[list[bytes]] = [[] for _ in keys]
    bad: list[BadInput] = []
    not_strict = 0
    filtered: list[int] = []
    for line in _parse(block, keys, problem, filtered, metadata):
        if isinstance(line, BadInput):
            bad.append(line)
            continue
        if not line.strict:
            not_strict += 1
        for number, text in enumerate(line.texts):
            if text:
                columns[number].append(text)
                found[number].append(line.metadata)
    return BlockTexts(columns, bad, not_strict, len(filtered), found)


def parse_records(block: LineBlock, key: str = "text") -> Iterator[dict[str, Any] | BadInput]:
    """Yield each line of a block as an object with all its keys, or a BadInput for a bad line.

    The value under `key` is one string: a line that is a JSON string becomes `{"text": ...}`, and a list of strings is
    joined as in `parse_texts`.
    """

    def parse(record: Any, strict: bool) -> dict[str, Any]:
        text = _text(record, key)
        if not strict:
            _check_writable(record)
        if isinstance(record, dict):
            return {**record, key: text}
        return {key: text}

    yield from convert_lines(block, parse)


def convert_lines(
    block: LineBlock, convert: Callable[[Any, bool], T], filtered: list[int] | None = None
) -> Iterator[T | BadInput]:
    """Convert each line of a block; yield the result, or a BadInput for a bad line.

    Blank lines, and those that the block's filters refuse, are left out.

    Args:
        block: Lines to parse.
        convert: Function that takes the JSON value of a line, and whether the line is strict JSON. It raises BadRecord
            for a bad line.
        filtered: List to which the numbers of lines that filters leave out are appended.
    """
    rows: Iterable[bytes | memoryview | None]  # a JSON line, or the text or null that a table holds in its row
    if block.column is None:
        rows = block.data.split(b"\n")
    else:
        rows = TextRows(block.column, memoryview(block.data), list(block.lengths)).texts()
    line = block.start.line
    offset = block.start.offset
    for row in rows:
        is_blank = isinstance(row, bytes) and (not row or row.isspace())
        if not is_blank:
            try:
                if isinstance(row, bytes):
                    record, strict = _load(row)
                else:
                    record, strict = {block.column: _decoded(row)}, True
                if not block.filters or _meets_all(record, block.filters):
                    yield convert(record, strict)
                elif filtered is not None:
                    filtered.append(line)
            except BadRecord as error:
                yield BadInput(block.file, line, offset, str(error))
        line += 1
        offset += len(row or b"") + 1


def _decoded(text: memoryview | None) -> str | None:
    """Return the text of a table's row; None for null. Raises BadRecord."""
    if text is None:
        return None
    try:
        return str(text, "utf-8")
    except UnicodeDecodeError:
        raise BadRecord(NOT_UTF_8) from None


def _meets_all(record: Any, filters: Sequence[Filter]) -> bool:
    """Return whether a record meets all conditions. Raises BadRecord if it lacks a field of theirs."""
    try:
        return all(each.is_met(record) for each in filters)
    except FieldError as error:
        raise BadRecord(f"--filter: {error}") from None


def _parse(
    block: LineBlock,
    keys: Sequence[str],
    problem: Callable[[str], str | None] | None = None,
    filtered: list[int] | None = None,
    metadata: Sequence[str] = (),
) -> Iterator[ParsedLine | BadInput]:
    """Yield each line of a block, except blank ones, or a BadInput for a bad line.

    Arguments as in `parse_texts` and `convert_lines`.
    """

    def parse(record: Any, strict: bool) -> ParsedLine:
        texts = [_text(record, key) for key in keys]
        if not strict:
            _check_writable(texts)
        if problem is not None:
            for text in texts:
                reason = problem(text)
                if reason is not None:
                    raise BadRecord(reason)
        return ParsedLine(record, texts, strict, _metadata_line(record, metadata))

    yield from convert_lines(block, parse, filtered)


def _metadata_line(record: Any, fields: Sequence[str]) -> bytes:
    """Return fields of a record as a JSON line. Raises BadRecord if it lacks one of them."""
    if not fields:
        return b""
    try:
        if not isinstance(record, dict):
            raise FieldError(fields[0], f"no field {fields[0]!r}: the line is not an object")
        found = {field: look_up(record, field) for field in fields}
        return orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE)
    except (FieldError, TypeError) as error:
        raise BadRecord(f"--columns: {error}") from None


def _text(record: Any, key: str) -> str:
    """Return the text of a JSON value under `key`. Raises BadRecord if it has none."""
    if type(record) is str:
        if key != "text":
            raise BadRecord(f"no key {key!r}: the line is a bare string")
        return record
    if type(record) is not dict:
        raise BadRecord(f"the line is {kind_of(record)}, not an object")
    try:
        text = record[key]
    except KeyError:
        text = find_value(record, key)
    if type(text) is list and all(type(part) is str for part in text):
        text = _PARAGRAPH.join(text)
    if type(text) is not str:
        raise BadRecord(f"{key!r} is {kind_of(text)}, not text")
    return text


def find_value(record: Mapping[str, Any], key: str) -> Any:
    """Return what a name, a path with dots or a template finds in an object. Raises BadRecord if it finds nothing."""
    try:
        return look_up(record, key)
    except FieldError as error:
        if error.field == key:
            raise missing_key(record, key) from None
        raise BadRecord(str(error)) from None


def missing_key(record: Mapping[str, Any], key: str) -> BadRecord:
    """Return the error for an object that lacks a key. It names the keys that the object has."""
    names = ", ".join(map(repr, list(record)[:8]))
    message = f"no key {key!r} (it has {names or 'none'})"
    if "messages" in record:
        message += "; tools/preprocess_chat.py reads conversations"
    elif "prompt" in record and "response" in record:
        message += "; tools/preprocess_chat.py --jsonl-keys prompt response reads prompts with answers"
    elif key == "text":
        texts = [name for name, value in record.items() if type(value) is str]
        if "content" in texts or len(texts) == 1:  # The Stack and other sets of code have their files under content
            message += f"; --text-key {'content' if 'content' in texts else texts[0]} reads those texts"
    return BadRecord(message)


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value in words."""
    names = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


def _load(data: bytes) -> tuple[Any, bool]:
    """Return the JSON value of a line, and whether it is strict JSON. Raises BadRecord."""
    data = data.removeprefix(BYTE_ORDER_MARK)  # of the file, or of one that was joined to it
    try:
        return orjson.loads(data), True
    except orjson.JSONDecodeError as problem:
        error = problem

    # It is not strict JSON. gpt-neox reads it with ujson.
    if data.startswith(BAD_ROW):
        raise BadRecord(data.removeprefix(BAD_ROW).decode("utf-8", "replace")) from None
    if b"\0" in data:
        raise BadRecord(f"NUL byte at position {data.index(0)} of the line") from None
    try:
        return ujson.loads(data.decode("utf-8")), False
    except UnicodeDecodeError as problem:
        raise BadRecord(f"not UTF-8 at position {problem.start} of the line; {OTHER_ENCODING}") from None
    except (ValueError, RecursionError):
        hint = ""
        if b"}\r{" in data:
            hint = "; its lines end with CR only: tr '\\r' '\\n' < FILE > NEW_FILE"
        raise BadRecord(f"not JSON ({error}){hint}") from None


def _check_writable(value: Any) -> None:
    """Raise BadRecord for a lone surrogate, which no tokenizer accepts, or a number that JSON cannot hold."""
    try:
        orjson.dumps(value)
    except TypeError as error:
        raise BadRecord(f"it cannot be written as JSON: a lone surrogate (half of a character), or {error}") from None
