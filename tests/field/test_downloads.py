"""Downloads that are resumed, from servers as others met them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from neox.corpus.sources import download

OLD = "".join(f"version one, line {number}\n" for number in range(400)).encode()
NEW = "".join(f"VERSION TWO, longer line {number}\n" for number in range(400)).encode()


class Server(ThreadingHTTPServer):
    """Serves `content` with `validators`, cut after the first `cut` bytes if that is set; `odd` is a deviation."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = OLD
        self.validators = {"ETag": '"v1"'}
        self.cut = 0
        self.odd = ""
        self.asked: list[tuple[str | None, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/text.jsonl"

    def replace(self) -> None:
        """Put a new version in the place of the old one."""
        self.content = NEW
        self.validators = {name: value.replace("1", "2") for name, value in self.validators.items()}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        asked = self.headers.get("Range")
        condition = self.headers.get("If-Range")
        server.asked.append((asked, condition))
        content = server.content
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.odd != "ignores ranges" else 0
        if condition and server.odd != "ignores conditions" and condition not in server.validators.values():
            start = 0
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if start and server.odd == "aligns":
            start -= start % 512
        self.send_response(206 if start and server.odd != "says 200" else 200)
        for name, value in server.validators.items():
            self.send_header(name, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = start + server.cut if server.cut else None
        self.wfile.write(content[start:end])
        server.cut = 0

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


def interrupted(server: Server, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a download that ends after 1,400 bytes."""
    server.cut = 1400
    with monkeypatch.context() as patch:
        patch.setattr("neox.corpus.sources._ATTEMPTS", 1)
        with pytest.raises(Exception, match="1,400"):
            download(server.url, path)


@pytest.mark.parametrize("odd", ["", "ignores conditions", "ignores ranges", "says 200", "aligns"])
@pytest.mark.parametrize(
    "validators",
    [
        {"ETag": '"v1"'},
        {"ETag": 'W/"v1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:01 GMT"},
        {"ETag": 'W/"v1"'},
        {"Last-Modified": "Mon, 01 Jan 2024 00:00:01 GMT"},
        {},
    ],
)
@pytest.mark.parametrize("changed", [False, True])
def test_a_resumed_download_is_one_version(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str, validators: dict[str, str], changed: bool
) -> None:
    """huggingface_hub#4060 (a file changes), rustup#4710 (ranges ignored), modelscope_hub#50 and httrack PR 428."""
    server.validators = dict(validators)
    interrupted(server, tmp_path / "f", monkeypatch)
    server.odd = odd
    if changed:
        server.replace()
    assert download(server.url, tmp_path / "f", pause=0.001).read_bytes() == server.content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "f.sha256"]


def test_the_rest_is_asked_for_with_its_version(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RFC 9110, 13.1.5: a weak tag must not stand in If-Range."""
    interrupted(server, tmp_path / "f", monkeypatch)
    download(server.url, tmp_path / "f")
    assert server.asked == [(None, None), ("bytes=1400-", '"v1"')]
    server.validators = {"ETag": 'W/"v1"'}
    interrupted(server, tmp_path / "g", monkeypatch)
    download(server.url, tmp_path / "g")
    assert server.asked[2:] == [(None, None), ("bytes=1400-", None)]


def test_a_part_of_something_else_is_not_continued(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub#4060, reformatters PR 936: an old part that is longer than the file is not the whole file."""
    old = b"something that was here before\n" * 4000
    (tmp_path / "f.partial").write_bytes(old)
    assert download(server.url, tmp_path / "f").read_bytes() == OLD
    interrupted(server, tmp_path / "g", monkeypatch)
    (tmp_path / "g.partial").write_bytes(old)
    assert download(server.url, tmp_path / "g", pause=0.001).read_bytes() == OLD
    interrupted(server, tmp_path / "h", monkeypatch)
    version = json.loads((tmp_path / "h.partial.version").read_text())
    (tmp_path / "h.partial.version").write_text(json.dumps({**version, "url": "http://mirror/text.jsonl"}))
    (tmp_path / "h.partial").write_bytes(old[:1400])
    assert download(server.url, tmp_path / "h").read_bytes() == OLD


def test_a_download_that_only_has_to_be_renamed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """updater#671: all of the file was received before the end of the process."""
    interrupted(server, tmp_path / "f", monkeypatch)
    (tmp_path / "f.partial").write_bytes(OLD)
    asked = len(server.asked)
    assert download(server.url, tmp_path / "f").read_bytes() == OLD
    assert len(server.asked) == asked
