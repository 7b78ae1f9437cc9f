"""What is refused before a model is loaded."""

from pathlib import Path

import pytest

from neox.config import NeoXConfig
from neox.data import IndexedDatasetBuilder, Sidecar, write_sidecar
from neox.errors import EvaluationError
from neox.evaluation.evaluate import SCORERS
from neox.evaluation.tasks import KINDS, check_file_tasks, parse_tasks
from neox.tokenizer import build_tokenizer
from tests.errors import raises_naming

TOKENIZER = build_tokenizer("HFTokenizer", Path(__file__).parents[2] / "golden" / "data" / "tokenizer.json")


def config(*tasks, **keys):
    return NeoXConfig.from_flat({"seq_length": 32, "eval_tasks": list(tasks), **keys})


def test_all_that_is_wrong_with_files_is_said_at_once(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "bytes.raw").write_bytes(b"\xff\xfe")
    (tmp_path / "other.jsonl").write_text('{"content": "no text here"}\n')
    (tmp_path / "fine.jsonl").write_text('{"text": "some words"}\n')
    tasks = [
        f"wikitext={tmp_path}/bytes.raw",
        f"lambada={tmp_path}/empty.txt",
        f"perplexity={tmp_path}/other.jsonl",
        f"perplexity={tmp_path}/fine.jsonl",
    ]
    with pytest.raises(EvaluationError) as caught:
        check_file_tasks(config(*tasks, eval_stride=33, eval_results_prefix=f"{tmp_path}/empty.txt/x"), TOKENIZER)
    stride, results, wiki, lambada, corpus = str(caught.value).splitlines()
    assert "eval_stride" in stride
    assert "eval_results_prefix" in results
    assert str(tmp_path / "bytes.raw") in wiki
    assert str(tmp_path / "empty.txt") in lambada
    assert "'content'" in corpus
    assert "--skip-bad" not in corpus
    check_file_tasks(config(tasks[3], eval_stride=32), TOKENIZER)


def test_token_files_of_another_tokenizer_are_known_by_their_sidecar(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "c"), "uint16")
    builder.add_document([1, 2, 3])
    builder.finalize()
    task = f"perplexity={tmp_path}/c.bin"
    check_file_tasks(config(task), TOKENIZER)
    write_sidecar(tmp_path / "c", Sidecar("HFTokenizer", "0" * 64, 1000, 0, True, documents=1, tokens=3, max_id=3))
    with raises_naming(EvaluationError, "eval_tasks", tmp_path / "c"):
        check_file_tasks(config(task), TOKENIZER)


def test_every_kind_can_be_scored():
    assert tuple(SCORERS) == KINDS


def test_own_tasks_and_the_harnesss(tmp_path):
    for name in ("a.raw", "b.raw", "c.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "d.idx").touch()
    own, names = parse_tasks(
        ["hellaswag", *(f"wikitext={tmp_path / n}.raw" for n in "ab"), f"perplexity={tmp_path / 'd'}", "my/task.yaml"]
    )
    assert [task.name for task in own] == ["wikitext_a", "wikitext_b", "perplexity"]
    assert names == ["hellaswag", "my/task.yaml"]


def test_every_task_has_a_name_of_its_own(tmp_path):
    for name in ("a/wiki.raw", "b/wiki.raw", "c/wiki.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    own, _ = parse_tasks([f"wikitext={path}" for path in sorted(tmp_path.glob("*/wiki.*"))])
    assert [task.name for task in own] == [
        f"wikitext_{tmp_path}/a/wiki.raw",
        f"wikitext_{tmp_path}/b/wiki.raw",
        "wikitext_wiki.txt",
    ]
    own, _ = parse_tasks(["wikitext", f"wikitext={tmp_path}/a/wiki.raw"])  # the harness has one of that name
    assert [task.name for task in own] == ["wikitext_wiki"]
    with raises_naming(EvaluationError, "eval_tasks", f"wikitext={tmp_path}/a/wiki.raw"):
        parse_tasks([f"wikitext={tmp_path}/a/wiki.raw"] * 2)


def test_all_wrong_tasks_are_named(tmp_path):
    with raises_naming(EvaluationError, "wiki ", *KINDS, tmp_path / "none.jsonl", lines=2):
        parse_tasks([f"wiki={tmp_path}", f"lambada={tmp_path / 'none.jsonl'}"])
    (tmp_path / "alone.bin").touch()
    with raises_naming(EvaluationError, tmp_path / "alone.bin", ".idx"):
        parse_tasks([f"perplexity={tmp_path / 'alone.bin'}"])
    with raises_naming(EvaluationError, "eval_tasks"):
        parse_tasks([])
