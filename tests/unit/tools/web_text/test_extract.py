"""Texts of web pages, from JSON lines and from WARC files."""

from __future__ import annotations

import gzip as gzip_module
import io
import json
from pathlib import Path
from typing import Any

import pytest
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from neox.errors import ConfigError, DataError
from tests.errors import raises_naming
from tools.web_text import run_step
from tools.web_text.chunks import START
from tools.web_text.extract import EXTRACT, ExtractSettings, build_extract
from tools.web_text.pages import decode_page, html_reader, warc_reader
from tools.web_text.run import _written_files, describe_report

MAIN = "The river rises in the hills to the north of the town and flows past the old mill, which was built of stone. "


def page(number: int, paragraphs: int = 4) -> str:
    text = "".join(f"<p>Page {number}, part {i}: {MAIN * 2}</p>" for i in range(paragraphs))
    menu = "<nav><ul><li><a href='/'>Home</a></li><li><a href='/login'>Log in</a></li></ul></nav>"
    footer = "<footer><p>Copyright. All rights reserved.</p></footer>"
    script = "<script>var tracker = 1;</script>"
    return f"<html><head><title>T</title>{script}</head><body>{menu}<article>{text}</article>{footer}</body></html>"


def warc(path: Path, pages: list[tuple[str, bytes, str, str]], *, gzip: bool = True) -> Path:
    """Write responses: URL, body, content type, status."""
    with open(path, "wb") as file:
        writer = WARCWriter(file, gzip=gzip)
        writer.write_record(writer.create_warcinfo_record("x.warc", {"software": "test"}))
        for url, body, kind, status in pages:
            headers = StatusAndHeaders(status, [("Content-Type", kind)], protocol="HTTP/1.1")
            writer.write_record(writer.create_warc_record(url, "response", io.BytesIO(body), http_headers=headers))
    return path


def extract(source: Path, output: Path, **settings: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    report = run_step(EXTRACT, ExtractSettings(input=(source,), output=output, **settings))
    return report, [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def test_methods() -> None:
    def text(method: str) -> str:
        function = build_extract(ExtractSettings(input=("x",), output=Path("y"), method=method))
        (outcome,) = function({"html": page(1), "url": "http://x/1"})
        assert outcome.dropped is None
        assert set(outcome.record) == {"text", "url"}
        return str(outcome.record["text"])

    main = text("trafilatura")
    assert main.startswith("Page 1, part 0: The river")
    assert not {"Log in", "Copyright", "tracker"} & {w for w in ("Log in", "Copyright", "tracker") if w in main}
    paragraphs = text("bs4")
    assert len(paragraphs.splitlines()) == 5  # four, and the footer
    assert "tracker" not in paragraphs
    assert text("raw") == page(1)


def test_pages_in_json_lines(tmp_path: Path) -> None:
    source = tmp_path / "pages.jsonl"
    records = [{"html": page(1), "url": "http://x/1", "n": 1}, {"html": "<html></html>", "url": "http://x/2"}]
    records += [{"html": "plain & simple", "content_type": "text/plain"}, {"html": "", "url": "http://x/4"}]
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    report, kept = extract(source, tmp_path / "out.jsonl")
    assert [record["n"] for record in kept if "n" in record] == [1]
    assert kept[1]["text"] == "plain & simple"
    assert report["dropped"]["no text"][0] == 2
    dropped = (tmp_path / "dropped/out.jsonl").read_text().splitlines()
    assert json.loads(dropped[0]) == {"text": "", "url": "http://x/2", "dropped": "no text"}


@pytest.mark.parametrize("gzip", [True, False])
def test_warc(tmp_path: Path, gzip: bool) -> None:
    html = "text/html; charset=utf-8"
    pages = [(f"http://x/{i}", page(i).encode(), html, "200 OK") for i in range(5)]
    pages += [("http://x/image", b"\x89PNG", "image/png", "200 OK"), ("http://x/404", b"<p>no", html, "404 Not Found")]
    pages += [("http://x/latin", page(9).replace("river", "fluß").encode("latin-1"), "text/html", "200 OK")]
    pages += [("http://x/large", b"<p>" + b"x" * (2 << 20), html, "200 OK")]
    source = warc(tmp_path / f"a.warc{'.gz' if gzip else ''}", pages, gzip=gzip)
    report, kept = extract(source, tmp_path / "out.jsonl", max_page_mb=1)
    assert [record["url"] for record in kept] == [f"http://x/{i}" for i in range(5)] + ["http://x/latin"]
    assert "The fluß rises" in kept[-1]["text"]
    assert {reason: count for reason, (count, _) in report["dropped"].items()} == {"page too large": 1}


def test_reading_a_warc_resumes_at_any_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.web_text.pages._CHUNK_RECORDS", 3)
    pages = [(f"http://x/{i}", page(i).encode(), "text/html", "200 OK") for i in range(10)]
    files = tuple(str(warc(tmp_path / name, pages)) for name in ("a.warc.gz", "b.warc.gz"))
    read: list[int] = []
    from neox.corpus import Position

    chunks = list(warc_reader(files, (0, Position()), 1 << 20, read.append))
    urls = [[record["url"] for record in chunk.content or ()] for chunk in chunks]
    assert sum(map(len, urls)) == 20
    for number, chunk in enumerate(chunks):
        rest = list(warc_reader(files, chunk.next, 1 << 20, read.append))
        assert [[record["url"] for record in c.content or ()] for c in rest] == urls[number + 1 :]


def wet(path: Path, texts: list[str]) -> Path:
    """Write texts as Common Crawl does: records `conversion`."""
    with open(path, "wb") as file:
        writer = WARCWriter(file, gzip=True)
        writer.write_record(writer.create_warcinfo_record(path.name, {"software": "test"}))
        for number, text in enumerate(texts):
            payload = io.BytesIO(text.encode())
            record = writer.create_warc_record(
                f"http://x/{number}", "conversion", payload=payload, warc_content_type="text/plain"
            )
            writer.write_record(record)
    return path


def test_files_of_pages_are_told_by_their_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """warcbase#250, commoncrawl#11: `.warc.wet.gz`, and any other name; a directory's other files are counted."""
    directory = tmp_path / "crawl"
    directory.mkdir()
    for name in ("a.warc.wet.gz", "b.wet.gz", "c.gz", "part-3"):
        texts = [f"{name} {number}" for number in range(2)]
        assert [record["text"] for record in extract(wet(directory / name, texts), tmp_path / "out.jsonl")[1]] == texts
    (directory / "warc.paths").write_text("crawl-data/x\n")
    (directory / "._a.warc.wet.gz").write_bytes(b"\0\5\x16\7")
    caplog.set_level("WARNING")
    assert len(extract(directory, tmp_path / "all.jsonl")[1]) == 8
    assert "1 files of other formats (warc.paths)" in caplog.text
    assert "1 files of the operating system" in caplog.text
    (tmp_path / "page.html.gz").write_bytes(gzip_module.compress(page(1).encode()))
    (record,) = extract(tmp_path / "page.html.gz", tmp_path / "html.jsonl")[1]
    assert record["text"].startswith("Page 1, part 0")


def test_a_directory_of_html_files(tmp_path: Path) -> None:
    pages = tmp_path / "site"
    (pages / "deep").mkdir(parents=True)
    for name in ("a.html", "b.htm", "deep/c.html"):
        (pages / name).write_text(page(1))
    (pages / "large.html").write_text("<p>" + "x" * (2 << 20))
    (pages / "style.css").write_text("p {}")
    report, kept = extract(pages, tmp_path / "out.jsonl", max_page_mb=1)
    assert [Path(record["url"]).name for record in kept] == ["a.html", "b.htm", "c.html"]
    assert all("river" in record["text"] for record in kept)
    assert {reason: count for reason, (count, _) in report["dropped"].items()} == {"page too large": 1}
    settings = ExtractSettings(input=(pages,), output=tmp_path / "out.jsonl")
    assert Path(describe_report(settings, report).split("-> ")[-1]).is_file()
    (tmp_path / "x.jsonl").write_text('{"html": "x"}\n')
    with raises_naming(ConfigError, ".jsonl"):
        run_step(EXTRACT, ExtractSettings(input=(pages, tmp_path / "x.jsonl"), output=tmp_path / "out2.jsonl"))


def test_reading_html_resumes_at_any_chunk(tmp_path: Path) -> None:
    files = tuple(str(tmp_path / f"{number}.html") for number in range(3))
    for file in files:
        Path(file).write_text(page(1))
    chunks = list(html_reader(files, START, 1 << 20, lambda _: None))
    for number, chunk in enumerate(chunks):
        assert list(html_reader(files, chunk.next, 1 << 20, lambda _: None)) == chunks[number + 1 :]


def test_the_last_line_names_the_files_of_a_prefix(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx", ".step.json"):
        (tmp_path / f"tokens{suffix}").touch()
    assert _written_files(tmp_path / "tokens") == [str(tmp_path / "tokens.bin"), str(tmp_path / "tokens.idx")]


def test_a_damaged_warc_is_named(tmp_path: Path) -> None:
    whole = warc(tmp_path / "a.warc.gz", [(f"http://x/{i}", page(i).encode(), "text/html", "200 OK") for i in range(9)])
    cut = tmp_path / "cut.warc.gz"
    cut.write_bytes(whole.read_bytes()[:-200])
    with raises_naming(DataError, "cut.warc.gz:"):
        extract(cut, tmp_path / "out.jsonl")
    assert len(extract(cut, tmp_path / "out.jsonl", skip_bad=1)[1]) == 8
    (tmp_path / "text.warc").write_text("no warc at all\n" * 50)
    with raises_naming(DataError, "WARC"):
        extract(tmp_path / "text.warc", tmp_path / "out.jsonl")
    (tmp_path / "x.jsonl").write_text('{"html": "x"}\n')
    with raises_naming(ConfigError, "WARC", ".jsonl"):
        run_step(EXTRACT, ExtractSettings(input=(whole, tmp_path / "x.jsonl"), output=tmp_path / "out.jsonl"))


@pytest.mark.parametrize(
    ("data", "charset", "text"),
    [
        ("naïve".encode(), None, "naïve"),
        ("naïve".encode("latin-1"), None, "naïve"),
        ("naïve".encode("cp1251", "replace"), "cp1251", "na?ve"),
        (b'<meta charset="koi8-r">' + "мир".encode("koi8-r"), None, '<meta charset="koi8-r">мир'),
        ("naïve \u2019".encode("cp1252"), "iso-8859-1", "naïve \u2019"),
        (b"ok \xff ok", "utf-8", "ok \ufffd ok"),
        ("\ufeffx".encode("utf-16"), None, "x"),
        (b"x", "no-such-charset", "x"),
    ],
)
def test_decoding(data: bytes, charset: str | None, text: str) -> None:
    assert decode_page(data, charset).lstrip("\ufeff") == text
