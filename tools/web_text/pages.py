"""Web pages: their encoding, and the files that hold them.

    WARC file    `_WarcArchive.records`    one record after another; after a damaged one, reading continues at the next
                     |  `_page`        its HTTP body without chunks and compression, if it is a page
                     v
                 `warc_reader`         chunks of records: url, html (bytes), content_type, charset
    HTML file    `html_reader`         a chunk for each file
                     |
                     v
    processes    `decode_page`         bytes to text, as browsers decode them

extract.py extracts the text of the pages.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import zstandard
from warcio.archiveiterator import ArchiveIterator
from warcio.bufferedreaders import DecompressingBufferedReader
from warcio.exceptions import ArchiveLoadFailed

from neox.corpus import BadInput, Position
from neox.corpus.contents import packing_of
from neox.errors import DataError, os_errors
from neox.storage import is_remote, name_of, open_file
from tools.web_text.charsets import byte_order_mark, codec_of, declared_codec, decode, decode_if_it_fits
from tools.web_text.chunks import Chunk, Place
from tools.web_text.http_body import (
    BodyError,
    content_type,
    decoded_body,
    is_binary,
    most_bytes,
    sniffed_type,
    without_chunks,
)
from tools.web_text.step import Record

WARC_SUFFIXES = (".warc", ".warc.gz")
WARC_NAMES = (*WARC_SUFFIXES, ".wet", ".wet.gz", ".wat", ".wat.gz", ".arc", ".arc.gz")
"""Ends of names of WARC files: also of Common Crawl's texts, and of the format before WARC."""
_HTML = (".html", ".htm", ".xhtml")
HTML_SUFFIXES = (*_HTML, *(f"{suffix}.gz" for suffix in _HTML))
_WARC_MARKS = (b"WARC/", b"filedesc:")
PAGE_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
_CHUNK_BYTES = 1 << 20
_CHUNK_RECORDS = 256
_READ_BYTES = 1 << 18
_HEAD_BYTES = 1 << 10
_MARK_OF_MEMBER = b"\x1f\x8b\x08"
_MARK_OF_TEXT = b"\nWARC/1."


PageForm = Literal["warc", "html"]


def page_form(path: str) -> PageForm | None:
    """Return the form of a file of pages; None for another one, such as JSON lines.

    A local file of another name is told by its first bytes.

    Raises:
        DataError: If it is a WARC file under another compression than gzip.
    """
    name = name_of(path)
    if name.endswith(WARC_NAMES):
        return "warc"
    if name.endswith(HTML_SUFFIXES):
        return "html"
    if is_remote(path):
        return None
    with os_errors(DataError, f"{path} cannot be read"), open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    packing = packing_of(head)
    if packing == ".gz":
        with suppress(zlib.error):
            head = zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(head, _HEAD_BYTES)
    elif packing == ".zst":
        with suppress(zstandard.ZstdError):
            head = zstandard.ZstdDecompressor().decompressobj().decompress(head)
        if head.startswith(_WARC_MARKS):
            raise DataError(f"{path}: a WARC file under zstd: unpack it first (zstd -d), or pack it with gzip")
    return "warc" if head.startswith(_WARC_MARKS) else None


def decode_page(data: bytes, charset: str | None) -> str:
    """Return the text of a page.

    The encoding is that of the byte order mark, of the header, or of the page's own declaration, with labels as
    browsers read them. If the page names none, it is UTF-8 or Windows-1252. A named one that does not fit all bytes
    gives way to UTF-8 if that fits, and UTF-8 to what the page declares; else the others become replacement characters.

    Args:
        data: The page.
        charset: Charset of the header.
    """
    if found := byte_order_mark(data):
        mark, codec = found
        return decode(data[len(mark) :], codec)
    header = codec_of(charset)
    declared = declared_codec(data)
    named = header or declared
    text = decode_if_it_fits(data, named)
    if text is None and header == "utf-8":
        text = decode_if_it_fits(data, declared)
    if text is None and named != "utf-8":
        text = decode_if_it_fits(data, "utf-8")
    if text is None:
        text = decode(data, named or "windows-1252")
    return text


def warc_reader(
    files: tuple[str, ...],
    start: Place,
    max_bytes: int,
    consumed: Callable[[int], Any],
) -> Iterator[Chunk]:
    """Yield the pages of WARC files in chunks of records: `url`, `html` (bytes), `content_type`, `charset`.

    Args:
        files: Paths of WARC files, compressed with gzip or not.
        start: Number of the first file, and the position in it: number of the record, byte of the file.
        max_bytes: Longest page; the record of a longer one has `too_large` and no content. That of a page whose content
            cannot be decoded has `unreadable`, the reason.
        consumed: Function that is called with the number of bytes newly read.

    Raises:
        DataError: If a file cannot be read.
    """
    for number in range(start[0], len(files)):
        at = start[1] if number == start[0] else Position()
        with os_errors(DataError, f"{files[number]} cannot be read"), open_file(files[number]) as file:
            file.seek(at.offset)
            records: list[Record] = []
            size = 0  # of their pages
            count = at.line
            bad: list[BadInput] = []
            reported = at.offset
            empty = True
            for offset, found in _WarcArchive(file).records(partial(_page, max_bytes=max_bytes)):
                empty = False
                if size >= _CHUNK_BYTES or len(records) >= _CHUNK_RECORDS:
                    consumed(offset - reported)
                    reported = offset
                    yield Chunk(tuple(records), tuple(bad), (number, Position(count, offset)))
                    records = []
                    size = 0
                    bad = []
                if isinstance(found, str):
                    bad.append(BadInput(files[number], count, offset, found))
                    continue
                count += 1
                if found is not None:
                    records.append(found)
                    size += len(found["html"])
            if empty:
                bad.append(BadInput(files[number], None, None, "the file holds no WARC record"))
            if records:
                yield Chunk(tuple(records), (), (number, Position(count, file.tell())))
            yield Chunk(None, tuple(bad), (number + 1, Position()))


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
                data = path.read_bytes()
                try:
                    if packing_of(data) == ".gz":
                        data = decoded_body(data, "gzip", max_bytes)
                    if len(data) <= max_bytes:
                        record = {"url": path.absolute().as_uri(), "html": data}
                except BodyError as error:
                    record |= {"too_large": False, "unreadable": str(error)}
        consumed(size)
        yield Chunk((record,), (), (number, Position(1, max(size, 1))))
        yield Chunk(None, (), (number + 1, Position()))


class _WarcArchive:
    """Records of a WARC file, whose ends are checked. warcio leaves out what it cannot read, or prints a warning."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._offset = file.tell()  # of the record that is read
        is_compressed = file.read(len(_MARK_OF_MEMBER)) == _MARK_OF_MEMBER
        file.seek(self._offset)
        self._mark = _MARK_OF_MEMBER if is_compressed else _MARK_OF_TEXT  # at the start of a record
        if _is_one_gzip_file(file):
            self._file = gzip.GzipFile(fileobj=file)
            self._mark = b""
        self._open()

    def _open(self) -> None:
        self._iterator = ArchiveIterator(_UncutFile(self._file), arc2warc=True)
        self._iterator.reader = _GzipMembers(self._iterator.fh)
        self._iterator.INC_RECORD = ""  # a warning with the whole line

    def records(self, read: Callable[[Any], Record | None]) -> Iterator[tuple[int, Record | str | None]]:
        """Yield the place of each record, and what `read` returns for it; or that of a damaged part, and the defect."""
        while True:
            try:
                yield from self._whole_records(read)
                return
            except (ArchiveLoadFailed, UnicodeError, ValueError) as error:
                start = self._offset
                reason = str(error).strip()[:200]
            if not self._find_next_record():
                yield start, f"the rest is damaged or no WARC ({reason})"
                return
            yield start, f"{self._offset - start:,} bytes are damaged ({reason})"
            self._open()

    def _whole_records(self, read: Callable[[Any], Record | None]) -> Iterator[tuple[int, Record | None]]:
        """Yield records up to the first damaged one. Raises ArchiveLoadFailed or ValueError there."""
        iterator = self._iterator
        while True:
            self._offset = iterator.offset
            try:
                entry = next(iterator)
            except StopIteration:
                return
            except AttributeError:  # of warcio
                raise ArchiveLoadFailed("a record without WARC-Target-URI") from None
            self._offset = iterator.offset
            if not entry.rec_headers.headers and iterator.reader.decompressor is not None:
                continue  # a member of blank lines
            if entry.length is None or entry.rec_headers.get_header("Content-Length") is None:
                raise ArchiveLoadFailed("a record without Content-Length")
            found = read(entry)
            iterator.read_to_end()
            if getattr(entry.raw_stream, "limit", 0):  # bytes that did not come
                raise ArchiveLoadFailed("the WARC record is truncated")
            if iterator.err_count:
                raise ArchiveLoadFailed("the record does not end where its Content-Length says")
            yield self._offset, found

    def _find_next_record(self) -> bool:
        """Go to the next start of a record after the place of a damaged one. Return whether there is one."""
        if not self._mark:
            return False
        at = self._offset + 1
        self._file.seek(at)
        tail = b""
        while data := self._file.read(_READ_BYTES):
            block = tail + data
            place = block.find(self._mark)
            while place >= 0:
                if self._starts_record(at - len(tail) + place):
                    return True
                place = block.find(self._mark, place + 1)
            at += len(data)
            self._file.seek(at)
            tail = block[1 - len(self._mark) :]
        return False

    def _starts_record(self, offset: int) -> bool:
        """Go to a record at a place of the mark, if there is one. Return whether there is one."""
        if self._mark == _MARK_OF_TEXT:
            self._offset = offset + 1
            self._file.seek(self._offset)
            return True
        self._file.seek(offset)
        head = b""
        with suppress(zlib.error):
            head = zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(self._file.read(1024), 16)
        if not head.startswith(b"WARC/"):
            return False
        self._offset = offset
        self._file.seek(offset)
        return True


class _UncutFile:
    """File that raises ArchiveLoadFailed where a compressed file is cut; warcio takes EOFError as its end."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.tell = file.tell

    def read(self, size: int = -1) -> bytes:
        """Read bytes."""
        try:
            data: bytes = self._file.read(size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ArchiveLoadFailed(str(error)) from error
        return data


class _GzipMembers(DecompressingBufferedReader):  # type: ignore[misc]
    """Reader of a file with a gzip member for each record, or of one that is not compressed."""

    decompressor: Any

    def _process_read(self, data: bytes) -> None:
        """Take the next bytes of the file. Raises ArchiveLoadFailed if there are none inside a member."""
        if not data and self.decompressor is not None and self.num_fed and not self.decompressor.eof:
            raise ArchiveLoadFailed("the compressed record is truncated")
        self.num_fed += len(data)
        super()._process_read(data)

    def _init_decomp(self, decomp_type: str | None) -> None:
        self.num_fed = 0  # bytes of the member
        super()._init_decomp(decomp_type)

    def _decompress(self, data: bytes) -> bytes:
        """Decompress bytes. Raises ArchiveLoadFailed if they are damaged."""
        if self.decompressor is None:
            return data
        if self.num_read == 0 and self.num_fed == len(data) and not data.startswith(b"\x1f\x8b"):
            self.decompressor = None  # the file is not compressed
            return data
        try:
            return bytes(self.decompressor.decompress(data))
        except zlib.error as error:
            raise ArchiveLoadFailed(f"the compressed record is damaged: {error}") from error


def _is_one_gzip_file(file: Any) -> bool:
    """Return whether a file, at its start, is one gzip member with several records, not a member for each."""
    if file.tell():
        return False
    head = file.read(_READ_BYTES)
    file.seek(0)
    if not head.startswith(b"\x1f\x8b"):
        return False
    decoder = zlib.decompressobj(16 + zlib.MAX_WBITS)
    with suppress(zlib.error):
        text = decoder.decompress(head, _READ_BYTES)
        first, end, _ = text.partition(b"\r\n\r\n")
        length = re.search(rb"(?im)^content-length:\s*(\d+)\s*$", first)
        if end and length:
            rest = text[len(first) + len(end) + int(length[1]) :].lstrip(b"\r\n")
            return rest.startswith(b"WARC/")
    return False


def _page(entry: Any, max_bytes: int) -> Record | None:
    """Return the page of a WARC record; None if it holds none."""
    headers = entry.http_headers
    if entry.rec_type == "conversion":  # Common Crawl's WET: text
        header = "text/plain; charset=utf-8"
    elif entry.rec_type not in ("response", "resource") or (headers and headers.get_statuscode() != "200"):
        return None
    else:
        header = (headers or entry.rec_headers).get_header("Content-Type") or ""
    kind, charset = content_type(header)
    if kind and kind not in PAGE_TYPES:
        return None
    url = entry.rec_headers.get_header("WARC-Target-URI")
    parts: list[bytes] = []
    size = 0
    for part in iter(partial(entry.raw_stream.read, _READ_BYTES), b""):
        size += len(part)
        if size > most_bytes(max_bytes):
            return {"url": url, "html": b"", "too_large": True}
        parts.append(part)
    try:
        body = b"".join(parts)
        if headers:
            if (headers.get_header("Transfer-Encoding") or "").lower().endswith("chunked"):
                body = without_chunks(body)
            body = decoded_body(body, headers.get_header("Content-Encoding") or "", max_bytes, archived=True)
    except BodyError as error:
        return {"url": url, "html": b"", "unreadable": str(error)}
    if len(body) > max_bytes:
        return {"url": url, "html": b"", "too_large": True}
    kind = kind or sniffed_type(body)
    if not kind or is_binary(body, kind, charset):
        return {"url": url, "html": b"", "unreadable": "not a page"}
    record = {"url": url, "html": body, "content_type": kind, "charset": charset}
    if entry.rec_headers.get_header("WARC-Truncated"):
        record["truncated"] = True
    return record
