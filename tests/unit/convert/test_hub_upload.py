"""Upload of an export: a small server that speaks as much of the hub's protocol as that needs, with large files."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

from neox.convert.hub import upload
from neox.errors import ConversionError
from tests.errors import raises_naming

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "README.md": b"---\nlibrary_name: transformers\n---\n# A model\n",
    "model-00001-of-00002.safetensors": b"first" * 1000,
    "model-00002-of-00002.safetensors": b"second" * 1000,
}


class Hub(ThreadingHTTPServer):
    """A hub that repositories are uploaded to.

    Attributes:
        created: Requests to create a repository.
        objects: Large files by their SHA-256, as they arrived.
        files: Files of the last commit.
        refuses: Beginning of paths that are answered with an error.
    """

    daemon_threads = True
    created: list[dict[str, Any]]
    objects: dict[str, bytes]
    files: dict[str, bytes]
    refuses = "-"


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of an upload; everything else is not found."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def do_PUT(self) -> None:
        data = self.body()
        oid = self.path.rpartition("/")[2]
        if hashlib.sha256(data).hexdigest() == oid:
            self.server.objects[oid] = data
        self.reply(200 if oid in self.server.objects else 400, {})

    def do_GET(self) -> None:
        self.reply(404, {})

    def do_POST(self) -> None:
        data = self.body()
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.reply(401, {"error": "no such token"})
        if path.startswith(self.server.refuses):
            return self.reply(403, {"error": "the disk of the hub is full"})
        if path == "/api/repos/create":
            self.server.created.append(json.loads(data))
            return self.reply(200, {"url": f"{self.address}/org/model", "name": "org/model"})
        if path == "/api/validate-yaml":
            return self.reply(200, {"errors": [], "warnings": []})
        if path == "/api/models/org/model/preupload/main":
            return self.reply(200, {"files": [self.mode_of(file) for file in json.loads(data)["files"]]})
        if path == "/org/model.git/info/lfs/objects/batch":
            objects = [self.action_of(each) for each in json.loads(data)["objects"]]
            return self.reply(200, {"transfer": "basic", "objects": objects})
        if path == "/verify":
            sent = json.loads(data)
            return self.reply(200 if len(self.server.objects[sent["oid"]]) == sent["size"] else 400, {})
        if path == "/api/models/org/model/commit/main":
            self.commit([json.loads(line) for line in data.splitlines()])
            return self.reply(
                200, {"success": True, "commitOid": COMMIT, "commitUrl": f"{self.address}/org/model/commit/{COMMIT}"}
            )
        return self.reply(404, {})

    def mode_of(self, file: dict[str, Any]) -> dict[str, Any]:
        mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}

    def action_of(self, each: dict[str, Any]) -> dict[str, Any]:
        send = {"href": f"{self.address}/objects/{each['oid']}"}
        return {**each, "actions": {"upload": send, "verify": {"href": f"{self.address}/verify"}}}

    def commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.objects[value["oid"]]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def reply(self, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(("127.0.0.1", 0), Handler)
    server.created = []
    server.objects = {}
    server.files = {}
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # this server stores files by LFS
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    directory = tmp_path / "export"
    directory.mkdir()
    for name, data in FILES.items():
        (directory / name).write_bytes(data)
    return directory


def test_all_files_arrive_in_a_private_repository(hub: Hub, export: Path) -> None:
    address = upload(export, "org/model")
    assert address.endswith("/org/model")
    assert hub.files == FILES
    assert len(hub.objects) == 2  # the weights, as large files
    (created,) = hub.created
    assert (created["organization"], created["name"]) == ("org", "model")
    assert created.get("private") is True or created.get("visibility") == "private"


@pytest.mark.parametrize("refused", ["/api/repos/create", "/org/model.git", "/api/models/org/model/commit"])
def test_an_upload_that_fails_is_said_with_a_way_to_repeat_it(hub: Hub, export: Path, refused: str) -> None:
    hub.refuses = refused
    with raises_naming(ConversionError, export, "org/model", f"hf upload org/model {export}"):
        upload(export, "org/model")
    assert hub.files == {}


def test_a_token_that_the_hub_does_not_know_is_said(hub: Hub, export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with raises_naming(ConversionError, "org/model", "hf auth login"):
        upload(export, "org/model")
    assert hub.created == []
