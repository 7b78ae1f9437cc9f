"""Tables, files and names of results; tasks as people write them."""

import json
from datetime import datetime

import pytest

from neox.errors import EvaluationError
from neox.evaluation import TaskResult, flat_metrics, format_table, parse_tasks, write_results

RESULTS = [
    TaskResult("wikitext", {"ppl": 12.3456789, "word_ppl": 30.0}, {"tokens": 1234567}),
    TaskResult("lambada", {"acc": 0.5}),
]
NOW = datetime(2024, 5, 6, 7, 8, 9)


def test_the_table_has_a_line_for_each_metric():
    lines = format_table(RESULTS).splitlines()
    assert len(lines) == 5
    assert lines[2].split() == ["wikitext", "ppl", "12.3457", "1,234,567", "tokens"]
    assert lines[3].split() == ["word_ppl", "30"]


def test_the_file_has_everything_under_neoxs_name(tmp_path):
    path = write_results(str(tmp_path / "new" / "run1"), RESULTS, {"checkpoint": "c"}, NOW)
    assert path.name == "run1_eval_results_05-06-2024-07-08-09.json"
    record = json.loads(path.read_text())
    assert record["results"]["wikitext"] == {"ppl": 12.3456789, "word_ppl": 30.0}
    assert record["counts"]["wikitext"] == {"tokens": 1234567}
    assert record["checkpoint"] == "c"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "file").touch()
    for prefix, about in (("file/x", {}), ("x", {"odd": float("nan")})):
        with pytest.raises(EvaluationError, match="cannot be written"):
            write_results(str(tmp_path / prefix), RESULTS, about, NOW)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_metrics_that_are_no_numbers_are_null(tmp_path):
    path = write_results(f"{tmp_path}/", [TaskResult("t", {"acc": 1.0, "acc_stderr": float("nan")})], {}, NOW)
    assert json.loads(path.read_text())["results"] == {"t": {"acc": 1.0, "acc_stderr": None}}


def test_names_for_curves():
    assert flat_metrics(RESULTS) == {
        "eval/wikitext_ppl": 12.3456789,
        "eval/wikitext_word_ppl": 30.0,
        "eval/lambada_acc": 0.5,
    }


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
    with pytest.raises(EvaluationError, match="is there 2 times"):
        parse_tasks([f"wikitext={tmp_path}/a/wiki.raw"] * 2)


def test_all_wrong_tasks_are_named(tmp_path):
    with pytest.raises(EvaluationError, match=r"(?s)wiki is no kind of task.*lambada=.*no such file"):
        parse_tasks([f"wiki={tmp_path}", f"lambada={tmp_path / 'none.jsonl'}"])
    (tmp_path / "alone.bin").touch()
    with pytest.raises(EvaluationError, match=r"alone.bin: there is no .idx beside it"):
        parse_tasks([f"perplexity={tmp_path / 'alone.bin'}"])
    with pytest.raises(EvaluationError, match="no eval_tasks"):
        parse_tasks([])
