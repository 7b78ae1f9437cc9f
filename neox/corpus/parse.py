"""Lines of JSON to texts, with what is wrong in a line said and placed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from neox.corpus.blocks import LineBlock
from neox.corpus.document import BadInput

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PARAGRAPH = "\n\n"


class BadRecord(Exception):
    """What is wrong with one line."""


def parse_records(block: LineBlock) -> Iterator[tuple[int, int, Any] | BadInput]:
    """Yield (line, offset, JSON value) for each line that is not blank, and a BadInput for each that is not JSON."""
    line, offset = block.start.line, block.start.offset
    for data in block.data.split(b"\n"):
        if data and not data.isspace():
            try:
                yield line, offset, _load(data, first=line == 1)
            except BadRecord as error:
                yield BadInput(block.file, line, offset, str(error))
        line += 1
        offset += len(data) + 1


def parse_texts(
    block: LineBlock, keys: Sequence[str], problem: Callable[[str], str | None] | None = None
) -> tuple[list[list[str]], list[BadInput]]:
    """Return the texts of a block for each key, and the bad lines. A document with no text under a key
    is left out there.

    A line that is a JSON string is a document itself (lm-dataformat's old form), for the key `text` only. A list of
    strings is joined by blank lines, as lm-dataformat does. A line that is bad for one key is left out for every key.
    problem: says what is wrong with a text, None if nothing is.
    """
    columns: list[list[str]] = [[] for _ in keys]
    bad: list[BadInput] = []
    for found in parse_records(block):
        if isinstance(found, BadInput):
            bad.append(found)
            continue
        line, offset, record = found
        try:
            texts = [text_of(record, key) for key in keys]
            if problem is not None:
                _check(texts, problem)
        except BadRecord as error:
            bad.append(BadInput(block.file, line, offset, str(error)))
            continue
        for column, text in zip(columns, texts, strict=True):
            if text:
                column.append(text)
    return columns, bad


def _check(texts: list[str], problem: Callable[[str], str | None]) -> None:
    for text in texts:
        if (found := problem(text)) is not None:
            raise BadRecord(found)


def text_of(record: Any, key: str) -> str:
    """Return the text of a JSON value under `key`; raise BadRecord if it has none."""
    if type(record) is dict:
        try:
            text = record[key]
        except KeyError:
            raise BadRecord(f"no key {key!r} (it has {', '.join(map(repr, list(record)[:8])) or 'none'})") from None
        if type(text) is list and all(type(part) is str for part in text):
            text = _PARAGRAPH.join(text)
        if type(text) is not str:
            raise BadRecord(f"{key!r} is {_kind(text)}, not text")
        return text
    if type(record) is str:
        if key != "text":
            raise BadRecord(f"no key {key!r}: the line is a bare string")
        return record
    raise BadRecord(f"the line is {_kind(record)}, not an object")


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "true or false", list: "a list", dict: "an object", int: "a number"}
    return names.get(type(value), "a number" if isinstance(value, float) else type(value).__name__)


def _load(data: bytes, *, first: bool) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        return _load_slowly(data, error, first=first)


def _load_slowly(data: bytes, error: orjson.JSONDecodeError, *, first: bool) -> Any:
    """Accept what lm-dataformat's parsers accept and orjson does not (NaN, long integers, a byte order mark)."""
    if b"\0" in data:
        raise BadRecord(f"NUL byte at position {data.index(0)} of the line") from None
    if first:
        data = data.removeprefix(_BYTE_ORDER_MARK)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise BadRecord(f"not UTF-8 at position {problem.start} of the line") from None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRecord(f"not JSON ({error})") from None
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecord("a lone surrogate (half of a character) in a string") from None
    except RecursionError:
        raise BadRecord("JSON nested too deeply") from None
    return record
