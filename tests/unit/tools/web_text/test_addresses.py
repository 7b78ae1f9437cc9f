"""Inputs of web text at addresses give what local files give."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from neox.corpus import read_documents
from neox.errors import ConfigError, DataError
from tests.errors import raises_naming
from tests.unit.corpus.s3_server import FailingApp, error, s3_server
from tools.web_text import STEPS, run_step
from tools.web_text.step import Step


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingApp]:
    monkeypatch.setattr("neox.storage.FIRST_PAUSE", 0.001)
    with s3_server(monkeypatch) as app:
        yield app


def make(step: str, source: Path | str, output: Path | str, **settings: object) -> dict[str, object]:
    chosen = STEPS[step]
    values = {"input": str(source), "output": str(output), **settings}
    report: dict[str, object] = run_step(chosen, chosen.make_settings(values, str))
    return report


def test_documents_in_a_bucket_are_those_of_local_files(s3: FailingApp, tmp_path: Path) -> None:
    where = fsspec.filesystem("s3")
    local = tmp_path / "in"
    local.mkdir()
    for name in ("a", "b"):
        lines = "".join(json.dumps({"text": f"{name} {i} " + "word " * 50, "url": f"u{i}"}) + "\n" for i in range(50))
        (local / f"{name}.jsonl").write_text(lines)
        where.pipe_file(f"bucket/in/{name}.jsonl", lines.encode())
    s3.fail = lambda number, method, path: error("503 Slow Down", "SlowDown") if number % 5 == 0 else None
    make("shuffle", local, tmp_path / "local.jsonl")
    remote = tmp_path / "remote.jsonl"
    assert make("shuffle", "s3://bucket/in/", remote)["fresh"]
    assert remote.read_bytes() == (tmp_path / "local.jsonl").read_bytes()
    assert not make("shuffle", "s3://bucket/in/*.jsonl", remote)["fresh"]
    sidecar = json.loads((tmp_path / "remote.jsonl.step.json").read_text())
    assert [entry["path"] for entry in sidecar["inputs"]] == ["s3://bucket/in/a.jsonl", "s3://bucket/in/b.jsonl"]
    where.pipe_file("bucket/in/b.jsonl", b'{"text": "another"}\n')
    assert make("shuffle", "s3://bucket/in/", remote)["fresh"]
    assert "another" in {document.text for document in read_documents(remote)}
    with raises_naming(DataError, "s3://bucket/absent/"):
        make("shuffle", "s3://bucket/absent/", remote)


def test_pages_and_dumps_in_a_bucket(s3: FailingApp, tmp_path: Path) -> None:
    warcio = pytest.importorskip("warcio.warcwriter", reason="the optional package warcio is not installed")
    pytest.importorskip("trafilatura", reason="the optional package trafilatura is not installed")
    from warcio.statusandheaders import StatusAndHeaders

    file = io.BytesIO()
    writer = warcio.WARCWriter(file, gzip=True)
    for number in range(20):
        html = f"<html><body><p>page {number} " + "some words of text. " * 30 + "</p></body></html>"
        headers = StatusAndHeaders("200 OK", [("Content-Type", "text/html; charset=utf-8")], protocol="HTTP/1.0")
        page = io.BytesIO(html.encode())
        url = f"https://example.org/{number}"
        writer.write_record(writer.create_warc_record(url, "response", payload=page, http_headers=headers))
    local = tmp_path / "a.warc.gz"
    local.write_bytes(file.getvalue())
    fsspec.filesystem("s3").pipe_file("bucket/crawl/a.warc.gz", file.getvalue())
    for source, name in ((local, "local"), ("s3://bucket/crawl/*.warc.gz", "remote")):
        make("extract", source, tmp_path / f"{name}.jsonl", method="bs4")
    assert (tmp_path / "remote.jsonl").read_bytes() == (tmp_path / "local.jsonl").read_bytes()
    assert len(list(read_documents(tmp_path / "remote.jsonl"))) == 20


def test_urls_in_a_bucket(s3: FailingApp, tmp_path: Path) -> None:
    pytest.importorskip("yarl", reason="the optional package yarl is not installed")
    pytest.importorskip("tldextract", reason="the optional package tldextract is not installed")
    text = "".join(f"https://example.org/page/{i}\n" for i in range(100))
    (tmp_path / "urls.txt").write_text(text)
    fsspec.filesystem("s3").pipe_file("bucket/urls/urls.txt", text.encode())
    for source, name in ((tmp_path / "urls.txt", "local"), ("s3://bucket/urls", "remote")):
        make("filter-urls", source, tmp_path / f"{name}.txt")
    assert (tmp_path / "remote.txt").read_bytes() == (tmp_path / "local.txt").read_bytes()
    with raises_naming(ConfigError, "remote.xyz"):
        make("filter-urls", "s3://bucket/urls", tmp_path / "remote.xyz")
    for name in ("output", "report"):
        with raises_naming(ConfigError, name, "s3://bucket/out.txt"):
            make("filter-urls", "s3://bucket/urls", **{"output": tmp_path / "remote.txt", name: "s3://bucket/out.txt"})
    with raises_naming(ConfigError, "domains", "s3://bucket/d.txt"):
        make("filter-urls", "s3://bucket/urls", tmp_path / "remote.txt", domains="s3://bucket/d.txt")
    step: Step[object] = STEPS["filter-urls"]  # type: ignore[assignment]
    with raises_naming(DataError, "s3://bucket/urls", ".txt"):
        step.expand(["s3://bucket/urls/*.jsonl"])
