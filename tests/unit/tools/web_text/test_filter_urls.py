"""Lists of URLs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neox.errors import ConfigError
from tests.errors import raises_naming
from tools.web_text import STEPS, run_step

STEP = STEPS["filter-urls"]


def filtered(tmp_path: Path, lines: list[bytes] | list[str], **settings: Any) -> tuple[dict[str, Any], list[str]]:
    source, output = tmp_path / "urls.txt", tmp_path / "out" / "clean.txt"
    source.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    report = run_step(STEP, STEP.settings(input=(source,), output=output, **settings))
    return report, output.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://example.com/article", None),
        ("https://blog.example.co.uk/2020/01?x=1", None),
        ("https://de.wikipedia.org/wiki/Berlin", "domain"),
        ("https://m.youtube.co.uk/watch?v=1", "domain"),
        ("https://notyoutube.com/watch", None),
        ("https://apple.com.example.org/", None),  # the registered domain is example.org
        ("https://user.github.io/post", None),
        ("http://example.com/archive.7z", "extension"),
        ("http://example.com/logo.AI", "extension"),
        ("http://example.com/a.jpg?size=2", "extension"),
        ("http://example.com/page?file=a.jpg", None),
        ("http://a", "too short"),
        ("http://example.com/" + "x" * 2100, "too long"),
        ("ftp://example.com/article", "malformed"),
        ("http://exa mple.com/article", "malformed"),
        ("http://user:secret@example.com/", "malformed"),
        ("http://example.com:99999/", "malformed"),
        ("http://[::1/article", "malformed"),
        ("http://bücher.example.de/über", None),
        ("http://127.0.0.1/article", "no registered domain"),
        ("http://localhost/article", "no registered domain"),
        ("http://co.uk/article", "no registered domain"),
        (b"http://example.com/\xff\xfe", "not UTF-8"),
    ],
)
def test_reasons(tmp_path: Path, url: Any, reason: str | None) -> None:
    report, kept = filtered(tmp_path, [url])
    assert list(report["dropped"]) == ([] if reason is None else [reason])
    assert kept == ([url] if reason is None else [])


def test_equal_pages_are_kept_once_in_order(tmp_path: Path) -> None:
    pages = ["http://b.org/2", "https://www.b.org/2/", "http://B.org:80/2#top", "http://a.org/x?b=1&a=2"]
    pages += ["http://a.org/x?a=2&b=1", "http://a.org/x?a=2", "http://b.org/2"]
    report, kept = filtered(tmp_path, pages)
    assert kept == ["http://b.org/2", "http://a.org/x?b=1&a=2", "http://a.org/x?a=2"]
    assert report["dropped"]["duplicate"][0] == 4
    lines = [line.split("\t") for line in (tmp_path / "out/dropped/clean.txt").read_text().splitlines()]
    assert lines[0] == ["duplicate", "https://www.b.org/2/"]


def test_workers_change_nothing_and_long_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.web_text.filter_urls._LINES", 500)
    urls = [f"http://site{i % 70}.com/{i % 900}" for i in range(2000)]
    urls.insert(5, "http://a.com/" + "y" * 300_000)
    report, one = filtered(tmp_path, urls)
    again, two = filtered(tmp_path, urls, workers=2, seed=1)
    assert one == two == list(dict.fromkeys(url for url in urls if len(url) < 100))
    assert report["dropped"] == again["dropped"]
    assert report["dropped"]["too long"][0] == 1


def test_own_domains(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("# mine\nspam.example.com\nbroker.*\n")
    urls = ["http://x.spam.example.com/1", "http://example.com/12", "http://broker.co.jp/1", "http://flickr.com/1"]
    assert filtered(tmp_path, urls, domains=(tmp_path / "mine.txt",), default_domains=False)[1] == [urls[1], urls[3]]
    (tmp_path / "mine.txt").write_text("co.uk\n")
    with raises_naming(ConfigError, "mine.txt:1:", "'co.uk'"):
        filtered(tmp_path, urls, domains=(tmp_path / "mine.txt",))


def test_addresses_are_kept_on_demand(tmp_path: Path) -> None:
    urls = ["http://127.0.0.1:8000/1", "http://intranet/page", "http://[::1]:80/1"]
    assert filtered(tmp_path, urls, keep_addresses=True)[1] == urls
