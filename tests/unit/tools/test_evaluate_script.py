"""tools/evaluate.py: what it refuses before it loads a model."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
NAME = "v2_pp2_mp1_dp1_fp32"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "eval_tasks"),
        (
            ("--eval_tasks", f"wikitext={Path(__file__)}", "--eval_results_prefix", f"{__file__}/x"),
            "nothing can be written",
        ),
        (("--eval_tasks", "wikitext=nowhere.raw"), "nowhere.raw: no such file"),
        (("--eval_tasks", "wiki=nowhere.raw"), "wikitext, lambada, perplexity"),
    ],
)
def test_refusals_write_nothing(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(GOLDEN)
    script = ROOT / "tools" / "evaluate.py"
    settings = ("-o", f"load={NAME}", "--eval_results_prefix", str(tmp_path / "x"))
    monkeypatch.setattr(sys, "argv", [str(script), f"{NAME}/{NAME}.yml", *settings, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_model_without_scores_is_refused_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(GOLDEN)
    script = ROOT / "tools" / "score.py"
    files = ("--input", "a.jsonl", "--output", str(tmp_path / "x"))
    monkeypatch.setattr(sys, "argv", [str(script), f"{NAME}/{NAME}.yml", "-o", f"load={NAME}", *files])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2
    assert "train_impl" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
