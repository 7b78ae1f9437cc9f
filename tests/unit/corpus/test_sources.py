"""Named corpora, and downloads from a server that is slow, rude or gone."""

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from neox.corpus import Document, write_documents
from neox.corpus.sources import CORPORA, clashing_names, download, find_corpus
from neox.errors import DataError
from tests.errors import raises_naming

ROOT = Path(__file__).parents[3]
CONTENT = bytes(range(256)) * 4000


class Server(ThreadingHTTPServer):
    """Serves CONTENT; `rude` names what goes wrong, `ranges` are the requests seen."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.rude: list[str] = []
        self.ranges: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}/file.jsonl.zst"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range", "bytes=0-")
        self.server.ranges.append(asked)
        rude = self.server.rude.pop(0) if self.server.rude else ""
        if rude.isdigit():
            self.send_error(int(rude))
            return
        start = 0 if rude == "from the start" else int(asked.removeprefix("bytes=").removesuffix("-"))
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        end = start + 100_000 if rude == "cut" else len(CONTENT)
        self.wfile.write(CONTENT[start:end])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def test_a_cut_download_goes_on(server: Server, tmp_path: Path) -> None:
    server.rude = ["cut", "503", "cut"]
    path = download(server.url, tmp_path / "sub" / "f", pause=0.01)
    assert path.read_bytes() == CONTENT
    assert server.ranges == ["bytes=0-", "bytes=100000-", "bytes=100000-", "bytes=200000-"]
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert (tmp_path / "sub" / "f.sha256").read_text() == f"{digest}  f\n"
    assert sorted(p.name for p in path.parent.iterdir()) == ["f", "f.sha256"]


def test_what_is_there_is_checked_and_kept(server: Server, tmp_path: Path) -> None:
    path = download(server.url, tmp_path / "f")
    download(server.url, path)
    assert len(server.ranges) == 1
    path.write_bytes(CONTENT[:-1] + b"x")
    with raises_naming(DataError, path, "--force-redownload"):
        download(server.url, path)
    assert download(server.url, path, force=True).read_bytes() == CONTENT


def test_a_server_that_starts_over(server: Server, tmp_path: Path) -> None:
    server.rude = ["cut", "from the start"]
    assert download(server.url, tmp_path / "f", pause=0.01).read_bytes() == CONTENT


def test_failures_are_named(server: Server, tmp_path: Path) -> None:
    server.rude = ["404"]
    with raises_naming(DataError, server.url, 404):
        download(server.url, tmp_path / "f")
    server.rude = ["500"] * 5
    with raises_naming(DataError, server.url, 500):
        download(server.url, tmp_path / "f", pause=0.001)
    assert len(server.ranges) == 6
    with raises_naming(DataError, server.url, "0000"):
        download(server.url, tmp_path / "f", sha256="0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_names() -> None:
    assert "pile-uncopyrighted" in find_corpus("pile").sources[0]
    with raises_naming(DataError, "enron", "Enron Emails", "pile-uncopyrighted"):
        find_corpus("enron")
    known = [corpus for corpus in CORPORA.values() if not corpus.gone]
    assert all((corpus.sources or corpus.address_list) and "copy" in corpus.described() for corpus in known)
    assert {"pile", "enwik8", "openwebtext", "c4", "fineweb", "slimpajama", "dolma", "the_stack"} <= set(CORPORA)
    assert find_corpus("wikipedia=/data/wiki,/data/more").sources == ("/data/wiki", "/data/more")
    assert find_corpus("enron=/data/enron.jsonl").sources == ("/data/enron.jsonl",)
    for request, name in (("enrom", "enron"), ("../x=/y", "../x"), ("a=", "a=")):
        with raises_naming(DataError, name):
            find_corpus(request)
    assert clashing_names(["http://a/x.zst", "http://b/x.zst", "/local/x.zst"]) == ["x.zst"]


def test_a_folder_in_the_data_directory_is_a_corpus(tmp_path: Path) -> None:
    with raises_naming(DataError, tmp_path / "wikipedia", "wikipedia="):
        find_corpus("wikipedia", tmp_path)
    (tmp_path / "webtext").mkdir()
    assert find_corpus("webtext", tmp_path).sources == (str(tmp_path / "webtext"),)
    (tmp_path / "enwik8").mkdir()  # where its download is kept
    assert find_corpus("enwik8", tmp_path) is CORPORA["enwik8"]


def test_the_tool_combines_local_corpora(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_documents(tmp_path / f"{name}.jsonl.zst", [Document(f"text of {name}")] * 3)
    vocab = ROOT / "tests" / "golden" / "data" / "tokenizer.json"
    command = [
        sys.executable,
        "tools/prepare_data.py",
        f"one={tmp_path}/one.jsonl.zst",
        f"two={tmp_path}/two.jsonl.zst",
    ]
    command += [
        "-t",
        "HFTokenizer",
        "-v",
        str(vocab),
        "-d",
        str(tmp_path / "data"),
        "--combine",
        "mix",
        "--workers",
        "1",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "mix_text_document: 6 documents" in done.stdout
    assert (tmp_path / "data" / "mix" / "mix_text_document.idx").exists()
