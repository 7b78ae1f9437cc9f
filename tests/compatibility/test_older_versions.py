"""What older versions wrote loads and goes on: checkpoints, exports, data, interrupted preprocessing and generation."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.spawn import run_script

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = Path(__file__).parent / "d291652"
# Known to the interrupted generation.
GENERATED_IN = Path("/tmp/neox-compatibility-d291652")
MODIFIED_NS = 1_700_000_000_000_000_000
FP32, BF16 = "fp32_pp2_mp2_zero1", "bf16_dp2_zero1"
ONE_RANK = ("pipe_parallel_size=1", "model_parallel_size=1", "num_gpus=1")
TWO_DATA_RANKS = ("pipe_parallel_size=1", "model_parallel_size=1", "num_gpus=2")


def copy_written(directory: Path) -> Path:
    """Copy the files into an empty directory, with the modification times that they had."""
    shutil.copytree(WRITTEN, directory, dirs_exist_ok=True)
    for path in (*directory.glob("documents/*"), directory / FP32 / "global_step4"):
        os.utime(path, ns=(MODIFIED_NS, MODIFIED_NS))
    return directory


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return copy_written(tmp_path)


@pytest.fixture
def written_where_it_was() -> Iterator[Path]:
    with open(f"{GENERATED_IN}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(GENERATED_IN, ignore_errors=True)
        yield copy_written(GENERATED_IN)
        shutil.rmtree(GENERATED_IN)


def run(directory: Path, script: str, *arguments: str, **variables: str) -> str:
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    done = run_script(ROOT / script, *arguments, directory=directory, timeout=400, **variables)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def rows_by_step(rows: Iterator[dict[str, float]]) -> dict[int, dict[str, float]]:
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        steps.setdefault(int(row["iteration"]), {}).update(row)
    return steps


@pytest.mark.parametrize(
    ("name", "settings", "tolerance"),
    [
        pytest.param(FP32, (), 1e-6, id="same-layout", marks=pytest.mark.slow),
        pytest.param(FP32, (*ONE_RANK, "zero_optimization.stage=0"), 1e-5, id="one-rank"),
        # Products in bf16 are rounded differently by different CPUs.
        pytest.param(BF16, (*TWO_DATA_RANKS, "precision=auto"), 2e-3, id="bf16", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_with_the_losses_it_would_have_had(
    written: Path, name: str, settings: tuple[str, ...], tolerance: float
) -> None:
    # Each evaluation of older versions read the samples after those of the last one, as gpt-neox's do.
    keys = (f"load={name}", "save=resumed", "log_dir=resumed-logs", "eval_order=gpt-neox", *settings)
    run(written, "deepy.py", "train.py", "model.yml", *(word for key in keys for word in ("--set", key)))
    recorded = json.loads((written / f"{name}.losses.json").read_text())
    lines = (written / "resumed-logs" / "metrics.jsonl").read_text().splitlines()
    resumed = rows_by_step(map(json.loads, lines))
    assert list(resumed) == [5, 6, 7, 8]
    for step, row in resumed.items():
        for key, value in recorded[str(step)].items():
            wanted = pytest.approx(value, rel=tolerance * (100 if key == "train/grad_norm" else 1))
            assert row[key] == wanted, (step, key)
    assert (written / "resumed" / "latest").read_text() == "global_step8"
    kept_bf16 = any((written / "resumed" / "global_step8").glob("bf16_zero_*"))
    assert kept_bf16 == (name == BF16)  # under `precision: auto`, whatever the CPU multiplies


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def test_the_checkpoint_and_the_export_are_the_same_model(written: Path) -> None:
    run(written, "tools/convert_to_hf.py", "--input_dir", f"{FP32}/global_step4", "--output_dir", "exported")
    run(written, "tools/convert_from_hf.py", "--input_dir", "hf", "--output_dir", "imported")
    run(written, "tools/convert_to_hf.py", "--input_dir", "imported", "--output_dir", "round_trip", "--no-verify")
    old = tensors(written / "hf")
    for directory in ("exported", "round_trip"):
        new = tensors(written / directory)
        assert set(new) == set(old)
        for name, tensor in old.items():
            assert torch.equal(new[name], tensor), (directory, name)


@pytest.mark.parametrize(("prefix", "ranks"), [("small", 1), ("ranks", 2)])
def test_preprocessing_goes_on_and_ends_with_the_same_bytes(written: Path, prefix: str, ranks: int) -> None:
    for name in ("a", "b") if ranks == 1 else ("a", "b", "c"):  # done: what they held is not read again
        path = written / "documents" / f"{name}.jsonl"
        path.write_bytes(b"x" * (path.stat().st_size - 1) + b"\n")
        os.utime(path, ns=(MODIFIED_NS, MODIFIED_NS))
    for rank in reversed(range(ranks)):
        run(
            written,
            "tools/preprocess_data.py",
            *("--input", "documents/a.jsonl,documents/b.jsonl,documents/c.jsonl", "--append-eod", "--workers", "1"),
            *("--tokenizer-type", "HFTokenizer", "--vocab-file", "tokenizer.json"),
            *("--output-prefix", f"interrupted/{prefix}"),
            RANK=str(rank),
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks),
        )
    for suffix in ("bin", "idx"):
        made = (written / "interrupted" / f"{prefix}_text_document.{suffix}").read_bytes()
        assert made == (written / "data" / f"small_text_document.{suffix}").read_bytes()
    sidecars = [
        json.loads(path.read_text())
        for path in (
            written / "interrupted" / f"{prefix}_text_document.json",
            written / "data" / "small_text_document.json",
        )
    ]
    assert sidecars[0] == sidecars[1]
    left = {path.name for path in (written / "interrupted").glob(f"{prefix}*")}
    assert left == {f"{prefix}_text_document.{suffix}" for suffix in ("bin", "idx", "json")}


def test_generation_goes_on_and_ends_with_the_same_text(written_where_it_was: Path) -> None:
    here = written_where_it_was
    partial = here / "completions.jsonl.partial"
    kept = [json.loads(line)[1] for line in partial.read_text().splitlines()[1:]]
    run(here, "tools/generate.py", "-d", ".", "model.yml", "generation.yml", "--set", f"load={FP32}")
    made, whole = (
        [json.loads(line) for line in (here / name).read_text().splitlines()]
        for name in ("completions.jsonl", "completions.whole.jsonl")
    )
    assert made[: len(kept)] == kept  # their durations too: they were not generated again
    assert [{**row, "duration": 0} for row in made] == [{**row, "duration": 0} for row in whole]
    assert not partial.exists()
