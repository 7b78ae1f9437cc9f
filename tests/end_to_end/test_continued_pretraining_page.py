"""docs/continued-pretraining.md, typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neox.metrics import curves
from tests.end_to_end.pages import type_page


@pytest.mark.slow
@pytest.mark.timeout(3600)  # more than a dozen commands, each with a limit of its own
def test_every_command_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    web = [json.dumps({"text": f"Page {n} tells of {n + 3} towns and {n} rivers."}) for n in range(400)]
    math = [json.dumps({"text": f"<|proof|> {n} + {n} is {2 * n} <|qed|>"}) for n in range(400)]
    (tmp_path / "data" / "web.jsonl").write_text("\n".join(web) + "\n")
    (tmp_path / "data" / "math.jsonl").write_text("\n".join(math) + "\n")
    said = type_page("continued-pretraining.md", tmp_path)
    assert "decay from step 10" in said
    found = curves(tmp_path / "runs" / "continued" / "logs" / "metrics.jsonl")
    for name in ("web", "math"):
        for kind in ("validation", "validation_ema"):
            losses = found[f"{kind}/{name}/lm_loss"]
            assert sorted(losses) == [0, 4, 8, 12, 16]
            assert losses[16] < losses[0]
    weights = []
    for model in ("averaged", "trained", "merged"):
        directory = tmp_path / f"{model}-model"
        assert "<|proof|>" in (directory / "tokenizer.json").read_text()
        weights.append((directory / "model.safetensors").read_bytes())
    assert len(set(weights)) == 3
    assert (tmp_path / "runs" / "merged" / "latest").read_text() == "global_step10"
