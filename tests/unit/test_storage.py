"""Everything that is downloaded goes through the proxy that the environment names; without one, the error says how."""

from __future__ import annotations

import logging
import re
import socket
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import close_session, constants

import neox.corpus.sources
from neox import storage
from neox.convert import find_source
from neox.corpus.sources import download
from neox.errors import NeoXError

READS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "https": ("texts.example:443", lambda _: storage.state_of("https://texts.example/a.jsonl")),
    "s3": ("bucket.s3.amazonaws.com:443", lambda _: storage.state_of("s3://bucket/a.jsonl")),
    "hub's data": ("huggingface.co:443", lambda _: storage.state_of(f"hf://datasets/org/set@{'0' * 40}/a.jsonl")),
    "hub's models": ("huggingface.co:443", lambda _: find_source("org/model")),
    "named corpora": (
        "texts.example:443",
        lambda folder: download("https://texts.example/a.zst", folder / "a.zst", pause=0),
    ),
}
"""The host and port that a proxy is asked for, and what asks."""


class Proxy:
    """A proxy that refuses every request.

    Attributes:
        address: Its address.
        asked: First lines of the requests.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(1 << 16).decode().partition("\r\n")[0])
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()


def forget_proxies() -> None:
    """Close the clients of this process that keep the proxies of their first request."""
    close_session()
    urllib.request.install_opener(None)  # type: ignore[arg-type]  # the next request makes another


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment without proxies, whose clients do not wait between attempts."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "key")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(storage, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    monkeypatch.setattr(neox.corpus.sources, "_ATTEMPTS", 2)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return monkeypatch


@pytest.mark.parametrize("kind", READS)
def test_downloads_ask_the_proxy(kind: str, environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host, read = READS[kind]
    proxy = Proxy()
    environment.setenv("https_proxy", proxy.address)
    forget_proxies()
    with pytest.raises(NeoXError) as failure:
        read(tmp_path)
    proxy.close()
    forget_proxies()
    assert {line.split()[:2] == ["CONNECT", host] for line in proxy.asked} == {True}, (proxy.asked, failure.value)


def test_failed_connections_without_a_proxy_name_its_variable(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Port 9 of this machine has no server."""
    for read in (storage.state_of, lambda url: download(url, tmp_path / "a", pause=0)):
        for proxy, said in ((None, True), ("http://127.0.0.1:9", False)):
            if proxy:
                environment.setenv("http_proxy", proxy)
            else:
                environment.delenv("http_proxy", raising=False)
            forget_proxies()
            with pytest.raises(NeoXError) as failure:
                read("http://127.0.0.1:9/a")
            assert ("https_proxy" in str(failure.value)) == said
    forget_proxies()


class Answer(BaseHTTPRequestHandler):
    """Answers each request with the status that its path names."""

    def do_GET(self) -> None:
        """Answer without content."""
        self.send_response(int(self.path[1:4]))
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (404, "it does not exist"),
        (403, "access is refused: HTTP 403 Forbidden;"),
        (503, "HTTP 503 Service Unavailable, 2 times"),
    ],
)
def test_answers_of_a_server_are_told_without_the_secrets_of_the_address(
    status: int, said: str, environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setattr(logging.getLogger("neox"), "propagate", True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    host = f"127.0.0.1:{server.server_port}"
    with pytest.raises(NeoXError) as failure:
        storage.state_of(f"http://user:password@{host}/{status}.jsonl?X-Amz-Signature=SECRET")
    server.shutdown()
    server.server_close()
    message = str(failure.value)
    assert f"http://{host}/{status}.jsonl: {said}" in message
    assert ("retrying" in caplog.text) == (status == 503)
    for text in (message, caplog.text):
        assert not {"SECRET", "password", "https_proxy"} & set(re.findall(r"\w+", text)), text


def test_errors_that_quote_an_address_hide_its_secrets() -> None:
    def quote() -> None:
        raise PermissionError("no access to 'https://user:password@host/a?X-Amz-Signature=SECRET'.")

    with pytest.raises(NeoXError, match="refused: no access to 'https://host/a';"):
        storage.attempt(quote, "a")
