"""Write the files of this directory with the code of commit ee722dc.

    git worktree add --detach /tmp/old ee722dc
    cd /tmp/old && PYTHONPATH=/tmp/old python .../tests/compatibility/ee722dc/write.py

It ran once; other code is not to write the files again. The text and the tokenizer are those of `../d291652`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = Path.cwd()
WORK = Path("/tmp/neox-compatibility-ee722dc")
STOPS = {"dp2_skipped": 15}
"""Step of the checkpoint of a run; 13 of others, which is before the spike that sends each run back."""
LAYOUTS = {
    "dp2_skipped": ("num_gpus=2", "zero_optimization.stage=0", "ema_device=cpu"),
    "dp2_zero1": ("num_gpus=2", "zero_optimization.stage=1", "check_replicas_every=4"),
    "dp2_zero3": ("num_gpus=2", "zero_optimization.stage=3"),
    "pp2": ("num_gpus=2", "pipe_parallel_size=2", "zero_optimization.stage=0"),
    "mp2_bf16": ("num_gpus=2", "model_parallel_size=2", "zero_optimization.stage=1", "precision=bf16"),
}
WANTED = ("train/lm_loss", "train/grad_norm", "validation/lm_loss", "validation_ema/lm_loss")


def command(script: str, *arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(ROOT / script), *arguments], cwd=WORK, env=environment, check=True)


def train(name: str, model: str, settings: tuple[str, ...], stop: int) -> None:
    """Train to the checkpoint of step `stop`, keep it, and go on: what is logged then is what a resume must give."""
    keys = []
    for setting in (f"save={name}", f"load={name}", f"log_dir=logs/{name}", *settings):
        keys += ["--set", setting]
    command("deepy.py", "train.py", model, *keys, "--set", f"exit_interval={stop}")
    for directory in (WORK / name).glob("global_step*"):
        if directory.name != f"global_step{stop}":
            shutil.rmtree(directory)
    shutil.rmtree(WORK / name / "superseded", ignore_errors=True)
    shutil.copytree(WORK / name, WORK / "kept" / name, ignore=shutil.ignore_patterns(".run.lock", "events*"))
    command("deepy.py", "train.py", model, *keys)
    rows: dict[int, dict[str, float]] = {}
    for line in (WORK / "logs" / name / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["iteration"], {}).update(row)
    found = {
        step: {key: value for key, value in row.items() if key in WANTED or key.startswith("stability/weight_norm")}
        for step, row in rows.items()
        if step > stop
    }
    (WORK / "kept" / f"{name}.numbers.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    WORK.mkdir()
    shutil.copytree(HERE.parent / "d291652" / "data", WORK / "data")
    shutil.copy(HERE.parent / "d291652" / "tokenizer.json", WORK)
    shutil.copy(HERE / "model.yml", WORK)
    for name, settings in LAYOUTS.items():
        if sys.argv[1:] not in ([], [name]):
            continue
        train(name, "model.yml", settings, STOPS.get(name, 13))
    shutil.copytree(WORK / "kept", HERE, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
