"""Web pages: their encoding, and WARC files."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from contextlib import suppress
from email.message import Message
from functools import partial
from pathlib import Path
from typing import Any

from neox.corpus import BadInput, Position
from neox.errors import DataError, os_errors
from neox.storage import open_file
from tools.web_text.chunks import Chunk, Place
from tools.web_text.step import Record

WARC_SUFFIXES = (".warc", ".warc.gz")
HTML_SUFFIXES = (".html", ".htm", ".xhtml")
PAGE_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
_CHUNK_BYTES = 1 << 20
_CHUNK_RECORDS = 256
_READ_BYTES = 1 << 18
# Encodings that browsers read as another one (WHATWG's encoding standard).
_BROWSERS = {"iso8859-1": "cp1252", "ascii": "cp1252"}


def content_type(header: str) -> tuple[str, str | None]:
    """Return media type and charset of a `Content-Type`; an empty one is HTML."""
    message = Message()
    message["Content-Type"] = header or "text/html"
    return message.get_content_type(), message.get_content_charset()


def decode_page(data: bytes, charset: str | None) -> str:
    """Return the text of a page.

    These charsets are tried: that of the byte order mark, of the header, of the page's own declaration, UTF-8 and
    Windows-1252. If the page names a charset that does not fit all its bytes, the others become replacement characters.

    Args:
        data: The page.
        charset: Charset of the header.
    """
    from bs4.dammit import EncodingDetector

    _, bom = EncodingDetector.strip_byte_order_mark(data)
    declared = EncodingDetector.find_declared_encoding(data[:4096], is_html=True)
    named = None  # the first charset that exists
    for name in (bom, charset, declared, "utf-8"):
        with suppress(LookupError, UnicodeError):
            codec = codecs.lookup(name or "")
            chosen = _BROWSERS.get(codec.name, codec.name)
            if named is None:
                named = chosen
            if chosen == "utf-8":
                chosen = "utf-8-sig"
            return data.decode(chosen)
    if named is None or not (bom or charset or declared):
        named = "cp1252"
    return data.decode(named, "replace")


def warc_reader(
    files: tuple[str, ...],
    start: Place,
    max_bytes: int,
    consumed: Callable[[int], Any],
) -> Iterator[Chunk]:
    """Yield the pages of WARC files in chunks of records: `url`, `html` (bytes), `content_type`, `charset`.

    Args:
        files: Paths of `.warc` or `.warc.gz` files.
        start: Number of the first file, and the position in it: number of the record, byte of the file.
        max_bytes: Longest page; the record of a longer one has `too_large` and no content.
        consumed: Function that is called with the number of bytes newly read.

    Raises:
        DataError: If a file cannot be read.
    """
    for number in range(start[0], len(files)):
        at = start[1] if number == start[0] else Position()
        with os_errors(DataError, f"{files[number]} cannot be read"), open_file(files[number]) as file:
            file.seek(at.offset)
            yield from _file_chunks(files[number], file, number, at, max_bytes, consumed)


def html_reader(
    files: tuple[str, ...],
    start: Place,
    max_bytes: int,
    consumed: Callable[[int], Any],
) -> Iterator[Chunk]:
    """Yield the pages of HTML files, one a chunk: `url` (the file's own), `html` (bytes).

    Args:
        files: Paths of HTML files, a page each.
        start: Number of the first file, and the position in it.
        max_bytes: Longest page; the record of a longer one has `too_large` and no content.
        consumed: Function that is called with the number of bytes newly read.

    Raises:
        DataError: If a file cannot be read.
    """
    first, position = start
    if position.offset:  # its page was read
        yield Chunk(None, (), (first + 1, Position()))
        first += 1
    for number in range(first, len(files)):
        path = Path(files[number])
        with os_errors(DataError, f"{path} cannot be read"):
            size = path.stat().st_size
            record: Record = {"url": path.absolute().as_uri(), "html": b"", "too_large": True}
            if size <= max_bytes:
                record = {"url": path.absolute().as_uri(), "html": path.read_bytes()}
        consumed(size)
        yield Chunk((record,), (), (number, Position(1, max(size, 1))))
        yield Chunk(None, (), (number + 1, Position()))


def _file_chunks(
    path: str, file: Any, number: int, at: Position, max_bytes: int, consumed: Callable[[int], Any]
) -> Iterator[Chunk]:
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    held: list[Record] = []
    size = 0  # of the pages held
    count = at.line
    bad: list[BadInput] = []
    reported = at.offset
    iterator = ArchiveIterator(file, arc2warc=True)
    empty = True
    try:
        for entry in iterator:
            empty = False
            offset = iterator.offset
            if size >= _CHUNK_BYTES or len(held) >= _CHUNK_RECORDS:
                consumed(offset - reported)
                reported = offset
                yield Chunk(tuple(held), (), (number, Position(count, offset)))
                held = []
                size = 0
            count += 1
            record = _page(entry, max_bytes)
            if record is None:
                continue
            size += len(record["html"])
            if getattr(entry.raw_stream, "limit", 0) and "too_large" not in record:  # bytes that did not come
                bad.append(BadInput(path, count - 1, offset, "the WARC record is truncated"))
                continue
            held.append(record)
    except (ArchiveLoadFailed, EOFError, UnicodeError, ValueError) as error:
        bad.append(BadInput(path, count, None, f"the rest is damaged or no WARC ({str(error).strip()[:200]})"))
    if empty and not bad:
        bad.append(BadInput(path, None, None, "the file holds no WARC record"))
    if held:
        yield Chunk(tuple(held), (), (number, Position(count, file.tell())))
    yield Chunk(None, tuple(bad), (number + 1, Position()))


def _page(entry: Any, max_bytes: int) -> Record | None:
    """Return the page of a WARC record; None if it holds none."""
    url = entry.rec_headers.get_header("WARC-Target-URI")
    if entry.rec_type == "conversion":  # Common Crawl's WET: text
        kind, charset = content_type("text/plain; charset=utf-8")
    elif entry.rec_type in ("response", "resource"):
        headers = entry.http_headers or entry.rec_headers
        kind, charset = content_type(headers.get_header("Content-Type") or "")
        failed = entry.http_headers and entry.http_headers.get_statuscode() != "200"
        if failed or kind not in PAGE_TYPES:
            return None
    else:
        return None
    stream = entry.content_stream()
    parts: list[bytes] = []
    size = 0
    for part in iter(partial(stream.read, _READ_BYTES), b""):
        size += len(part)
        if size > max_bytes:
            return {"url": url, "html": b"", "too_large": True}
        parts.append(part)
    return {"url": url, "html": b"".join(parts), "content_type": kind, "charset": charset}
