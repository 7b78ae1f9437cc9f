"""What a file holds, told by its bytes: compression, encoding, JSON over several lines, and what is no data at all."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import orjson

from neox.corpus.document import CorruptInput
from neox.files import placeholder

HEAD_BYTES = 1 << 10
"""Number of first bytes that tell what a file holds."""
BYTE_ORDER_MARK = codecs.BOM_UTF8
OTHER_ENCODING = "if it is in an older encoding, convert it: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW_FILE"
_MOST_BYTES_OF_VALUES = 1 << 28  # JSON over several lines is held in memory
_SKIPPABLE_FRAME = b"\x2a\x4d\x18"  # of Zstandard, after a first byte 50 to 5F; pzstd begins its files with one
_PACKINGS: Mapping[bytes, str] = {
    b"\x28\xb5\x2f\xfd": ".zst",
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ\0": ".xz",
}
# The marks of UTF-32 come first, because UTF-16's are the beginning of one of them.
_ENCODINGS: Mapping[bytes, str] = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_OTHER_FORMATS: Mapping[bytes, str] = {
    b"PAR1": "a Parquet file: give it a name that ends with .parquet",
    b"ARROW1": "an Arrow file: give it a name that ends with .arrow",
    b"PK\x03\x04": "a zip archive (perhaps a spreadsheet): unpack it, or give it a name that ends with .zip",
    b"7z\xbc\xaf": "a 7z archive: unpack it",
    b"Rar!": "a RAR archive: unpack it",
    b"\x04\x22\x4d\x18": "compressed with LZ4: unpack it with lz4 -d",
    b"%PDF": "a PDF file: extract its text",
    b"WARC/": "a WARC file of a crawl: extract its text with tools/web_text.py extract",
    b"\x00\x05\x16\x07": "a resource fork of macOS (AppleDouble), not the data: leave it out",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"SQLite format 3\0": "an SQLite database",
    b"\x89HDF\r\n": "an HDF5 file",
    b"Obj\x01": "an Avro file",
    b"\xd0\xcf\x11\xe0": "an older Office document: extract its text",
    b"MMIDIDX\0\0": "the index of a tokenized dataset: it needs no preprocessing, give its prefix as data_path",
}
_PAGES = (b"<!doctype html", b"<html", b"<head")
_JSON_OBJECT = re.compile(rb'\{\s*"(?:[^"\\]|\\.)*"\s*:')


def packing_of(head: bytes) -> str | None:
    """Return the suffix of the compression of a file with these first bytes; None if it is not compressed."""
    for mark, suffix in _PACKINGS.items():
        if head.startswith(mark):
            return suffix
    if head[1:4] == _SKIPPABLE_FRAME and 0x50 <= head[0] <= 0x5F:
        return ".zst"
    return None


def looks_like_text(head: bytes) -> bool:
    """Return whether the first bytes of a file may be text: UTF-8 without control characters, or a mark of UTF-16."""
    if head.startswith(tuple(_ENCODINGS)):
        return True
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    if not text:
        return False
    return not any(character < "\t" or "\x0e" <= character < " " for character in text)


def is_tar(head: bytes) -> bool:
    """Return whether these are the first bytes of a tar archive."""
    return head[257:262] == b"ustar"


def begins_as_json(head: bytes) -> bool:
    """Return whether a text begins as JSON lines of objects, one object over several lines, or an array of objects."""
    start = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    first_line, newline, _ = start.partition(b"\n")
    if first_line.strip() in (b"{", b"[") or not newline:
        return _JSON_OBJECT.match(start.removeprefix(b"[").lstrip()) is not None
    try:
        return isinstance(orjson.loads(first_line), dict | list) and start[:2] != b"[]"
    except orjson.JSONDecodeError:
        return first_line.startswith(b"[") and _JSON_OBJECT.match(first_line[1:].lstrip()) is not None


def check_is_data(head: bytes, *, is_text: bool = True, pages_are_text: bool = False) -> None:
    """Check that a file holds data, and not what a server or another tool puts in its place.

    Args:
        head: First bytes of the file.
        is_text: Whether the file should be text.
        pages_are_text: Whether HTML and XML are what is wanted, as in a file with the name of a text.

    Raises:
        CorruptInput: Naming what it is, and what to do.
    """
    if (pointer := placeholder(head)) is not None:
        raise CorruptInput(f"it is {pointer}")
    start = head.removeprefix(BYTE_ORDER_MARK).lstrip()[:20].lower()
    if start.startswith(_PAGES) and not pages_are_text:
        raise CorruptInput(
            "it is an HTML page, perhaps a server's answer instead of the data: fetch it again; a crawl becomes "
            "text with tools/web_text.py extract"
        )
    if start.startswith(b"<?xml") and not pages_are_text:
        raise CorruptInput("it is XML, perhaps a server's answer instead of the data: fetch it again")
    if not is_text:
        return
    for mark, what in _OTHER_FORMATS.items():
        if head.startswith(mark):
            raise CorruptInput(f"it is {what}")
    if is_tar(head):
        raise CorruptInput("it is a tar archive: unpack it, or give it a name that ends with .tar")

    # UTF-16 without its mark: every other byte of English or JSON is 0, here in more than three quarters of the places
    # of one parity, and in less than a quarter of the others.
    if head.startswith(tuple(_ENCODINGS)) or len(head) < 4:
        return
    even = head[::2]
    odd = head[1::2]
    for encoding, zeros, others in (("UTF-16LE", odd, even), ("UTF-16BE", even, odd)):
        if zeros.count(0) > len(zeros) * 3 / 4 and others.count(0) < len(others) / 4:
            raise CorruptInput(f"it is UTF-16 without a byte order mark: iconv -f {encoding} -t UTF-8 FILE > NEW_FILE")


def as_utf_8(chunks: Iterable[bytes], *, pages_are_text: bool = False) -> Iterator[bytes]:
    """Yield text as UTF-8. A byte order mark tells UTF-16 and UTF-32; that of UTF-8 is not taken off.

    Args:
        chunks: Bytes of the text.
        pages_are_text: As of `check_is_data`.

    Raises:
        CorruptInput: If it is not text, or not in the encoding of its mark.
    """
    chunks = iter(chunks)
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= HEAD_BYTES:
            break
    check_is_data(head, pages_are_text=pages_are_text)
    marked = [encoding for mark, encoding in _ENCODINGS.items() if head.startswith(mark)]
    if not marked:
        yield head
        yield from chunks
        return
    decoder = codecs.getincrementaldecoder(marked[0])()
    try:
        for chunk in chain([head], chunks):
            yield decoder.decode(chunk).encode()
        yield decoder.decode(b"", final=True).encode()
    except UnicodeError as error:
        raise CorruptInput(f"the text begins as {marked[0].upper()}, but is not ({error})") from error


def holds_whole_values(head: bytes) -> bool:
    """Return whether a JSON file holds an array, or values over several lines, instead of one value on each line.

    Args:
        head: First bytes of the file.
    """
    start = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    first_line, newline, _ = start.partition(b"\n")
    is_array = start.startswith(b"[")
    is_spread_object = bool(newline) and first_line.strip() == b"{"
    return is_array or is_spread_object


def json_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield JSON as lines: the file's own, or one for each element of an array or for each value over several lines.

    Raises:
        CorruptInput: If an array, or a value over several lines, is not JSON, or too large to be held in memory.
    """
    chunks = iter(chunks)
    head = next(chunks, b"")
    if not holds_whole_values(head):
        yield head
        yield from chunks
        return
    data = bytearray()
    for chunk in chain([head], chunks):
        data += chunk
        if len(data) > _MOST_BYTES_OF_VALUES:
            raise CorruptInput(
                f"it is JSON over several lines with more than {_MOST_BYTES_OF_VALUES:,} bytes, which would have to be "
                "held in memory; write one object on each line: jq -c '.[]' FILE > NEW_FILE.jsonl"
            )
    content = bytes(data).removeprefix(BYTE_ORDER_MARK)

    # orjson reads one value. What it refuses is read as Python reads JSON: several values, NaN, lone surrogates. The
    # parser of lines judges the latter.
    dump: Callable[[Any], bytes] = orjson.dumps
    try:
        values = [orjson.loads(content)]
    except orjson.JSONDecodeError:
        values = list(_several_values(content))
        dump = _plain_json
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    for value in values:
        yield dump(value) + b"\n"


def _several_values(content: bytes) -> Iterator[Any]:
    """Yield JSON values that follow one another, in the JSON that Python reads. Raises CorruptInput."""
    decoder = json.JSONDecoder()
    try:
        text = content.decode("utf-8")
        position = 0
        while True:
            while position < len(text) and text[position].isspace():
                position += 1
            if position == len(text):
                return
            value, position = decoder.raw_decode(text, position)
            yield value
    except UnicodeDecodeError as error:
        raise CorruptInput(f"the text is not UTF-8 ({error.reason}); {OTHER_ENCODING}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptInput(f"it is JSON over several lines, but not valid ({error})") from error


def _plain_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def whole_text(data: bytes) -> str:
    """Return the text of a file's bytes, without a byte order mark. Raises CorruptInput as `as_utf_8`."""
    packing = packing_of(data)
    if packing is not None:
        raise CorruptInput(f"it is compressed ({packing}): unpack it")
    try:
        return b"".join(as_utf_8([data])).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorruptInput(f"the text is not UTF-8 ({error.reason} at byte {error.start}); {OTHER_ENCODING}") from error
