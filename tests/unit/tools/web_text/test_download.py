"""Downloads from a local server with faults."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warcio.archiveiterator import ArchiveIterator

from neox.errors import ConfigError
from tests.errors import raises_naming
from tools.web_text import run_step
from tools.web_text.download import DOWNLOAD, DownloadSettings
from tools.web_text.fetch import may_contact

sys.path.append(str(Path(__file__).parent))
faulty: Any = importlib.import_module("faulty_server")


@pytest.fixture
def server() -> Iterator[Any]:
    with faulty.running_server() as running:
        yield running


def download(
    tmp_path: Path, urls: list[str], name: str = "pages.jsonl", **settings: Any
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Return the report, the pages by URL, and the reasons by URL."""
    source, output = tmp_path / "urls.txt", tmp_path / name
    source.write_text("\n".join(urls) + "\n")
    values = {"delay": 0, "per_host": 64, "timeout": 60, "max_page_mb": 1, "retries": 0, **settings}
    values.setdefault("allow_addresses", ("127.0.0.1/32",))
    report = run_step(DOWNLOAD, DownloadSettings(input=(source,), output=output, **values))
    dropped = tmp_path / "dropped" / output.name
    pages = [json.loads(line) for line in output.read_text().splitlines()] if name.endswith("jsonl") else []
    reasons = [json.loads(line) for line in dropped.read_text().splitlines()] if name.endswith("jsonl") else []
    return report, {p["url"]: p for p in pages}, {r["url"]: r["dropped"] for r in reasons}


def test_a_server_is_asked_again_when_it_wants(server: Any, tmp_path: Path) -> None:
    """scrapy#3849, httrack#1738, wiki2book#89: a page comes after the time that `Retry-After` gives (RFC 9110)."""
    paths = ["limit/1", "limit/01"]
    _, pages, reasons = download(tmp_path, [server.url(path) for path in [*paths, "limit/4000"]], retries=1)
    assert list(pages) == [server.url(path) for path in paths]
    for path in paths:
        first, second = server.times[path]
        assert second - first > 0.99
    assert reasons == {server.url("limit/4000"): "status 429, Retry-After too long"}
    assert server.requests["limit/4000"] == 1


FAULTS = {
    "endless": "too large",
    "declared": "too large",
    "bomb": "too large",
    "cut": "incomplete or damaged",
    "badgzip": "incomplete or damaged",
    "garbage": "connection failed",
    "loop": "redirect loop",
    "chain/6": "too many redirects",
    "image": "not a page",
    "binary": "not a page",
    "brotli": "unknown content encoding",
    "missing": "status 404",
    "busy/1": "status 503",
    "secret/1": "robots.txt",
    "to/127.0.0.2:80/x": "private address",
    "to/[::ffff:10.0.0.1]/x": "private address",
    "to/2130706434/x": "malformed URL",
    "to/no-such-host.invalid/": "host not found",
}


def test_pages_and_faults(server: Any, tmp_path: Path) -> None:
    good = ["page/1", "gzip", "deflate", "latin", "chain/3"]
    urls = [server.url(path) for path in (*good, *FAULTS)] + ["ftp://x/y", "http://127.0.0.3/", "http://127.0.0.1:1/x"]
    report, pages, reasons = download(tmp_path, urls)
    expected = {server.url(path): reason for path, reason in FAULTS.items()}
    expected |= {"ftp://x/y": "malformed URL", "http://127.0.0.3/": "private address"}
    assert reasons.pop("http://127.0.0.1:1/x").startswith("robots.txt: connection failed")
    assert reasons == expected
    assert list(pages) == [server.url(path) for path in good]
    assert pages[server.url("gzip")]["html"] == faulty.html("gzip").decode()
    assert pages[server.url("deflate")]["html"] == faulty.html("deflate").decode()
    assert pages[server.url("latin")]["html"] == "<p>naïve</p>"
    assert pages[server.url("chain/3")]["final_url"] == server.url("page/end")
    assert report["documents_in"] == len(urls)
    assert report["documents_out"] == len(good)


def test_a_slow_page_is_given_up(server: Any, tmp_path: Path) -> None:
    reasons = download(tmp_path, [server.url("slow")], timeout=0.5, robots=False)[2]
    assert reasons == {server.url("slow"): "timeout"}


def test_failures_are_tried_again(server: Any, tmp_path: Path) -> None:
    _, pages, reasons = download(tmp_path, [server.url("busy/1"), server.url("missing")], retries=1)
    assert list(pages) == [server.url("busy/1")]
    assert list(reasons.values()) == ["status 404"]
    assert server.requests["missing"] == 1


def test_hosts_get_few_requests_at_once_and_robots_once(server: Any, tmp_path: Path) -> None:
    urls = [server.url(f"page/{i}") for i in range(30)]
    _, pages, _ = download(tmp_path, urls, per_host=2)
    assert list(pages) == urls
    assert server.most_active <= 3  # two, and one whose end the server has not yet seen
    assert server.requests["robots.txt"] == 1
    assert download(tmp_path, [server.url("secret/1")], robots=False)[1]
    server.robots = b"User-agent: neox-web-text\nDisallow: /page\nUser-agent: *\nDisallow:\n"
    assert not download(tmp_path, urls[:2])[1]
    assert len(download(tmp_path, urls[:2], user_agent="another")[1]) == 2


@pytest.mark.parametrize("name", ["pages.jsonl.zst", "pages.warc.gz"])
def test_an_interrupted_download_continues_to_the_same_bytes(
    server: Any, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neox.resume.SECONDS_BETWEEN_STATES", 0)
    monkeypatch.setattr("tools.web_text.download._URLS_OF_CHUNK", 8)
    urls = [server.url(f"page/{i}") for i in range(60)]
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / f"{name}.work").mkdir()
    download(tmp_path / "whole", urls, name)
    whole = (tmp_path / "whole" / name).read_bytes()
    calls = []
    encode = DOWNLOAD.run.__globals__["write_results"]  # type: ignore[attr-defined]

    def cut(job: Any, produce: Any, *args: Any) -> None:
        def until_failure(*position: Any) -> Iterator[Any]:
            for number, result in enumerate(produce(*position)):
                calls.append(position[0])
                if number == 3 and len(calls) < 5:
                    raise KeyboardInterrupt
                yield result

        encode(job, until_failure, *args)

    monkeypatch.setattr("tools.web_text.download.write_results", cut)
    with pytest.raises(KeyboardInterrupt):
        download(tmp_path / "cut", urls, name)
    if name.endswith("warc.gz"):  # the date of the records is that of the start
        with open(tmp_path / "whole" / name, "rb") as file:
            date = next(iter(ArchiveIterator(file))).rec_headers.get_header("WARC-Date")
        assert (tmp_path / "cut" / f"{name}.work" / "started").exists()
        (tmp_path / "cut" / f"{name}.work" / "started").write_text(date)
    requested = server.requests["page/0"]
    download(tmp_path / "cut", urls, name)
    assert server.requests["page/0"] == requested
    if name.endswith(".zst"):
        assert (tmp_path / "cut" / name).read_bytes() == whole


def test_warc_records_are_those_of_the_pages(server: Any, tmp_path: Path) -> None:
    download(tmp_path, [server.url("page/1"), server.url("gzip"), server.url("missing")], "pages.warc.gz")
    with open(tmp_path / "pages.warc.gz", "rb") as file:
        found = {r.rec_headers.get_header("WARC-Target-URI"): r.content_stream().read() for r in ArchiveIterator(file)}
    assert found == {server.url("page/1"): faulty.html("page/1"), server.url("gzip"): faulty.html("gzip")}


def test_other_outputs_are_refused(tmp_path: Path) -> None:
    with raises_naming(ConfigError, "pages.html", ".warc.gz"):
        download(tmp_path, ["http://example.com/"], "pages.html")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("0.0.0.0", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("::ffff:192.168.0.1", False),
        ("64:ff9b::10.0.0.1", False),
        ("2002:0a00:0001::1", False),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
    ],
)
def test_addresses(address: str, public: bool) -> None:
    assert may_contact(address, ()) is public
