"""Inputs by address: the hub, S3 and a web server give what local files give, also when servers fail."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from neox.corpus import LineBlock, expand_inputs, read_blocks, read_documents
from neox.corpus.sources import listed_addresses
from neox.data.token_files.sidecar import read_sidecar
from neox.errors import DataError
from neox.preprocess import PreprocessSettings, RankInfo, TokenizerSpec, preprocess, preprocess_on_rank
from neox.storage import open_file
from tests.errors import raises_naming
from tests.unit.corpus.s3_server import FailingApp, error, s3_server

ROOT = Path(__file__).parents[3]
VOCAB = str(ROOT / "tests" / "golden" / "data" / "tokenizer.json")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"
TEXTS = [f"text {i} " + "words and more " * (i % 50) for i in range(400)]


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neox.storage.FIRST_PAUSE", 0.001)


class Server(ThreadingHTTPServer):
    """A web server, and as much of the hub as data sets need.

    Attributes:
        files: Path -> contents.
        card: Metadata of the card of the data set `org/set`.
        fail: Function of the path of a request for a file; it returns a status and a body, or None.
        asked: Paths of all requests.
        version: Number of the version of all files.
        has_tags: Whether answers have an ETag.
    """

    daemon_threads = True
    files: dict[str, bytes]
    card: dict[str, Any]
    fail: Callable[[str], tuple[int, bytes] | None]
    asked: list[str]
    version = 1
    has_tags = True


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_POST(self) -> None:
        self.answer(with_body=True, asked=self.rfile.read(int(self.headers["Content-Length"])))

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool, asked: bytes = b"") -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if path.startswith(("/api/datasets/", "/datasets/")):
            if self.headers.get("Authorization") != f"Bearer {TOKEN}" or "org/set" not in path:
                return self.reply(401, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
            if path.endswith("/revision/nope"):
                return self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body)
            if path.startswith("/api/"):
                return self.reply(200, json.dumps(self.api(path, asked)).encode(), {}, with_body)
            path = path.split(f"/resolve/{COMMIT}")[-1]
        failure = self.server.fail(path)
        if failure is not None:
            return self.reply(failure[0], failure[1], {}, with_body)
        data = self.server.files.get(path)
        if data is None:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        size = len(data)
        tag = {"ETag": f'"{path}-{self.server.version}"'} if self.server.has_tags else {}
        changed = {"Last-Modified": f"Mon, 0{self.server.version} Jan 2024 00:00:00 GMT"}
        headers = {**tag, **changed, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted is None:
            return self.reply(200, data, headers, with_body)
        first, last = wanted.removeprefix("bytes=").split("-")
        data = data[int(first) : int(last) + 1 if last else None]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(data) - 1}/{size}"
        return self.reply(206, data, headers, with_body)

    def api(self, path: str, asked: bytes) -> Any:
        names = [name.lstrip("/") for name in self.server.files]
        if "/paths-info/" in path or "/tree/" in path:
            return [
                {"type": "file", "path": name, "size": len(self.server.files[f"/{name}"]), "oid": name}
                for name in names
                if "/tree/" in path or name in asked.decode()
            ]
        siblings = [{"rfilename": name} for name in names]
        return {"id": "org/set", "sha": COMMIT, "private": True, "siblings": siblings, "cardData": self.server.card}

    def reply(self, status: int, data: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    import huggingface_hub.constants

    server = Server(("127.0.0.1", 0), Handler)
    server.files = {}
    server.asked = []
    server.card = {}
    server.fail = lambda path: None
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    huggingface_hub.HfFileSystem.clear_instance_cache()
    yield server
    server.shutdown()
    server.server_close()
    huggingface_hub.HfFileSystem.clear_instance_cache()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingApp]:
    with s3_server(monkeypatch) as app:
        yield app


def parquet(texts: list[str], folder: Path) -> bytes:
    pq.write_table(pa.table({"text": texts, "n": range(len(texts))}), folder / "t.parquet", row_group_size=50)
    return (folder / "t.parquet").read_bytes()


def lines(texts: list[str]) -> bytes:
    return zstandard.compress(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts))


def texts_of(address: str, **choice: Any) -> list[str]:
    return [document.text for document in read_documents(expand_inputs([address], **choice))]


def test_a_data_set_of_the_hub_by_split_and_pattern(server: Server, tmp_path: Path) -> None:
    server.files = {
        "/data/train-0-of-2.parquet": parquet(TEXTS[:300], tmp_path),
        "/data/train-1-of-2.parquet": parquet(TEXTS[300:], tmp_path),
        "/data/test-0-of-1.parquet": parquet(TEXTS[:9], tmp_path),
        "/README.md": b"",
    }
    assert texts_of("hf://datasets/org/set@main", split="train") == TEXTS
    assert texts_of("hf://datasets/org/set/data/test-*") == TEXTS[:9]
    assert expand_inputs(["hf://datasets/org/set/data"], split="test") == (
        f"hf://datasets/org/set@{COMMIT}/data/test-0-of-1.parquet",
    )
    for choice, names in (({}, ("train", "test")), ({"split": "dev"}, ("dev",)), ({"config": "x"}, ("--config x",))):
        with raises_naming(DataError, *names):
            expand_inputs(["hf://datasets/org/set"], **choice)
    with raises_naming(DataError, "org/other", "HF_TOKEN"):
        expand_inputs(["hf://datasets/org/other"])
    with raises_naming(DataError, "hf://datasets/org"):
        expand_inputs(["hf://datasets/org"])


def test_the_card_says_which_files_belong_to_a_configuration(server: Server, tmp_path: Path) -> None:
    server.files = {f"/{name}/0.jsonl.zst": lines([name]) for name in ("en", "de", "held")}
    english = {"config_name": "english", "data_files": [{"split": "train", "path": "en/*"}]}
    german = {
        "config_name": "german",
        "data_files": [{"split": "train", "path": ["de/*"]}, {"split": "t", "path": "held/**"}],
    }
    server.card = {"configs": [english, german]}
    assert texts_of("hf://datasets/org/set", config="english") == ["en"]
    assert texts_of("hf://datasets/org/set", config="german", split="t") == ["held"]
    with raises_naming(DataError, "english", "german"):
        expand_inputs(["hf://datasets/org/set"])
    server.card = {"configs": [english, {**german, "default": True}]}
    assert texts_of("hf://datasets/org/set", split="train") == ["de"]


def test_a_revision_that_does_not_exist_is_named(server: Server, tmp_path: Path) -> None:
    """huggingface_hub PR 4010, dataset-viewer PR 1053: the hub says RevisionNotFound, and it is no refused access."""
    server.files = {"/data/train.jsonl.zst": lines(["one"])}
    with pytest.raises(DataError, match=r"org/set@nope.*no such revision") as caught:
        expand_inputs(["hf://datasets/org/set@nope/data/train-*.jsonl"])
    assert "access is refused" not in str(caught.value)


def test_one_process_of_a_host_asks_the_hub(server: Server, tmp_path: Path) -> None:
    server.files = {f"/data/{i}.jsonl.zst": lines(TEXTS[i * 50 : i * 50 + 50]) for i in range(6)}
    spec = TokenizerSpec("HFTokenizer", VOCAB)
    inputs = ("hf://datasets/org/set",)
    one = PreprocessSettings(inputs, str(tmp_path / "one"), spec, workers=1, accelerator="off")
    preprocess(one)

    def listings(ranks: list[RankInfo], prefix: str) -> int:
        server.asked.clear()
        settings = replace(one, output_prefix=str(tmp_path / prefix))
        threads = [Thread(target=preprocess_on_rank, args=(settings, where)) for where in ranks]
        for thread in reversed(threads):
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert (tmp_path / f"{prefix}_text_document.bin").read_bytes() == (
            tmp_path / "one_text_document.bin"
        ).read_bytes()
        return sum(path in ("/api/datasets/org/set", "/api/datasets/org/set/revision/main") for path in server.asked)

    (tmp_path / "host0").mkdir()
    (tmp_path / "host1").mkdir()
    hosts = [RankInfo(rank, 4, 2, rank % 2, tmp_path / f"host{rank // 2}") for rank in range(4)]
    apart = [RankInfo(rank, 4) for rank in range(4)]
    assert listings(hosts, "hosts") == 2
    assert listings(apart, "apart") == 4


def test_an_expired_token_is_named_and_the_run_goes_on_with_another(server: Server, tmp_path: Path) -> None:
    server.files = {f"/data/{i}.jsonl.zst": lines(TEXTS[i * 200 : i * 200 + 200]) for i in range(2)}
    spec = TokenizerSpec("HFTokenizer", VOCAB)
    asked = PreprocessSettings(("hf://datasets/org/set",), str(tmp_path / "one"), spec, workers=1, accelerator="off")
    expired = (401, b'{"error": "Invalid username or password."}')
    server.fail = lambda path: expired if path.endswith("1.jsonl.zst") else None
    with raises_naming(DataError, "1.jsonl.zst", "HF_TOKEN"):
        preprocess(asked)
    server.fail = lambda path: None
    report = preprocess(asked)
    assert report.documents == {"text": 400}
    preprocess(replace(asked, output_prefix=str(tmp_path / "two")))
    both = [(tmp_path / f"{name}_text_document.bin").read_bytes() for name in ("one", "two")]
    assert both[0] == both[1]


def test_a_list_on_the_hub_names_files_elsewhere(server: Server) -> None:
    address = f"http://127.0.0.1:{server.server_port}"
    server.files = {"/urls/v1.txt": f"{address}/a.json.gz\n{address}/b.json.gz\n".encode()}
    for name, texts in (("a", TEXTS[:5]), ("b", TEXTS[5:9])):
        plain = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        server.files[f"/{name}.json.gz"] = gzip.compress(plain.encode())
    files = listed_addresses("hf://datasets/org/set/urls/v1.txt")
    assert [document.text for document in read_documents(files)] == TEXTS[:9]
    for content in (b"", b"<html>\n"):
        server.files = {"/urls/v1.txt": content}
        with raises_naming(DataError, "urls/v1.txt"):
            listed_addresses(f"{address}/urls/v1.txt")


def test_a_web_server_gives_files(server: Server) -> None:
    server.files = {"/a.jsonl.zst": lines(TEXTS)}
    address = f"http://user:word@127.0.0.1:{server.server_port}/a.jsonl.zst?signature=secret"
    assert texts_of(address) == TEXTS
    with raises_naming(DataError, "/b.jsonl.zst"):
        texts_of(address.replace("a.jsonl", "b.jsonl"))
    server.fail = lambda path: (200, server.files["/a.jsonl.zst"][:100])
    with raises_naming(DataError, "a.jsonl.zst"):
        texts_of(address)


@pytest.mark.parametrize("has_tags", [True, False])
@pytest.mark.parametrize("kept", [1.0, 0.5, 1.5])
def test_a_file_of_a_web_server_that_is_replaced_while_it_is_read(
    server: Server, monkeypatch: pytest.MonkeyPatch, kept: float, has_tags: bool
) -> None:
    """Bytes of two versions are never joined, also with servers that only tell the time of a change."""
    monkeypatch.setattr("neox.storage.BLOCK_BYTES", 1000)
    server.files = {"/a.bin": b"1" * 10_000}
    server.has_tags = has_tags
    address = f"http://127.0.0.1:{server.server_port}/a.bin"
    with open_file(address) as file:
        assert file.read() == b"1" * 10_000
    with open_file(address) as file:
        assert file.read(1000) == b"1" * 1000
        server.files = {"/a.bin": b"2" * int(10_000 * kept)}
        server.version = 2
        file.seek(8000)
        with raises_naming(DataError, "/a.bin", f"{int(10_000 * kept):,}"):
            file.read(1000)


def test_a_file_of_a_bucket_that_is_replaced_while_it_is_read(s3: FailingApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neox.storage.BLOCK_BYTES", 1000)
    where = fsspec.filesystem("s3")
    where.pipe_file("bucket/a.bin", b"1" * 10_000)
    where.ls("bucket")  # which s3fs remembers
    with open_file("s3://bucket/a.bin") as file:
        assert file.read(1000) == b"1" * 1000
        where.pipe_file("bucket/a.bin", b"2" * 10_000)
        with raises_naming(DataError, "s3://bucket/a.bin"):
            file.read(1000)


def test_a_bucket_gives_the_bytes_of_local_files(s3: FailingApp, tmp_path: Path) -> None:
    where = fsspec.filesystem("s3")
    for name, data in {"a.parquet": parquet(TEXTS[:200], tmp_path), "b.jsonl.zst": lines(TEXTS[200:])}.items():
        where.pipe_file(f"bucket/corpus/{name}", data)
        (tmp_path / name).write_bytes(data)
    spec = TokenizerSpec("HFTokenizer", VOCAB)
    for name, inputs in (("local", ("a.parquet", "b.jsonl.zst")), ("remote", ("s3://bucket/corpus/",))):
        paths = tuple(each if "://" in each else str(tmp_path / each) for each in inputs)
        preprocess(PreprocessSettings(paths, str(tmp_path / name), spec, workers=1, accelerator="off"))
    made = [(tmp_path / f"{name}_text_document.bin").read_bytes() for name in ("local", "remote")]
    assert made[0] == made[1]
    sidecar = read_sidecar(tmp_path / "remote_text_document")
    assert sidecar is not None
    assert sidecar.inputs == ("s3://bucket/corpus/a.parquet", "s3://bucket/corpus/b.jsonl.zst")
    again = PreprocessSettings(("s3://bucket/corpus/*",), str(tmp_path / "remote"), spec, workers=1, accelerator="off")
    assert not preprocess(again).fresh
    blocks = list(read_blocks("s3://bucket/corpus/a.parquet", block_bytes=2000))
    middle = blocks[len(blocks) // 2]
    assert isinstance(middle, LineBlock)
    assert next(iter(read_blocks("s3://bucket/corpus/a.parquet", block_bytes=2000, start=middle.start))) == middle


def test_a_failing_bucket_is_asked_again(s3: FailingApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neox.storage.BLOCK_BYTES", 1000)
    where = fsspec.filesystem("s3")
    data = lines(TEXTS)
    where.pipe_file("bucket/a.jsonl.zst", data)
    s3.fail = lambda number, method, path: error("503 Slow Down", "SlowDown") if number % 5 == 0 else None
    with open_file("s3://bucket/a.jsonl.zst") as file:
        assert file.read() == data
    s3.fail = lambda number, method, path: ("206 Partial", b"short") if method == "GET" else None
    with raises_naming(DataError, "s3://bucket/a.jsonl.zst", "5 bytes"):
        texts_of("s3://bucket/a.jsonl.zst")
    s3.fail = lambda number, method, path: error("403 Forbidden", "ExpiredToken")
    where.invalidate_cache()
    with raises_naming(DataError, "s3://bucket/a.jsonl.zst", "expired"):
        texts_of("s3://bucket/a.jsonl.zst")
    s3.fail = lambda number, method, path: None
    with raises_naming(DataError, "s3://bucket/absent.jsonl"):
        texts_of("s3://bucket/absent.jsonl")
