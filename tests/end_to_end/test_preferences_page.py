"""docs/preferences.md: its commands run one after another, as a reader would, from an import to another answer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from neox.metrics import read_metrics
from tests.end_to_end.pages import type_page

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_command_of_the_page(tmp_path: Path) -> None:
    pairs = [
        {"prompt": f"What is {n} and {n + 1}?", "chosen": f" It is {2 * n + 1}.", "rejected": f" I will not say {n}."}
        for n in range(120)
    ]
    judged = []
    for pair in pairs:
        judged.append({"prompt": pair["prompt"], "completion": pair["chosen"], "label": True})
        judged.append({"prompt": pair["prompt"], "completion": pair["rejected"], "label": False})
    (tmp_path / "data").mkdir()
    for name, rows in (("pairs", pairs), ("judged", judged)):
        (tmp_path / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    whole = type_page("preferences.md", tmp_path)
    margins = re.search(r"margin before (\S+), after (\S+)", whole)
    assert margins is not None
    before, after = map(float, margins.groups())
    assert after > before + 1
    steps = [row for row in read_metrics(tmp_path / "runs" / "dpo" / "logs" / "metrics.jsonl") if row["kind"] == "step"]
    assert steps[0]["train/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert steps[-1]["train/rewards/accuracies"] > 0.9
    assert len(list((tmp_path / "data").glob("pairs_chosen_document.start-*.reference.npz"))) == 1
    assert (tmp_path / "runs" / "kto" / "latest").read_text() == "global_step4"
    scores = re.search(r"score here (\S+), there (\S+)", whole)
    assert scores is not None
    here, there = map(float, scores.groups())
    assert here == pytest.approx(there, abs=2e-5)
    accuracy = re.search(r"pairs, accuracy (\S+),", whole)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9
    rows = read_metrics(tmp_path / "runs" / "distilled" / "logs" / "metrics.jsonl")
    distances = [row["train/kl"] for row in rows if row["kind"] == "step"]
    assert distances[-1] < distances[0]
