"""The wheel in an environment of its own, far from a checkout: commands, configurations by name, and a training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import neox

ROOT = Path(__file__).parents[2]
TINY = """
num_layers: 2
hidden_size: 32
num_attention_heads: 2
seq_length: 32
max_position_embeddings: 32
pos_emb: rotary
train_micro_batch_size_per_gpu: 1
gradient_accumulation_steps: 1
train_iters: 2
lr_decay_style: constant
data_path: data/mine_text_document
tokenizer_type: HFTokenizer
vocab_file: tokenizer.json
save: checkpoints
log_dir: logs
"""

# Two ranks and two stages, as the shipped file says.
MINE = """
overrides:
  data_path: data/mine_text_document
  vocab_file: tokenizer.json
  save: mine
  load: mine
  log_dir: mine_logs
  train_iters: 3
  lr_decay_iters: 3
  eval_iters: 0
  hidden_size: 64
  seq_length: 32
  max_position_embeddings: 32
"""


def run(command: list[str | Path], folder: Path, expect: int = 0, timeout: float = 500) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NEOX"))}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def build_wheel(folder: Path) -> Path:
    """Make a source distribution of what git tracks, and a wheel of nothing but that."""
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if name.split("/")[0] in ("neox", "tools", "configs", "requirements") or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    make_sdist = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run([sys.executable, "-c", make_sdist], source)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {path.name for path in source.iterdir() if path.suffix in (".md", ".cff")} - names == set()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, archive], folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


INSTALLATION = 3000  # seconds to fetch torch and what else the wheel requires


@pytest.mark.slow
@pytest.mark.timeout(INSTALLATION + 900)
def test_the_wheel_works_far_from_a_checkout(tmp_path: Path) -> None:
    """`make dist` gives the wheel, whose requirements are then installed too; else those of the tests are used."""
    given = os.environ.get("NEOX_WHEEL")
    wheel = Path(given) if given else build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as packed:
        metadata = packed.read(next(name for name in packed.namelist() if name.endswith("/METADATA"))).decode()
    assert "Requires-Dist: torch<2.15,>=2.11" in metadata
    assert "Version: " + neox.__version__ in metadata
    environment = tmp_path / "environment"
    run([sys.executable, "-m", "venv", environment], tmp_path)
    packages = Path(sysconfig.get_paths(vars={"base": str(environment)})["purelib"])
    if given:
        constraints = ["-c", ROOT / "requirements" / "constraints.txt"]
        torch = next(line for line in constraints[1].read_text().splitlines() if line.startswith("torch=="))
        pip = [environment / "bin" / "python", "-m", "pip", "install", "-q"]
        index = os.environ.get("NEOX_TORCH_INDEX")
        run([*pip, torch, *(["--index-url", index] if index else [])], tmp_path, timeout=INSTALLATION)
        run([*pip, wheel, *constraints], tmp_path, timeout=INSTALLATION)
    else:
        (packages / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = environment / "bin" / "python"
    run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--force-reinstall", wheel], tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    assert str(packages) in run([python, "-c", "import neox; print(neox.__file__)"], work)
    bin_folder = environment / "bin"
    assert "preprocess_data" in run([bin_folder / "neox"], work)
    assert "preprocess_data" in run([bin_folder / "neox", "preproces_data"], work, expect=2)
    (work / "mine.jsonl").write_text("".join(json.dumps({"text": f"text {i} " * 40}) + "\n" for i in range(200)))
    tokenizer = ["--vocab-size", "300", "--output", "tokenizer.json"]
    run([bin_folder / "neox", "train_tokenizer", "--input", "mine.jsonl", *tokenizer], work)
    flags = ["--tokenizer-type", "HFTokenizer", "--vocab-file", "tokenizer.json", "--workers", "1"]
    run([bin_folder / "neox", "preprocess_data", "--input", "mine.jsonl", "--output-prefix", "data/mine", *flags], work)
    (work / "tiny.yml").write_text(TINY)
    (work / "mine.yml").write_text(MINE)
    plan = run([bin_folder / "deepy", "train.py", "-d", "configs", "19M.yml", "--dry-run"], work)
    assert "data_path" in plan  # which the shipped file lacks
    run([bin_folder / "deepy", "train.py", "-d", "configs", "quickstart.yml", work / "mine.yml"], work)
    assert (work / "mine" / "latest").read_text().strip() == "global_step3"
    run([bin_folder / "deepy", "train.py", "tiny.yml"], work)
    rows = [json.loads(line) for line in (work / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["kind"] == "step" for row in rows) == 2
    assert (work / "checkpoints" / "latest").read_text().strip() == "global_step2"
