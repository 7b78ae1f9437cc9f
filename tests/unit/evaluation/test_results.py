"""Tables, files and metric names of results."""

import json
from datetime import datetime

import pytest

from neox.errors import EvaluationError
from neox.evaluation.results import TaskResult, flat_metrics, format_table, write_harness_report, write_results
from tests.errors import raises_naming

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


def test_errors_and_settings_of_the_harness_are_kept(tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval (requirements/requirements-eval.txt) is not installed")
    record = {"results": {"acc,none": 0.5, "acc_stderr,none": float("nan")}, "versions": 1.0, "n-shot": 5}
    harness = TaskResult(
        "arc", {"acc": 0.5, "acc_stderr": 0.0123}, {"examples": 9}, {"num_fewshot": 5, "version": 1.0}, record
    )
    lines = format_table([harness]).splitlines()
    assert len(lines) == 3
    assert lines[2].split() == ["arc", "acc", "0.5", "0.012", "9", "examples,", "num_fewshot", "5,", "version", "1.0"]
    assert json.loads(write_results(f"{tmp_path}/", [harness], {}, NOW).read_text())["settings"]["arc"] == {
        "num_fewshot": 5,
        "version": 1.0,
    }
    assert write_harness_report(f"{tmp_path}/", RESULTS, {}, NOW) is None
    path = write_harness_report(f"{tmp_path}/", [*RESULTS, harness], {"checkpoint": "c"}, NOW)
    report = json.loads(path.read_text())
    assert report["results"] == {"arc": {"acc,none": 0.5, "acc_stderr,none": None}}
    assert (report["versions"], report["n-shot"], report["config"]["checkpoint"]) == ({"arc": 1.0}, {"arc": 5}, "c")


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "file").touch()
    for prefix, about in (("file/x", {}), ("x", {"odd": float("nan")})):
        with raises_naming(EvaluationError, tmp_path / prefix):
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
