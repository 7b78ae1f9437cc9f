"""Pages, robots.txt and archives as others met them on the web."""

from __future__ import annotations

import gzip
import io
import json
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from neox.corpus import BadInput
from tools.web_text import run_step
from tools.web_text.chunks import START
from tools.web_text.download import DOWNLOAD, DownloadSettings
from tools.web_text.extract import ExtractSettings, build_extract
from tools.web_text.filter_urls import normal_form, read_lines
from tools.web_text.pages import decode_page, warc_reader
from tools.web_text.step import Record

PAGE = (
    "<html><body><article>" + "<p>A sentence about rivers and valleys.</p>" * 60 + "</article></body></html>"
).encode()
JPEG = b"\xff\xd8\xff\xe0" + bytes(range(1, 256)) * 4
RULES = "User-agent: *\r\nDisallow: /\r\n"
ROBOTS = {
    "127.0.0.1": b"",
    "127.0.0.2": b"\xef\xbb\xbf" + RULES.encode(),
    "127.0.0.3": b"\xff\xfe" + RULES.encode("utf-16-le"),
    "127.0.0.4": b"\xfe\xff" + RULES.encode("utf-16-be"),
    "127.0.0.5": RULES.replace("\r\n", "\r").encode(),
    "127.0.0.6": b"User-agent: *\nDisallow: /p\n" + b"# a comment about nothing\n" * 40_000,
}


def raw_deflate(data: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-15)
    return encoder.compress(data) + encoder.flush()


def bodies() -> dict[str, tuple[str, str, bytes]]:
    """Body by name: content type, content encoding, bytes."""
    import brotli
    import zstandard

    html = "text/html; charset=utf-8"
    return {
        "members": (html, "gzip", gzip.compress(PAGE[:700]) + gzip.compress(PAGE[700:])),
        "members-padded": (html, "x-gzip", gzip.compress(PAGE[:9]) + gzip.compress(PAGE[9:]) + bytes(9)),
        "deflate": (html, "deflate", zlib.compress(PAGE)),
        "raw-deflate": (html, "deflate", raw_deflate(PAGE)),
        "br": (html, "br", brotli.compress(PAGE)),
        "zstd": (html, "zstd", zstandard.compress(PAGE[:50]) + zstandard.compress(PAGE[50:])),
        "twice": (html, "deflate, gzip", gzip.compress(zlib.compress(PAGE))),
        "unknown": (html, "utf-8", PAGE),
        "two-types": ("text/html, text/html; charset=utf-8", "", PAGE),
        "no-type": ("", "", PAGE),
        "bad-type": ("text/html charset=utf-8", "", PAGE),
    }


class Handler(BaseHTTPRequestHandler):
    bodies = bodies()

    def do_GET(self) -> None:
        host = self.headers["Host"].partition(":")[0]
        kind, encoding, body = "text/plain", "", ROBOTS[host]
        if self.path != "/robots.txt":
            kind, encoding, body = self.bodies[self.path[1:]]
        self.send_response(200)
        if kind:
            self.send_header("Content-Type", kind)
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("0.0.0.0", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_port
        server.shutdown()


def download(tmp_path: Path, urls: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the pages and the reasons by URL."""
    (tmp_path / "urls.txt").write_text("\n".join(urls))
    output = tmp_path / "pages.jsonl"
    settings = DownloadSettings(
        input=(tmp_path / "urls.txt",), output=output, delay=0, per_host=9, retries=0, allow_addresses=("127.0.0.0/8",)
    )
    run_step(DOWNLOAD, settings)
    pages = [json.loads(line) for line in output.read_text().splitlines()]
    dropped = [json.loads(line) for line in (tmp_path / "dropped/pages.jsonl").read_text().splitlines()]
    return {page["url"]: page["html"] for page in pages}, {page["url"]: page["dropped"] for page in dropped}


def test_pages_are_decoded_whole(port: int, tmp_path: Path) -> None:
    """aiohttp#7157 and urllib3#1285: gzip of several members (RFC 1952); web-monitoring-diff#76: odd types."""
    urls = [f"http://127.0.0.1:{port}/{name}" for name in bodies()]
    pages, reasons = download(tmp_path, urls)
    assert reasons == {}
    assert pages == dict.fromkeys(urls, PAGE.decode())


def test_robots_in_any_form(port: int, tmp_path: Path) -> None:
    """scrapy#6195: a byte order mark, UTF-16, old ends of lines; at least 500 KiB are read (RFC 9309, 2.5)."""
    urls = [f"http://{host}:{port}/plain" for host in ROBOTS if host != "127.0.0.1"]
    pages, reasons = download(tmp_path, urls)
    assert pages == {}
    assert reasons == dict.fromkeys(urls, "robots.txt")


def archive(records: list[tuple[str, bytes, list[tuple[str, str]]]], *, compressed: bool) -> tuple[bytes, list[int]]:
    """Return a WARC file of responses (URL, body, headers), and where each record begins."""
    buffer = io.BytesIO()
    writer = WARCWriter(buffer, gzip=compressed)
    starts = []
    for url, body, headers in records:
        starts.append(buffer.tell())
        http = StatusAndHeaders("200 OK", headers, protocol="HTTP/1.1")
        writer.write_record(writer.create_warc_record(url, "response", io.BytesIO(body), http_headers=http))
    return buffer.getvalue(), starts


def read(path: Path) -> tuple[list[Record], list[BadInput]]:
    """Return the pages of an archive, and its bad parts."""
    pages: list[Record] = []
    bad: list[BadInput] = []
    for chunk in warc_reader((str(path),), START, 1 << 20, lambda _: None):
        assert chunk.content is None or isinstance(chunk.content, tuple)
        pages += chunk.content or ()
        bad += chunk.bad
    return pages, bad


HTML = [("Content-Type", "text/html")]
RECORDS = [
    ("http://x/0", PAGE, HTML),
    ("http://x/image", JPEG * 9, [("Content-Type", "image/jpeg")]),
    ("http://x/2", PAGE, HTML),
    ("http://x/3", PAGE, HTML),
]


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("record", [1, 2])
def test_an_archive_that_was_cut(tmp_path: Path, compressed: bool, record: int) -> None:
    """warcio#138, #127: a record that is cut is named with its byte, wherever the cut is; it may be an image's."""
    data, starts = archive(RECORDS, compressed=compressed)
    path = tmp_path / ("a.warc.gz" if compressed else "a.warc")
    size = starts[record + 1] - starts[record]
    for cut in (30, size // 3, size // 2, size - 20):
        path.write_bytes(data[: starts[record] + cut])
        pages, bad = read(path)
        assert [page["url"] for page in pages] == ["http://x/0"]
        assert [(part.file, part.offset) for part in bad] == [(str(path), starts[record])]


@pytest.mark.parametrize("compressed", [True, False])
def test_an_archive_with_a_hole(tmp_path: Path, compressed: bool) -> None:
    """warcio#127: what is damaged is named, and what follows it is read."""
    data, starts = archive(RECORDS, compressed=compressed)
    path = tmp_path / ("a.warc.gz" if compressed else "a.warc")
    for hole in (bytes(300), b"garbage\r\n" * 40):
        path.write_bytes(data[: starts[2]] + hole + data[starts[2] :])
        pages, bad = read(path)
        assert [page["url"] for page in pages][:1] + [page["url"] for page in pages][-1:] == [
            "http://x/0",
            "http://x/3",
        ]
        assert [part.offset for part in bad] == [starts[2]]


def test_an_archive_in_one_gzip_file(tmp_path: Path) -> None:
    """warcio refuses it, because records cannot be sought; a reader from the start needs no seeking."""
    data, _ = archive(RECORDS, compressed=False)
    path = tmp_path / "a.warc.gz"
    path.write_bytes(gzip.compress(data))
    pages, bad = read(path)
    assert ([page["url"] for page in pages], bad) == (["http://x/0", "http://x/2", "http://x/3"], [])
    path.write_bytes(gzip.compress(data)[:-12])
    assert len(read(path)[1]) == 1


def test_blank_lines_between_records(tmp_path: Path) -> None:
    """A member of blank lines holds nothing; records may follow it."""
    data, starts = archive(RECORDS, compressed=True)
    path = tmp_path / "a.warc.gz"
    path.write_bytes(data[: starts[2]] + gzip.compress(b"\r\n\r\n") + data[starts[2] :])
    pages, bad = read(path)
    assert ([page["url"] for page in pages], bad) == (["http://x/0", "http://x/2", "http://x/3"], [])


def test_lists_of_addresses_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "urls.txt"
    path.write_bytes(b"\xef\xbb\xbfhttp://example.com/1\r\n\r\nhttp://example.com/2")
    assert list(read_lines([str(path)], 99, lambda _: None)) == [b"http://example.com/1", b"http://example.com/2"]


def test_lengths_that_are_missing_or_wrong(tmp_path: Path) -> None:
    """Content-Length is mandatory in a record (ISO 28500, 5.3); what follows the bad record is read."""
    data, _ = archive(RECORDS, compressed=False)
    path = tmp_path / "a.warc"
    for damage in (
        lambda text: text.replace(b"Content-Length: ", b"X-Length: ", 1),
        lambda text: text.replace(b"Content-Length: ", b"Content-Length: 9", 1),
        lambda text: text.replace(b"Content-Length: 2", b"Content-Length: 1", 1),
    ):
        path.write_bytes(damage(data))
        pages, bad = read(path)
        assert [part.offset for part in bad] == [0]
        assert "http://x/3" in [page["url"] for page in pages]


def test_bodies_in_archives(tmp_path: Path) -> None:
    """openwayback PR 395 (Content-Encoding: br), web-monitoring-diff#76 (odd types)."""
    records = []
    for name, (kind, encoding, body) in bodies().items():
        records.append((name, body, [("Content-Type", kind), ("Content-Encoding", encoding)]))
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(PAGE), PAGE)
    chunked = [*HTML, ("Transfer-Encoding", "chunked")]
    records += [("chunked", chunks, chunked), ("decoded", PAGE, [*chunked, ("Content-Encoding", "gzip")])]
    refused = {
        "cut-chunk": (chunks[:900], chunked, "incomplete or damaged"),
        "cut-gzip": (gzip.compress(PAGE)[:-9], [*HTML, ("Content-Encoding", "gzip")], "incomplete or damaged"),
        "exotic": (b"\x01" + PAGE[5:], [*HTML, ("Content-Encoding", "sdch")], "unknown content encoding"),
        "jpeg": (JPEG, [("Content-Type", "jpeg")], "not a page"),
        "pdf": (b"%PDF-1.4" + JPEG, [("Content-Type", "application/pdf/x")], "not a page"),
        "jpeg-as-text": (JPEG, [("Content-Type", "text/plain")], "not a page"),
    }
    records += [(name, body, headers) for name, (body, headers, _) in refused.items()]
    data, _ = archive([(f"http://x/{name}", body, headers) for name, body, headers in records], compressed=True)
    path = tmp_path / "a.warc.gz"
    path.write_bytes(data)
    pages, bad = read(path)
    assert bad == []
    found = {page["url"].removeprefix("http://x/"): page.get("unreadable", page["html"]) for page in pages}
    reasons = {name: reason for name, (_, _, reason) in refused.items()}
    assert found == {**dict.fromkeys([*bodies(), "chunked", "decoded"], PAGE), **reasons}
    extract = build_extract(ExtractSettings(input=("x",), output=Path("y"), method="raw"))
    assert {o.dropped for page in pages if "unreadable" in page for o in extract(page)} == set(reasons.values())


@pytest.mark.parametrize(
    ("label", "codec", "text"),
    [
        ("gb2312", "gb18030", "朱镕基 囧 喆 €"),
        ("gbk", "gb18030", "\U00020000"),
        ("x-gbk", "gbk", "中文"),
        ("shift_jis", "cp932", "①②髙﨑ﾃｽﾄ～"),
        ("windows-31j", "cp932", "①"),
        ("x-sjis", "cp932", "①"),
        ("euc-kr", "cp949", "똠방각하 펲시콜라"),
        ("ks_c_5601-1987", "cp949", "뷁"),
        ("windows-949", "cp949", "뷁"),
        ("big5", "big5hkscs", "嗰啲嘢"),
        ("x-x-big5", "big5", "中文"),
        ("iso-8859-8-i", "iso8859_8", "שלום"),
        ("iso-8859-9", "cp1254", "ğ €"),
        ("iso-8859-11", "cp874", "ไทย €"),
        ("tis-620", "cp874", "ไทย…"),
        ("macintosh", "mac_roman", "é ∑"),
        ("koi8-u", "koi8_u", "їж"),
        ("utf8", "utf-8", "naïve"),
        ("unicode-1-1-utf-8", "utf-8", "naïve"),
        ("euc-jp", "euc_jp", "日本語 ｶﾅ"),
        ("iso-2022-jp", "iso2022_jp", "日本語 text かな"),
        ("iso-2022-kr", "iso2022_kr", "한국어"),
        ("hz-gb-2312", "hz", "中文"),
    ],
)
def test_labels_mean_what_browsers_read(label: str, codec: str, text: str) -> None:
    """chardet#33, turbohtml PR 132: the labels of WHATWG's encoding standard, in the header and in the page."""
    body = text.encode(codec)
    assert decode_page(b"<p>" + body + b"</p>", label) == f"<p>{text}</p>"
    if codec not in ("hz", "iso2022_kr"):
        declared = f'<meta charset="{label}"><p>'
        assert decode_page(declared.encode() + body, None) == declared + text


@pytest.mark.parametrize(
    ("data", "charset", "text"),
    [
        (b"\xad\xa1\xfc\xe2", "euc-jp", "①髙"),  # NEC's and IBM's characters: rows 13 and 92
        (b"58\xad\xd1 \xa1\xc1 \x8f\xa2\xb7", "euc-jp", "58㎝ ～ ～"),  # cpython#95734, iconv-lite#234
        ("<?xml version='1.0'?>é".encode("utf-16-le"), None, "<?xml version='1.0'?>é"),  # whatwg/html PR 1752
        (b"\xef\xbb\xbf" + "Привет".encode(), "cp1251", "Привет"),  # w3lib#189
        (b"\x1b$B-!\x1b(J abc \x1b(I1\x1b(B", "iso-2022-jp", "① abc ｱ"),
        (b"\x80 \xd6\xd0", "gbk", "€ 中"),
        (b"\x93a\x94 \x81", "iso-8859-1", "\u201ca\u201d \x81"),
        (b'<meta charset="utf-16">na\xc3\xafve', None, '<meta charset="utf-16">naïve'),
        (b'<meta charset="x-user-defined">\x93', None, '<meta charset="x-user-defined">\u201c'),
        (b'<!-- <meta charset="koi8-r"> --><meta charset="windows-1251">\xcc', None, None),
        (b'<meta name="description" content="charset=koi8-r"><p>\xc3\xa9', None, None),
        (b"<meta http-equiv='Content-Type' content='text/html;charset=windows-1251'>\xcc", None, None),
        (b'<?xml version="1.0" encoding="windows-1251"?>\xcc', None, None),
        (b"\xef\xbb\xbf\xc3\xa9", "iso-8859-1", "é"),
        ("é".encode("utf-16-le"), "utf-16", "é"),
        ("déjà vu, naïve".encode() + b"\xff", None, "déjà vu, naïve\ufffd"),
        ("déjà vu, naïve".encode()[:-3], "utf-8", "déjà vu, na\ufffd"),
        (b"caf\xe9", "utf-7", "café"),
        (b"caf\xe9", "unicode_escape", "café"),
    ],
)
def test_odd_encodings(data: bytes, charset: str | None, text: str | None) -> None:
    """What browsers do with marks, declarations and the places that Python's codecs leave out."""
    found = decode_page(data, charset)
    if text is None:
        assert found.endswith(("М", "é"))
    else:
        assert found == text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("read.php?1423", "read.php?1424"),
        ("show.php?f=2&1423", "show.php?f=2&9999"),
        ("about.asp?celebration", "about.asp?week2016"),
        ("?gallery=1", "?gallery=2"),
        ("?source=5", "?source=6"),
        ("?keyword=cats", "?keyword=dogs"),
        ("?id=1&id=2", "?id=2&id=1"),
        ("?a=1%262", "?a=1&2"),
        ("a%2Fb", "a/b"),
        ("a?u=http://b/", "a?u=http://b"),
        ("Page", "page"),
        ("a;v=1", "a;v=2"),
        ("?a=", "?b="),
    ],
)
def test_addresses_of_two_pages(first: str, second: str) -> None:
    """url#3, Norconex/crawler#479: a parameter without `=` names the page; names that only look like trackers, too."""
    assert normal_form(f"http://example.com/{first}") != normal_form(f"http://example.com/{second}")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("http://example.com/%7Euser/%41", "http://EXAMPLE.com/~user/A"),
        ("http://example.com/a%2fb", "http://example.com/a%2Fb"),
        ("http://example.com/é", "http://example.com/%c3%A9"),
        ("http://bücher.example.de/", "http://xn--bcher-kva.example.de"),
        ("http://example.com./a/../b/./c", "http://example.com/b/c"),
        ("http://[2001:0db8::0001]:80/x", "http://[2001:db8::1]/x"),
        ("https://www.example.com:443/x/#top", "http://example.com/x"),
        ("http://example.com/x?b=1&a=2&utm_source=q&fbclid=9", "http://example.com/x?a=2&b=1"),
        ("http://example.com/x;jsessionid=12AB?a=b+c", "http://example.com/x?a=b%20c&PHPSESSID=7"),
        ("http://example.com/ci.lesson study".replace(" ", "%20"), "http://example.com/ci.%6Cesson%20study"),
        ("http://example.com/x?", "http://example.com/x?&"),
    ],
)
def test_addresses_of_one_page(first: str, second: str) -> None:
    """RFC 3986, 6.2; Norconex/crawler#480 and loopover PR 2826: percent-encoding."""
    assert normal_form(first) == normal_form(second)
