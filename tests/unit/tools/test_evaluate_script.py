"""tools/evaluate.py: what it refuses before it loads a model."""

import json
import math
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


def scored_by_script(monkeypatch, *arguments):
    script = ROOT / "tools" / "score.py"
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    return ended.value.code


def test_a_masked_language_model_is_refused_by_its_objective(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(GOLDEN)
    keys = {"objective": "masked_lm", "pos_emb": "learned", "attention_config": None, "no_weight_tying": False}
    (tmp_path / "bert.yml").write_text(json.dumps({"overrides": {**keys, "gpt_j_residual": False}}))
    files = ("--input", "a.jsonl", "--output", tmp_path / "x")
    assert scored_by_script(monkeypatch, f"{NAME}/{NAME}.yml", tmp_path / "bert.yml", *files) == 2
    assert "next tokens" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_texts_get_their_log_probabilities(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(GOLDEN)
    texts = [{"text": "The quick brown fox."}, {"prompt": "The file is", "completion": " not found."}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    files = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "x.jsonl")
    code = scored_by_script(monkeypatch, f"{NAME}/{NAME}.yml", "-o", f"load={NAME}", *files)
    assert code in (0, None), capsys.readouterr().err
    found = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [line["bytes"] for line in found] == [20, 11]
    for line in found:
        per_token = -line["log_probability"] / line["tokens"]
        assert 5.5 < per_token < 7.5, "the loss of this model on its data is 6.4"
        assert line["perplexity"] == pytest.approx(math.exp(per_token))
