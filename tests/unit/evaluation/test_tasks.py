"""What is refused before a model is loaded."""

from pathlib import Path

import pytest

from neox.config import NeoXConfig
from neox.data import IndexedDatasetBuilder, Sidecar, write_sidecar
from neox.errors import EvaluationError
from neox.evaluation import check_own_tasks
from neox.evaluation.job import SCORERS
from neox.evaluation.tasks import KINDS
from neox.tokenizer import build_tokenizer

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
        check_own_tasks(config(*tasks, eval_stride=33, eval_results_prefix=f"{tmp_path}/empty.txt/x"), TOKENIZER)
    stride, results, wiki, lambada, corpus = str(caught.value).splitlines()
    assert "eval_stride is 33" in stride
    assert results.endswith("nothing can be written in " + str(tmp_path / "empty.txt"))
    assert "bytes.raw: cannot be read as text" in wiki
    assert "empty.txt: holds no text" in lambada
    assert "no key 'text' (it has 'content')" in corpus
    assert "--skip-bad" not in corpus
    check_own_tasks(config(tasks[3], eval_stride=32), TOKENIZER)


def test_token_files_of_another_tokenizer_are_known_by_their_sidecar(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "c"), "uint16")
    builder.add_document([1, 2, 3])
    builder.finalize()
    task = f"perplexity={tmp_path}/c.bin"
    check_own_tasks(config(task), TOKENIZER)
    write_sidecar(tmp_path / "c", Sidecar("HFTokenizer", "0" * 64, 1000, 0, True, documents=1, tokens=3, max_id=3))
    with pytest.raises(EvaluationError, match="made with another tokenizer"):
        check_own_tasks(config(task), TOKENIZER)


def test_every_kind_can_be_scored():
    assert tuple(SCORERS) == KINDS
