"""Encodings of web pages, as browsers read their labels (WHATWG's encoding standard)."""

from __future__ import annotations

import codecs
import re

_PRESCANNED = 4096  # bytes in which a page may declare its encoding; browsers look at 1,024
_COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
_META = re.compile(rb"<meta[\s/]((?:[^>\"']|\"[^\"]*\"|'[^']*')*)", re.IGNORECASE)
_ATTRIBUTE = re.compile(rb"([^\s=/>]+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s>]+))")
_CHARSET_OF_CONTENT = re.compile(rb"charset\s*=\s*[\"']?([^\s\"';]+)", re.IGNORECASE)
_XML = re.compile(rb"\s*<\?xml\s[^>]*?encoding\s*=\s*[\"']([^\"']+)", re.IGNORECASE)
# Byte order marks. Browsers know no UTF-32; its mark has to come before that of UTF-16, with which it begins.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_XML_IN_UTF16 = ((b"<\0?\0", "utf-16-le"), (b"\0<\0?", "utf-16-be"))  # the mark may be left out before `<?xml`
# Encodings of the standard whose codec has another name in Python, or lacks characters that browsers know.
_CODECS = {
    "gbk": "gb18030",
    "big5": "big5hkscs",
    "euc-kr": "cp949",
    "shift_jis": "cp932",
    "iso-8859-8-i": "iso8859-8",
    "x-mac-cyrillic": "mac-cyrillic",
    "macintosh": "mac-roman",
    "windows-874": "cp874",
}
# Labels of encodings that browsers no longer read. Their text is as good as that of others here.
_RETIRED = {"hz-gb-2312": "hz", "iso-2022-kr": "iso2022_kr", "csiso2022kr": "iso2022_kr"}
# EUC-JP: two bytes, or three with the prefix of JIS X 0212; or half-width katakana.
_TWO_BYTES = re.compile(rb"\x8f?[\xa1-\xfe]{2}|\x8e[\xa1-\xdf]")
# ISO-2022-JP: escape sequences that choose the next table.
_JIS_SHIFTS = re.compile(rb"\x1b(?:\$[@B]|\([BJI])")


def codec_of(label: str | None) -> str | None:
    """Return the name of the codec that a label means to browsers; None if the label is unknown to them.

    The names are Python's, and `euc-jp`, `iso-2022-jp` and `x-user-defined`, which only `decode` knows.
    """
    import webencodings

    label = (label or "").strip("\t\n\f\r ").lower()
    if label in _RETIRED:
        return _RETIRED[label]
    found = None
    if label.isascii():
        found = webencodings.lookup(label)
    if found is None or found.name == "replacement":
        return None
    return _CODECS.get(found.name, found.name)


def byte_order_mark(data: bytes) -> tuple[bytes, str] | None:
    """Return the byte order mark at the start of data, and its codec; None if there is none."""
    for mark, codec in _MARKS:
        if data.startswith(mark):
            return mark, codec
    for start, codec in _XML_IN_UTF16:
        if data.startswith(start):
            return b"", codec
    return None


def declared_codec(data: bytes) -> str | None:
    """Return the codec that a page declares in its first `meta` tags or its XML declaration; None if it does not.

    A page whose declaration can be read as ASCII is not in UTF-16, whatever it declares: browsers read UTF-8.
    """
    head = _COMMENT.sub(b"", data[:_PRESCANNED])
    labels: list[bytes] = []
    for meta in _META.finditer(head):
        values: dict[bytes, bytes] = {}
        for found in _ATTRIBUTE.finditer(meta[1]):
            values.setdefault(found[1].lower(), found[2] or found[3] or found[4] or b"")
        is_content_type = values.get(b"http-equiv", b"").strip().lower() == b"content-type"
        of_content = _CHARSET_OF_CONTENT.search(values.get(b"content", b""))
        if b"charset" in values:
            labels.append(values[b"charset"])
        elif is_content_type and of_content is not None:
            labels.append(of_content[1])
    if xml := _XML.match(head):
        labels.append(xml[1])
    for label in filter(None, labels):
        codec = codec_of(label.decode("latin-1"))
        if codec is not None and codec.startswith("utf-16"):
            return "utf-8"
        if codec == "x-user-defined":
            return "windows-1252"
        if codec is not None:
            return codec
    return None


def decode(data: bytes, codec: str) -> str:
    """Decode with a codec of `codec_of`; what does not fit becomes replacement characters."""
    import webencodings

    if codec == "euc-jp":
        return _euc_jp(data)
    if codec == "iso-2022-jp":
        return _iso_2022_jp(data)
    if codec == "x-user-defined":
        return webencodings.lookup(codec).codec_info.decode(data)[0]
    if codec == "gb18030":
        return _gb18030(data)
    text = data.decode(codec, "replace")
    if codec.startswith("windows-125") and "\ufffd" in text:
        return _with_controls(data, codec)
    return text


def decode_if_it_fits(data: bytes, codec: str | None) -> str | None:
    """Return a text in an encoding; None if not all of it is. UTF-8 may be damaged in a few places.

    Text of another encoding is hardly ever UTF-8 by chance. So a text that has more characters of several bytes than
    places that do not fit is UTF-8, and only damaged (cut, or with a quotation from elsewhere).
    """
    if codec is None:
        return None
    text = decode(data, codec)
    broken = text.count("\ufffd")
    if codec != "utf-8":
        return None if broken else text
    if broken <= data.count("\ufffd".encode()):
        return text
    beyond_ascii = len(text) - len(text.encode("ascii", "ignore"))
    if 2 * broken < beyond_ascii:
        return text
    return None


def _with_controls(data: bytes, codec: str) -> str:
    """Decode one of Windows' encodings; bytes without a character between 80 and 9F are control characters."""
    table = [bytes([byte]).decode(codec, "replace") for byte in range(256)]
    for byte in range(0x80, 0xA0):
        if table[byte] == "\ufffd":
            table[byte] = chr(byte)
    return "".join(map(table.__getitem__, data))


def _gb18030(data: bytes) -> str:
    """Decode GB 18030, in which a single byte 80 is the euro sign of Windows' GBK."""
    pieces: list[str] = []
    start = 0
    while start < len(data):
        try:
            pieces.append(data[start:].decode("gb18030"))
            break
        except UnicodeDecodeError as error:
            pieces.append(data[start : start + error.start].decode("gb18030"))
            if data[start + error.start] == 0x80:
                pieces.append("\u20ac")
                start += error.start + 1
            else:
                pieces.append("\ufffd")
                start += error.end
    return "".join(pieces)


def _euc_jp(data: bytes) -> str:
    """Decode EUC-JP with the characters of Windows (circled numbers, names), which Python's codec lacks.

    A character of two bytes is at the same place of the table as in Windows' Shift JIS.
    """

    def decoded(found: re.Match[bytes]) -> str:
        pair = found[0]
        if pair[0] == 0x8E:  # half-width katakana
            return pair[1:].decode("cp932")
        if pair == b"\x8f\xa2\xb7":  # the wave of JIS X 0212, which Python's codec takes for a tilde
            return "\uff5e"
        if pair[0] == 0x8F:  # JIS X 0212
            return pair.decode("euc_jp", "replace")
        return _of_place(pair[0] - 0xA1, pair[1] - 0xA1)

    pieces: list[str] = []
    start = 0
    for found in _TWO_BYTES.finditer(data):
        pieces.append(data[start : found.start()].decode("ascii", "replace"))
        pieces.append(decoded(found))
        start = found.end()
    pieces.append(data[start:].decode("ascii", "replace"))
    return "".join(pieces)


def _iso_2022_jp(data: bytes) -> str:
    """Decode ISO-2022-JP with the characters of Windows; escape sequences say in which table the next bytes are."""
    pieces: list[str] = []
    start = 0
    table = b"\x1b(B"
    for found in _JIS_SHIFTS.finditer(data + b"\x1b(B"):
        piece = data[start : found.start()]
        if table in (b"\x1b$@", b"\x1b$B"):
            pieces += [_of_place(a - 0x21, b - 0x21) for a, b in zip(piece[::2], piece[1::2], strict=False)]
        elif table == b"\x1b(I":
            pieces.append(bytes(byte | 0x80 for byte in piece).decode("cp932", "replace"))
        else:
            pieces.append(piece.decode("ascii", "replace"))
        table = found[0]
        start = found.end()
    return "".join(pieces)


def _of_place(row: int, column: int) -> str:
    """Return the character of a place in the table of JIS X 0208 with Windows' additions [94 x 94]."""
    if not (0 <= row < 94 and 0 <= column < 94):
        return "\ufffd"
    # In Shift JIS two rows share a lead byte: even rows have the trail bytes 40 to 9E without 7F, odd ones 9F to FC.
    lead = row // 2 + 0x81
    if row >= 62:  # A0 to DF are half-width katakana
        lead += 0x40
    if row % 2:
        trail = column + 0x9F
    else:
        trail = column + 0x40
        if trail >= 0x7F:
            trail += 1
    return bytes([lead, trail]).decode("cp932", "replace")
