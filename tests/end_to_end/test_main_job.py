"""Every step on real text, with the commands a user types: from text to a model that is exported and generates."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.distributed.spawn import run_script

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
KEYS = (
    *(f"train_iters={STEPS}", f"lr_decay_iters={2 * STEPS}", "eval_interval=6", "eval_iters=1", "checkpoint_factor=6"),
    *("log_interval=1", "num_layers=2", "hidden_size=64", "attention_config=null"),
    *("train_micro_batch_size_per_gpu=2", "gradient_accumulation_steps=2"),
)
SETTINGS = tuple(word for key in KEYS for word in ("--set", key))

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("main-job")


@pytest.fixture(scope="module")
def command(home: Path) -> Command:
    """Run `python SCRIPT ...` in an empty directory of its own, as from a shell without the environment activated."""

    def run(script: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {"OMP_NUM_THREADS": "1", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        done = run_script(ROOT / script, *arguments, directory=home, timeout=300, **environment)
        assert done.returncode == code, done.stdout[-4000:] + done.stderr[-4000:]
        return done

    return run


@pytest.fixture(scope="module")
def trained(home: Path, command: Command) -> Path:
    """The directory of a training run of STEPS steps from Python's sources."""
    command("tools/quickstart_corpus.py", "--out", "data/quickstart", "--limit", "500000")
    shards = ",".join(sorted(str(p.relative_to(home)) for p in home.glob("data/quickstart/*.jsonl.zst")))
    tokenizer = "data/quickstart/tokenizer.json"
    command("tools/train_tokenizer.py", "--input", shards, "--vocab-size", "600", "--output", tokenizer)
    flags = ["--input", shards, "--output-prefix", "data/quickstart/quickstart", "--append-eod"]
    flags += ["--tokenizer-type", "HFTokenizer", "--vocab", tokenizer, "--dataset-impl", "mmap"]
    command("tools/preprocess_data.py", *flags)
    command("deepy.py", "train.py", "-d", str(ROOT / "configs"), "quickstart.yml", *SETTINGS)
    return home / "runs/quickstart"


def metrics(run: Path) -> dict[int, dict[str, float]]:
    rows: dict[int, dict[str, float]] = {}
    for line in (run / "logs/metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["iteration"], {}).update(row)
    return rows


def test_training_learns_logs_and_saves(trained: Path) -> None:
    rows = metrics(trained)
    assert list(rows) == list(range(1, STEPS + 1))
    assert rows[STEPS]["train/lm_loss"] < rows[1]["train/lm_loss"] - 0.1
    assert {"validation/lm_loss", "validation/lm_loss_ppl"} <= rows[6].keys()
    assert {"train/learning_rate", "runtime/samples_per_sec", "runtime/iteration_time"} <= rows[1].keys()
    assert (trained / "checkpoints/latest").read_text() == f"global_step{STEPS}"
    assert (trained / "checkpoints/global_step6").is_dir()
    assert (trained / "logs/loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_ends_at_once(trained: Path, command: Command) -> None:
    before = (trained / "logs/metrics.jsonl").read_bytes()
    done = command("deepy.py", "train.py", "-d", str(ROOT / "configs"), "quickstart.yml", *SETTINGS)
    assert (trained / "logs/metrics.jsonl").read_bytes() == before
    assert f"{STEPS} steps" in done.stderr
    assert "--set train_iters=N" in done.stderr
    assert "loading checkpoint" not in done.stdout + done.stderr


@pytest.mark.slow
def test_more_steps_go_on_from_the_checkpoint(trained: Path, command: Command) -> None:
    more = ("--set", f"train_iters={STEPS + 2}")
    command("deepy.py", "train.py", "-d", str(ROOT / "configs"), "quickstart.yml", *SETTINGS, *more)
    rows = metrics(trained)
    assert list(rows) == list(range(1, STEPS + 3))
    assert rows[STEPS + 1]["train/lm_loss"] < rows[1]["train/lm_loss"]


def test_export_loads_in_transformers_and_says_how_far_it_is(trained: Path, command: Command) -> None:
    checkpoint = trained / f"checkpoints/global_step{STEPS}"
    config = trained / "logs/config.yml"  # the merged configuration that the run wrote down
    flags = ["--input_dir", str(checkpoint), "--config_file", str(config), "--output_dir", str(trained / "hf")]
    done = command("tools/convert_to_hf.py", *flags)
    assert "logit" in done.stdout + done.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(trained / "hf", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(trained / "hf")
    ids = tokenizer("def main():\n    return 0\n", return_tensors="pt").input_ids
    loss = model(ids, labels=ids).loss.item()
    assert loss < torch.log(torch.tensor(float(model.config.vocab_size))).item()


def test_generation_from_the_training_checkpoint(trained: Path, command: Command) -> None:
    prompts = trained / "prompts.txt"
    prompts.write_text("def main(\nimport\n")
    flags = ["-i", str(prompts), "-o", str(trained / "samples.jsonl")]
    flags += ["--set", "maximum_tokens=8", "--set", "temperature=0"]
    files = ["-d", str(ROOT / "configs"), "quickstart.yml", "text_generation.yml"]
    command("deepy.py", "generate.py", *files, *SETTINGS, *flags)
    rows = [json.loads(line) for line in (trained / "samples.jsonl").read_text().splitlines()]
    assert [row["context"] for row in rows] == ["def main(", "import"]
    assert all(row["length"] >= 1 and row["text"] for row in rows)
