"""HTTP server for a status: a self-updating page, and the status as JSON. It needs no other package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

from neox.errors import NeoXError
from neox.launch.status.run_status import Status, run_status

_PAGES = Path(__file__).with_name("status_pages")
_POLICY = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'"
_TYPES = MappingProxyType({".html": "text/html", ".css": "text/css", ".js": "text/javascript"})


@dataclass(frozen=True)
class StatusView:
    """A kind of status that can be served.

    Attributes:
        read: Function that returns the status of a directory as JSON.
        page: Name of its page, without a suffix.
    """

    read: Callable[[Path], Status]
    page: str

    @property
    def files(self) -> dict[str, str]:
        """Files of the page by their paths in addresses."""
        files = {"/": f"{self.page}.html"}
        for name in ("status.css", "page.js", f"{self.page}.js"):
            files[f"/{name}"] = name
        return files


RUN_VIEW = StatusView(run_status, "run")


class StatusServer(ThreadingHTTPServer):
    """Server of the status of one directory.

    Args:
        directory: The directory.
        address: Address and port to listen on; port 0 for a free one.
        hosts: Host names that clients may use in addition to those of this machine. Others are refused, which protects
            against DNS rebinding.
        view: The kind of status.

    Raises:
        OSError: If it cannot listen there.
    """

    daemon_threads = True

    def __init__(
        self, directory: Path, address: tuple[str, int], hosts: Sequence[str] = (), view: StatusView = RUN_VIEW
    ) -> None:
        self.directory = directory
        self.view = view
        self.names = {"localhost", "127.0.0.1", "[::1]", *(host.lower() for host in hosts)}
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    """Handler of requests."""

    server: StatusServer

    def do_GET(self) -> None:
        """Answer a request."""
        name = re.sub(r":\d*$", "", self.headers.get("Host", "")).lower()
        if name not in self.server.names:
            self._send(400, "text/plain", f"the host name {name[:80]!r} is not accepted; --allow_host adds it")
        elif self.path in self.server.view.files:
            file = _PAGES / self.server.view.files[self.path]
            self._send(200, _TYPES[file.suffix], file.read_text(encoding="utf-8"))
        elif self.path == "/status.json":
            self._send_status()
        else:
            self._send(404, "text/plain", "not found")

    def _send_status(self) -> None:
        try:
            status = self.server.view.read(self.server.directory)
        except (NeoXError, OSError, ValueError) as error:  # ValueError: a file that is being written
            self._send(503, "application/json", json.dumps({"error": str(error)}))
            return
        self._send(200, "application/json", json.dumps(status))

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Do not log requests."""
