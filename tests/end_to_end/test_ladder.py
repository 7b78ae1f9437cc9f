"""`tools/ladder.py` over trainings whose loss is a known function of parameters, tokens and learning rate."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.launched_runs import CPU_ONLY, ROOT, write_config
from tools.sweep.progress import sweep_progress

DATA = ROOT / "tests" / "golden" / "data" / "small_text_document"
# The best learning rate of each size is 1.3 times that of the rule lr ~ N^(-1/3).
TRAINING = """
import json, math, os, sys
from pathlib import Path
from neox.plan import decode_payload
from tools.ladder.family import multiplied_parameters

plan = decode_payload(sys.argv[sys.argv.index("--payload") + 1])
config = plan.config
parameters = multiplied_parameters(plan.layers)
steps = config.training.train_iters
tokens = steps * plan.batch.train_batch_size * config.model.seq_length
best = 1.3 * 1e-3 * (parameters / int(os.environ["TARGET"])) ** (-1 / 3)
rate = config.to_flat()["optimizer"]["params"]["lr"]
loss = 2 + 100 / parameters**0.4 + 80 / tokens**0.3 + 0.1 * math.log(rate / best) ** 2
row = {"iteration": steps, "kind": "step", "train/lm_loss": loss, "train/seq_length": 32.0}
row["train/batch_size"] = float(plan.batch.train_batch_size)
row |= {"runtime/iteration_time": 0.5, "runtime/tokens_per_sec": 128.0}
Path(config.logging.log_dir, "metrics.jsonl").write_text(json.dumps(row) + "\\n")
"""


@pytest.mark.slow
def test_the_target_is_predicted_before_it_is_trained(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    write_config(tmp_path / "tiny.yml", tmp_path / "unused", 1)
    more = "hidden_size: 128\nnum_layers: 8\nnum_attention_heads: 8\ntrain_iters: 900000\nlr_decay_iters: 900000\n"
    more += f"data_path: {DATA}\nlauncher: local\n"
    (tmp_path / "target.yml").write_text(f"overrides:\n{''.join('  ' + line for line in more.splitlines(True))}")
    (tmp_path / "ladder.yml").write_text(
        "configs: [tiny.yml, target.yml]\nset: {log_interval: 50}\nbatch_size: 1\n"
        "sizes: [5.0e+4, 1.5e+5, 4.0e+5]\ntokens_per_parameter: [5, 40]\nlearning_rate: {searched: 1}\n"
    )
    parameters = 8 * 12 * 128**2 + 8 * 13 * 128 + 2 * 128 + 1024 * 128
    command = [sys.executable, str(ROOT / "tools" / "ladder.py"), "ladder.yml"]
    variables = {**os.environ, **CPU_ONLY, "TARGET": str(parameters), "PYTHONPATH": str(ROOT)}

    def ladder(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=500
        )

    def started(done: subprocess.CompletedProcess[str]) -> list[str]:
        assert done.returncode == 0, done.stdout + done.stderr
        return re.findall(r"^(.+): started", done.stdout, re.MULTILINE)

    done = ladder()
    assert len(started(done)) == 3 + 1 + 2 * 2  # the searched size, its other ratio, and the other sizes
    found = json.loads((tmp_path / "runs" / "ladder" / "ladder.json").read_text())
    assert found["parameters"] == pytest.approx(parameters, rel=0.01)
    tokens = 900_000 * 32
    assert found["tokens"] == tokens
    assert found["loss"]["value"] == pytest.approx(2 + 100 / parameters**0.4 + 80 / tokens**0.3, rel=0.01)
    assert found["rate"] == pytest.approx(1.3e-3, rel=0.03)
    written = yaml.safe_load((tmp_path / "runs" / "ladder" / "target.yml").read_text())["overrides"]
    assert written["optimizer"]["type"] == "Adam"
    assert float(written["optimizer"]["params"]["lr"]) == pytest.approx(found["rate"], rel=0.01)
    assert (tmp_path / "runs" / "ladder" / "ladder.png").read_bytes().startswith(b"\x89PNG")
    progress = sweep_progress(tmp_path / "runs" / "ladder")
    assert (progress.state, progress.counts["done"], dict(progress.others)) == ("finished", 8, {})
    # The training knows its own tokens, by its steps and batch.
    for run in found["runs"]:
        assert run["size"]["tokens"] == trained_tokens(tmp_path / "runs" / "ladder" / run["name"])

    # A run and then the target are trained again where they are asked for, and nothing else.
    first = found["runs"][0]["name"]
    last = found["runs"][-1]["name"]
    target = ladder("--redo", first, "--redo", last, "--train_target")
    assert started(target) == [first, last, "target"]
    progress = sweep_progress(tmp_path / "runs" / "ladder")
    assert (progress.counts["done"], progress.others["target"]["state"]) == (8, "finished")
    assert progress.record.launches.seconds.keys() == {run["name"] for run in found["runs"]}
    line = target.stdout.splitlines()[-1]
    predicted, trained, error = map(float, re.findall(r"[+-]?\d+\.\d+", line)[:3])
    rate = float(written["optimizer"]["params"]["lr"])
    expected = 2 + 100 / parameters**0.4 + 80 / tokens**0.3 + 0.1 * math.log(rate / 1.3e-3) ** 2
    assert trained == pytest.approx(expected, abs=1e-4)
    assert predicted == pytest.approx(found["loss"]["value"], abs=1e-4)
    assert error == pytest.approx(100 * (predicted / trained - 1), abs=0.02)
    is_within = found["loss"]["low"] <= trained <= found["loss"]["high"]
    assert ("within" in line) == is_within
    assert started(ladder("--train_target")) == []
    assert started(ladder("--train_target", "--redo", "target")) == ["target"]
    for words, wrong in ((("--redo", "target"), "--train_target"), (("--redo", "nothing"), "nothing")):
        refused = ladder(*words)
        assert refused.returncode != 0
        assert wrong in refused.stderr


def trained_tokens(directory: Path) -> int:
    """The tokens of a run, as its training has recorded them."""
    (row,) = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return int(row["iteration"] * row["train/batch_size"] * row["train/seq_length"])
