"""HTTP bodies: their media type, chunks and content encodings (RFC 9110, 9112; WHATWG's MIME sniffing)."""

from __future__ import annotations

import io
import re
import zlib
from typing import Any

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_MEDIA_TYPE = re.compile(rf"\s*({_TOKEN}/{_TOKEN})\s*(?:;|$)")
_CHARSET = re.compile(r"(?:^|[;,\s])charset\s*=\s*(?:\"([^\"]*)\"|([^\s;,\"]+))", re.IGNORECASE)
_PARTS_OF_LIST = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')
_SNIFFED = 1445  # bytes that browsers look at
_MARKUP = re.compile(
    rb"[\t\n\f\r ]*<(?:!--|(?:!DOCTYPE HTML|HTML|HEAD|SCRIPT|IFRAME|H1|DIV|FONT|TABLE|A|STYLE|TITLE|B|BODY|BR|P)[ >/])",
    re.IGNORECASE,
)
_XML = re.compile(rb"[\t\n\f\r ]*<\?xml", re.IGNORECASE)
# Control characters that no text holds.
_BINARY = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")
# Beginnings of text: the marks of UTF-16 and UTF-8, and `<?` in UTF-16 without a mark.
_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf", b"<\0?\0", b"\0<\0?")
# Beginnings of PDF, PostScript, gzip, Zstandard, JPEG, PNG and zip files.
_MAGIC = (b"%PDF-", b"%!PS-Adobe-", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\xff\xd8\xff", b"\x89PNG", b"PK\x03\x04")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n]*)?\r?\n")
_COMPRESSED = ("gzip", "x-gzip", "deflate", "br", "zstd")
_SLACK = 1 << 16  # bytes that headers and incompressible blocks may add to a small body


class BodyError(Exception):
    """Body that cannot be decoded. The message is the reason."""


class DamagedBody(BodyError):
    """Body that ends early or is damaged."""


def content_type(header: str) -> tuple[str, str | None]:
    """Return media type and charset of a `Content-Type`, as browsers extract them.

    Of several types the last valid one counts. The type is empty if there is no valid one: the content decides
    (`sniffed_type`).
    """
    essence = ""
    charset = None
    for part in _PARTS_OF_LIST.findall(header):
        found = _MEDIA_TYPE.match(part)
        if found is None or found[1] == "*/*":
            continue
        if found[1].lower() != essence:
            charset = None
        essence = found[1].lower()
        if named := _CHARSET.search(part, found.end() - 1):
            charset = named[1] or named[2]
    if not essence and (named := _CHARSET.search(header)):
        charset = named[1] or named[2]
    if charset is not None:
        charset = charset.lower()
    return essence, charset


def sniffed_type(data: bytes) -> str:
    """Return the media type of content without a valid one: HTML, XHTML, plain text, or empty for binary data."""
    head = data[:_SNIFFED]
    if head.startswith(_MARKS[:2]):
        has_tag = b"<\0" in head or b"\0<" in head
        return "text/html" if has_tag else "text/plain"
    head = head.removeprefix(_MARKS[2])
    if _MARKUP.match(head):
        return "text/html"
    if head.startswith(_MAGIC) or _BINARY.search(head):
        return ""
    if _XML.match(head):
        return "application/xhtml+xml" if b"<html" in head.lower() else ""
    return "text/plain"


def is_binary(data: bytes, media_type: str, charset: str | None) -> bool:
    """Return whether the content of a page is no text, whatever its type says."""
    head = data[:_SNIFFED]
    if head.startswith(_MARKS) or (charset or "").startswith(("utf-16", "utf16", "ucs-2", "unicode")):
        return False
    if media_type == "text/plain":
        return head.startswith(_MAGIC) or _BINARY.search(head.replace(b"\x1b", b"")) is not None
    return b"\0" in head or head.startswith(_MAGIC)


def without_chunks(data: bytes) -> bytes:
    """Return a body without the framing of `Transfer-Encoding: chunked`.

    Archives often hold bodies whose framing was taken off, while the header stayed: a body that does not begin with a
    chunk is returned as it is.

    Raises:
        DamagedBody: If a chunk is incomplete.
    """
    if _CHUNK_SIZE.match(data) is None:
        return data
    parts: list[bytes] = []
    at = 0
    while True:
        found = _CHUNK_SIZE.match(data, at)
        if found is None:
            raise DamagedBody("incomplete or damaged")
        size = int(found[1], 16)
        if size == 0:
            return b"".join(parts)
        chunk = data[found.end() : found.end() + size]
        if len(chunk) < size:
            raise DamagedBody("incomplete or damaged")
        parts.append(chunk)
        at = found.end() + size
        while data[at : at + 1] in (b"\r", b"\n"):
            at += 1


def most_bytes(limit: int) -> int:
    """Return the most bytes that a body with at most `limit` bytes of content has before it is decoded."""
    return limit + limit // 64 + _SLACK


def decoded_body(data: bytes, content_encoding: str, limit: int, *, archived: bool = False) -> bytes:
    """Return the content of a body.

    Unknown encodings (`none`, `utf-8`) are ignored, as by browsers, if what is there is a page.

    Args:
        data: The body.
        content_encoding: Value of `Content-Encoding`: a list, the last of which was applied last.
        limit: Most bytes of content. No more than about as many are decompressed.
        archived: Whether a page that is not in the encoding is taken as it is. Many archives hold decoded bodies with
            the headers of the encoded ones.

    Returns:
        The content; if it has more than `limit` bytes, `limit + 1` or more of them.

    Raises:
        DamagedBody: If the body ends early or is damaged.
        BodyError: If the encoding is unknown.
    """
    names = [name.strip().lower() for name in content_encoding.split(",")]
    for name in reversed(names):
        if name in ("", "identity"):
            continue
        if name not in _COMPRESSED:
            if sniffed_type(data) in ("text/html", "application/xhtml+xml"):
                continue
            raise BodyError("unknown content encoding")
        try:
            data = _decompressed(data, name, most_bytes(limit))
        except BodyError:
            if not archived or sniffed_type(data) not in ("text/html", "application/xhtml+xml"):
                raise
    return data


def _decompressed(data: bytes, name: str, most: int) -> bytes:
    """Undo one content encoding. Raises BodyError."""
    if not data:
        return data
    try:
        if name == "br":
            return _brotli(data, most)
        if name == "zstd":
            return _zstd(data, most)
        if name == "deflate":
            window = -zlib.MAX_WBITS  # some servers leave zlib's header out
            if data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0:
                window = zlib.MAX_WBITS
            return _inflated(data, window, most)[0]
        return gzip_members(data, most)
    except zlib.error:
        raise DamagedBody("incomplete or damaged") from None


def gzip_members(data: bytes, most: int) -> bytes:
    """Return the content of all members of a gzip file (RFC 1952), at most about `most` bytes.

    What follows the last member, such as padding, is ignored. Raises DamagedBody, or zlib.error.
    """
    parts = []
    size = 0
    while size < most:
        part, data = _inflated(data, 16 + zlib.MAX_WBITS, most - size)
        parts.append(part)
        size += len(part)
        if not data.startswith(b"\x1f\x8b"):
            break
    return b"".join(parts)


def _inflated(data: bytes, window: int, most: int) -> tuple[bytes, bytes]:
    """Return the content of one deflate stream, and what follows the stream."""
    decoder = zlib.decompressobj(window)
    content = decoder.decompress(data, most)
    if not decoder.eof and len(content) < most:
        raise DamagedBody("incomplete or damaged")
    return content, decoder.unused_data


def _brotli(data: bytes, most: int) -> bytes:
    import brotli

    decoder = brotli.Decompressor()
    parts = []
    size = 0
    try:
        piece = decoder.process(data, output_buffer_limit=most)
        while True:
            parts.append(piece)
            size += len(piece)
            if size >= most or decoder.is_finished():
                break
            if not piece and decoder.can_accept_more_data():
                raise DamagedBody("incomplete or damaged")
            piece = decoder.process(b"", output_buffer_limit=most - size)
    except brotli.error:
        if not parts:  # Brotli has no signature
            raise BodyError("unknown content encoding") from None
        raise DamagedBody("incomplete or damaged") from None
    return b"".join(parts)


def _zstd(data: bytes, most: int) -> bytes:
    import zstandard

    try:
        reader: Any = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True)
        content = bytes(reader.read(most))
        while len(content) < most and data.startswith(b"\x28\xb5\x2f\xfd"):  # the reader accepts frames that are cut
            frame = zstandard.ZstdDecompressor().decompressobj()
            frame.decompress(data)
            if not frame.eof:
                raise DamagedBody("incomplete or damaged")
            data = frame.unused_data
    except zstandard.ZstdError:
        raise DamagedBody("incomplete or damaged") from None
    return content
