"""Checkpoints of before features were objects go on: averages, skipped batches, last losses, logits, each layout."""

import json
import shutil
from pathlib import Path

import pytest

from tests.distributed.spawn import run_script

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = Path(__file__).parent / "ee722dc"
TWO_RANKS = ("num_gpus=2", "zero_optimization.stage=1")
ONE_RANK = ("num_gpus=1", "zero_optimization.stage=0")


def resumed_numbers(directory: Path, name: str, settings: tuple[str, ...]) -> tuple[dict[int, dict[str, float]], str]:
    """Go on with a run in a copy of its files; return what it logs by step, and what it prints."""
    shutil.copytree(WRITTEN.parent / "d291652" / "data", directory / "data")
    for file in (WRITTEN.parent / "d291652" / "tokenizer.json", WRITTEN / "model.yml"):
        shutil.copy(file, directory)
    shutil.copytree(WRITTEN / name, directory / name)
    keys = []
    for setting in (f"save={name}", f"load={name}", "log_dir=logs", *settings):
        keys += ["--set", setting]
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_script(ROOT / "deepy.py", "train.py", "model.yml", *keys, directory=directory, timeout=400, **variables)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    rows: dict[int, dict[str, float]] = {}
    for line in (directory / "logs" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["iteration"], {}).update(row)
    return rows, output


@pytest.mark.parametrize(
    ("name", "settings", "tolerance"),
    [
        # Other degrees: dropout draws other numbers on other ranks, so it is compared in the same layout only.
        pytest.param(
            "dp2_skipped",
            ("num_gpus=2", "zero_optimization.stage=0", "ema_device=cpu"),
            1e-6,
            id="skipped",
            marks=pytest.mark.slow,
        ),
        pytest.param("dp2_zero1", (*TWO_RANKS, "check_replicas_every=4"), 1e-6, id="zero1", marks=pytest.mark.slow),
        pytest.param(
            "dp2_zero3", ("num_gpus=2", "zero_optimization.stage=3"), 1e-6, id="zero3", marks=pytest.mark.slow
        ),
        pytest.param(
            "pp2",
            ("num_gpus=2", "pipe_parallel_size=2", "zero_optimization.stage=0"),
            1e-6,
            id="stages",
            marks=pytest.mark.slow,
        ),
        # Products in bf16 are rounded differently by different CPUs.
        pytest.param(
            "mp2_bf16",
            (*TWO_RANKS, "model_parallel_size=2", "precision=bf16"),
            5e-3,
            id="tensor-ranks",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_goes_on_as_it_would_have(tmp_path: Path, name: str, settings: tuple[str, ...], tolerance: float) -> None:
    recorded = json.loads((WRITTEN / f"{name}.numbers.json").read_text())
    found, output = resumed_numbers(tmp_path, name, settings)
    assert set(map(int, recorded)) <= set(found)
    for step, row in recorded.items():
        for key, value in row.items():
            assert found[int(step)][key] == pytest.approx(value, rel=tolerance * 10), (step, key)
    if name == "dp2_skipped":  # its only rollback is done, and the checkpoint says so
        assert "back to step" not in output
    else:
        assert "back to step 13; the batches of steps 14 to 14 are skipped" in output, "the last losses were loaded"


@pytest.mark.parametrize("name", ["dp2_zero1", pytest.param("dp2_skipped", marks=pytest.mark.slow)])
def test_averages_rollbacks_and_logits_of_two_ranks_load_on_one(tmp_path: Path, name: str) -> None:
    found, output = resumed_numbers(tmp_path, name, ("hidden_dropout=0.0", *ONE_RANK))
    assert "the loaded model's logits agree with the stored ones" in output
    assert ("back to step 13; the batches of steps 14 to 14 are skipped" in output) == (name != "dp2_skipped")
    recorded = json.loads((WRITTEN / f"{name}.numbers.json").read_text())["16"]
    # A few steps with other dropout: the average has followed 13 steps or more and hardly moves.
    assert found[16]["validation_ema/lm_loss"] == pytest.approx(recorded["validation_ema/lm_loss"], rel=2e-3)
