"""Metadata kept beside token files: aligned with documents, the same after kills, and used to divide them by source."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neox.corpus import expand_inputs
from neox.data import IndexedDataset, merge_datasets
from neox.data.token_files.columns import column_lines, column_values, columns_path
from neox.data.token_files.sidecar import read_sidecar
from neox.errors import DataError
from neox.preprocess import PreprocessSettings, TokenizerSpec, preprocess
from neox.tokenizer import build_tokenizer
from tests.errors import raises_naming
from tests.unit.preprocess.test_preprocess_run import VOCAB, as_lines, documents
from tests.unit.preprocess.test_rank_parts import run_ranks
from tools.dataset.command import parser

ROOT = Path(__file__).parents[3]
SPEC = TokenizerSpec("HFTokenizer", VOCAB)
SOURCES = ["web", "Wikipedia (en)", "code"]


def rows(count: int = 600) -> list[dict[str, Any]]:
    found = []
    for number, text in enumerate(documents(count)):
        empty = number % 50 == 7
        meta = {"lang": "de" if number % 4 else None, "n": number}
        found.append({"text": "" if empty else text, "source": SOURCES[number % 3], "meta": meta})
    return found


def write_parquet(path: Path, content: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(content), path, row_group_size=100)
    return path


def settings(folder: Path, *inputs: Path, **changes: Any) -> PreprocessSettings:
    columns = ("source", "meta.n", "meta.lang")
    whole = PreprocessSettings(tuple(map(str, inputs)), str(folder / "out"), SPEC, workers=1, kept_columns=columns)
    return replace(whole, append_eod=True, **changes)


def written(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}_text_document.{suffix}").read_bytes() for suffix in ("bin", "idx", "columns.jsonl")]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_each_document_has_its_columns(tmp_path: Path, name: str) -> None:
    content = rows()
    write_parquet(tmp_path / "a.parquet", content)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    preprocess(settings(tmp_path, tmp_path / name))
    prefix = tmp_path / "out_text_document"
    data = IndexedDataset(prefix)
    tokenizer = build_tokenizer("HFTokenizer", VOCAB)
    kept = [row for row in content if row["text"]]
    lines = [json.loads(line) for line in column_lines(prefix)]
    assert len(lines) == len(kept) == len(data)
    for number, (line, row) in enumerate(zip(lines, kept, strict=True)):
        assert line == {"source": row["source"], "meta.n": row["meta"]["n"], "meta.lang": row["meta"]["lang"]}
        assert data[number].tolist() == [*tokenizer.encode(row["text"]), 0]
    assert list(column_values(prefix, "meta.lang"))[:2] == ["null", "de"]
    assert not any(file.startswith(str(prefix)) for file in expand_inputs([tmp_path]))
    assert not preprocess(settings(tmp_path, tmp_path / name)).fresh
    columns_path(prefix).unlink()
    assert preprocess(settings(tmp_path, tmp_path / name)).fresh
    assert preprocess(settings(tmp_path, tmp_path / name, kept_columns=())).fresh
    assert not columns_path(prefix).exists()
    with raises_naming(DataError, f"{name}:1", "'sorce'"):
        preprocess(settings(tmp_path, tmp_path / name, kept_columns=("sorce",)))


def test_documents_of_sentences_have_one_line_each(tmp_path: Path) -> None:
    texts = ["one\ntwo", "\n", "three", "four\n\nfive\nsix"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t, "n": i}) + "\n" for i, t in enumerate(texts)))
    asked = settings(tmp_path, tmp_path / "a.jsonl", sentences="lines", kept_columns=("n",))
    preprocess(replace(asked, append_eod=False))
    prefix = tmp_path / "out_text_sentence"
    assert list(column_values(prefix, "n")) == ["0", "2", "3"]
    assert IndexedDataset(prefix).num_documents == 3


def test_ranks_and_merges_give_the_columns_of_one_run(tmp_path: Path) -> None:
    content = rows()
    files = []
    for number in range(3):
        files.append(write_parquet(tmp_path / f"{number}.parquet", content[number * 200 : number * 200 + 200]))
    preprocess(settings(tmp_path, *files))
    run_ranks(settings(tmp_path, *files, output_prefix=str(tmp_path / "ranks")), 2)
    assert written(tmp_path / "ranks") == written(tmp_path / "out")
    assert read_sidecar(tmp_path / "ranks_text_document") == read_sidecar(tmp_path / "out_text_document")
    assert not list(tmp_path.glob("ranks.part*"))
    parts = []
    for number, file in enumerate(files):
        prefix = tmp_path / f"part{number}"
        preprocess(settings(tmp_path, file, output_prefix=str(prefix)))
        parts.append(f"{prefix}_text_document")
    merge_datasets(parts, tmp_path / "merged_text_document")
    assert written(tmp_path / "merged") == written(tmp_path / "out")
    assert list(column_lines(tmp_path / "merged_text_document"))
    preprocess(settings(tmp_path, files[0], output_prefix=str(tmp_path / "part0"), kept_columns=()))
    merge_datasets(parts, tmp_path / "merged_text_document")
    assert not columns_path(tmp_path / "merged_text_document").exists()
    with raises_naming(DataError, "merged_text_document", "--columns"):
        list(column_lines(tmp_path / "merged_text_document"))


def test_a_dataset_is_divided_by_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess(settings(tmp_path, write_parquet(tmp_path / "a.parquet", rows())))
    prefix = str(tmp_path / "out_text_document")
    command = ["split", prefix, "--output-prefix", str(tmp_path / "by"), "--by", "source"]
    args = parser().parse_args(command)
    capsys.readouterr()
    assert args.run(args) == 0
    printed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if line.startswith("train_"))
    paths = json.loads(printed["train_data_paths"])
    assert [Path(path).name for path in paths] == ["by_web", "by_Wikipedia__en_", "by_code"]
    weights = json.loads(printed["train_data_weights"].partition("#")[0])
    whole = IndexedDataset(prefix)
    sources = np.array(list(column_values(prefix, "source")))
    for path, weight, source in zip(paths, weights, SOURCES, strict=True):
        part = IndexedDataset(path)
        places = np.flatnonzero(sources == source)
        assert part.num_tokens == weight
        assert set(column_values(path, "source")) == {source}
        assert [part[i].tolist() for i in range(len(part))] == [whole[int(i)].tolist() for i in places]
        sidecar = read_sidecar(path)
        assert sidecar is not None
        assert (sidecar.documents, sidecar.settings["part"]) == (len(places), source)
    with raises_naming(DataError, "by_web.idx"):
        args.run(args)
    for column, named in (("sorce", "meta.lang"), ("meta.n", "200")):
        other = parser().parse_args([*command[:-1], column])
        with raises_naming(DataError, repr(column), named):
            other.run(other)


def test_changed_columns_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess(settings(tmp_path, write_parquet(tmp_path / "a.parquet", rows())))
    prefix = tmp_path / "out_text_document"
    verify = parser().parse_args(["verify", str(prefix)])
    assert verify.run(verify) == 0
    good = columns_path(prefix).read_bytes()
    for changed in (good.replace(b"web", b"wet", 1), good[: good.index(b"\n") + 1], good + b"{}\n"):
        columns_path(prefix).write_bytes(changed)
        assert verify.run(verify) == 1
        assert "columns.jsonl" in capsys.readouterr().out


KILLED = """
import os, signal, sys
import neox.resume as resume
from neox.data import IndexedDatasetBuilder
from neox.preprocess import PreprocessSettings, TokenizerSpec, preprocess
if __name__ == "__main__":
    resume.SECONDS_BETWEEN_STATES = 0
    add, blocks = IndexedDatasetBuilder.add_documents, [0]
    def counted(self, *documents):
        blocks[0] += 1
        if blocks[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, *documents)
    IndexedDatasetBuilder.add_documents = counted
    spec = TokenizerSpec("HFTokenizer", sys.argv[3])
    columns = ("source", "meta.n", "meta.lang") if sys.argv[4] == "columns" else ()
    whole = PreprocessSettings((sys.argv[1],), sys.argv[2], spec, append_eod=True, workers=1, kept_columns=columns)
    preprocess(whole)
"""


def killed_again_and_again(folder: Path, kills: int, columns: bool) -> None:
    content = rows(1200 * kills)
    path = write_parquet(folder / "a.parquet", content)
    (folder / "killed.py").write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(folder / "killed.py"), str(path), str(folder / "out"), VOCAB]
    command.append("columns" if columns else "none")
    reached = 0
    for _ in range(kills):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == -signal.SIGKILL, done.stderr
        line = json.loads((folder / "out.progress.json").read_text())["position"]["line"]
        assert line > reached
        reached = line
    asked = settings(folder, path)
    if not columns:
        asked = replace(asked, kept_columns=())
    preprocess(asked)
    preprocess(replace(asked, output_prefix=str(folder / "other")))
    for suffix in ("bin", "idx", "columns.jsonl")[: 3 if columns else 2]:
        first, second = (folder / f"{name}_text_document.{suffix}" for name in ("out", "other"))
        assert first.read_bytes() == second.read_bytes()
    lines = as_lines([row["text"] for row in content])
    (folder / "same.jsonl").write_bytes(lines)
    preprocess(
        replace(asked, inputs=(str(folder / "same.jsonl"),), kept_columns=(), output_prefix=str(folder / "json"))
    )
    assert (folder / "json_text_document.bin").read_bytes() == (folder / "out_text_document.bin").read_bytes()


def test_killed_runs_over_a_table_end_with_the_same_bytes(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, 2, columns=True)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [False, True], ids=["texts", "columns"])
def test_twenty_kills_over_a_table_leave_the_same_bytes(tmp_path: Path, columns: bool) -> None:
    killed_again_and_again(tmp_path, 20, columns=columns)
