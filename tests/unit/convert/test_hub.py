"""Models from the hub: a small server that speaks as much of its protocol as a download needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch

from neox.convert import find_source, from_hf
from neox.convert.hub import wanted_files
from neox.errors import ConfigError, ConversionError
from tests.errors import raises_naming

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"


class Hub(ThreadingHTTPServer):
    """A hub with one private model.

    Attributes:
        files: Name -> contents.
        asked: Paths that were asked for.
    """

    daemon_threads = True
    files: dict[str, bytes]
    asked: list[str]


class Handler(BaseHTTPRequestHandler):
    """Answers about `org/model`, whose only revisions are `main`, `v1` and the commit."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" or "org/model" not in path:
            return self.reply(401, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
        if path.startswith("/api/models/org/model"):
            revision = path.rpartition("/revision/")[2]
            if "/revision/" in path and revision not in ("main", "v1", COMMIT):
                return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"}, with_body)
            siblings = [{"rfilename": name} for name in self.server.files]
            known = {"id": "org/model", "modelId": "org/model", "sha": COMMIT, "private": True, "siblings": siblings}
            if "/tree/" in path:
                known = [{"type": "file", "path": n, "size": len(d), "oid": n} for n, d in self.server.files.items()]
            return self.reply(200, json.dumps(known).encode(), {"Content-Type": "application/json"}, with_body)
        name = path.rpartition("/")[2]
        data = self.server.files[name]
        return self.reply(200, data, {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}, with_body)

    def reply(self, status: int, data: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).save_pretrained(tmp_path / "model")
    server = Hub(("127.0.0.1", 0), Handler)
    server.files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    server.files["pytorch_model.bin"] = b"the same weights again"
    server.asked = []
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    # huggingface_hub before 1.0 has a name of its own for it there
    monkeypatch.setattr(huggingface_hub.file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()


def test_a_model_of_the_hub_comes_in(hub, tmp_path):
    source = find_source("org/model", "v1")
    assert COMMIT in source.name
    assert not any("pytorch_model.bin" in path for path in hub.asked)
    result = from_hf(source.directory, tmp_path / "neox", name=source.name)
    assert "org/model" in result.config_file.read_text()
    assert json.loads((tmp_path / "neox" / "generation_config.json").read_text())
    hub.asked.clear()
    assert find_source("org/model").directory == source.directory
    assert not any("/resolve/" in path and path.endswith(".safetensors") for path in hub.asked)  # kept from before


def test_what_the_hub_refuses_is_said(hub, monkeypatch):
    with raises_naming(ConfigError, "org/model", "v2"):
        find_source("org/model", "v2")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with raises_naming(ConfigError, "org/model", "HF_TOKEN"):
        find_source("org/model")


def test_a_hub_out_of_reach_is_said_with_a_way_out(hub, monkeypatch):
    hub.shutdown()
    hub.server_close()
    with raises_naming(ConversionError, "org/model", "hf download org/model"):
        find_source("org/model")


def test_an_answer_of_the_hub_asks_for_no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for status in (404, None):
        error = OSError("no such file")
        if status:
            error.response = SimpleNamespace(status_code=status)

        def refuse(*_, error=error, **__):
            raise error

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
        with pytest.raises(ConversionError) as failure:
            find_source("org/model")
        assert ("https_proxy" in str(failure.value)) == (status is None)


def test_directories_come_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "model").mkdir(parents=True)
    assert str(find_source("runs/model").directory) == "runs/model"
    assert find_source("no/such/directory").name == "directory"
    with raises_naming(ConfigError, "--revision", "runs/model"):
        find_source("runs/model", "main")


def test_weights_are_downloaded_in_one_form():
    names = ["config.json", "model-1.safetensors", "pytorch_model.bin", "original/consolidated.pth", "README.md"]
    assert wanted_files(names) == ["config.json", "model-1.safetensors"]
    assert wanted_files(["config.json", "pytorch_model.bin", "vocab.txt"]) == [
        "config.json",
        "vocab.txt",
        "pytorch_model.bin",
    ]
