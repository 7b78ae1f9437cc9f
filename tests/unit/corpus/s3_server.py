"""A server of the S3 protocol (moto) whose answers can be made to fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

Answer = tuple[str, bytes]
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


class FailingApp:
    """WSGI application that answers some requests itself.

    Attributes:
        fail: Function of the number of the request, its method and its path; it returns an answer, or None to pass the
            request on.
        requests: Method and path of each request.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self.fail: Callable[[int, str, str], Answer | None] = lambda number, method, path: None
        self.requests: list[tuple[str, str]] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        method = environ["REQUEST_METHOD"]
        path = environ["PATH_INFO"]
        self.requests.append((method, path))
        answer = self.fail(len(self.requests), method, path)
        if answer is None:
            return self._app(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, body = answer
        start_response(status, [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
        return [body]


def error(status: str, code: str) -> Answer:
    """An answer of S3's form."""
    return status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingApp]:
    """Start a server with the bucket `bucket`, and point the clients of this process and its children to it."""
    pytest.importorskip("moto", reason="the optional package moto is not installed")
    import fsspec
    from moto.moto_api._internal.models import moto_api_backend
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = FailingApp(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    from threading import Thread

    Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}.items():
        monkeypatch.setenv(name, value)
    moto_api_backend.reset()
    where = fsspec.filesystem("s3", skip_instance_cache=True)
    monkeypatch.setattr("fsspec.filesystem", lambda scheme: where)
    where.mkdir("bucket")
    try:
        yield app
    finally:
        server.shutdown()
        where.clear_instance_cache()
