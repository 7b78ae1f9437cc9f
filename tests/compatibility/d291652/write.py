"""Write the files of this directory with the code of commit d291652.

    git worktree add --detach /tmp/old d291652
    cd /tmp/old && PYTHONPATH=/tmp/old python .../tests/compatibility/d291652/write.py

Everything is made in WORK, because an interrupted generation is known by the absolute path and modification time of
its checkpoint, and is then copied beside this script. It ran once; other code is not to write the files again.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from neox.corpus import read_documents

HERE = Path(__file__).resolve().parent
ROOT = Path.cwd()
WORK = Path("/tmp/neox-compatibility-d291652")
MODIFIED_NS = 1_700_000_000_000_000_000
PARTS = {"a": (0, 20), "b": (20, 120), "c": (120, 180)}
PREPROCESS = [
    *("--input", "documents/a.jsonl,documents/b.jsonl,documents/c.jsonl", "--append-eod", "--workers", "1"),
    *("--tokenizer-type", "HFTokenizer", "--vocab-file", "tokenizer.json", "--output-prefix"),
]
MODEL = ["-d", ".", "model.yml"]
GENERATE = [*MODEL, "generation.yml", "--set", "load=fp32_pp2_mp2_zero1"]


def command(script: str, *arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(ROOT / script), *arguments], cwd=WORK, env=environment, check=True)


def run_tool(script: str, *arguments: str) -> None:
    """Run a tool in this process, where it can be interrupted at a chosen call."""
    sys.argv = [script, *arguments]
    runpy.run_path(str(ROOT / script), run_name="__main__")


def interrupted(script: str, arguments: list[str], owner: type | object, name: str, at: int) -> None:
    """Run a tool in a child process that is interrupted when `owner.name` is called for the `at`-th time."""
    if (child := os.fork()) == 0:
        original, calls = getattr(owner, name), iter(range(1, 1000))

        def counted(*args, **kwargs):
            if next(calls) == at:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        setattr(owner, name, counted)
        os.chdir(WORK)
        try:
            run_tool(script, *arguments)
        except BaseException as error:
            print(f"interrupted: {error!r}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)


def write_data() -> None:
    texts = [d.text for d in read_documents(ROOT / "tests/golden/data/small.jsonl.zst") if len(d.text) < 2000]
    (WORK / "documents").mkdir()
    for name, (start, end) in PARTS.items():
        path = WORK / "documents" / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[start:end]))
        os.utime(path, ns=(MODIFIED_NS, MODIFIED_NS))
    command("tools/train_tokenizer.py", "--input", "documents", "--vocab-size", "320", "--output", "tokenizer.json")
    command("tools/preprocess_data.py", *PREPROCESS, "data/small")

    from neox.data import IndexedDatasetBuilder

    interrupted(
        "tools/preprocess_data.py", [*PREPROCESS, "interrupted/small"], IndexedDatasetBuilder, "add_documents", 3
    )
    # Two ranks have made their parts; the first one is interrupted before it joins them.
    import neox.preprocess.parts as parts

    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", RANK="0")
    interrupted("tools/preprocess_data.py", [*PREPROCESS, "interrupted/ranks"], parts, "_wait_for", 1)
    os.environ.update(RANK="1")
    command("tools/preprocess_data.py", *PREPROCESS, "interrupted/ranks")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]


def train(name: str, *settings: str) -> None:
    """Train to the checkpoint of step 4, keep it, and go on to step 8: its losses are what a resume must give."""
    keys = ["--set", f"save={name}", "--set", f"load={name}", "--set", f"log_dir=logs/{name}"]
    for setting in settings:
        keys += ["--set", setting]
    command("deepy.py", "train.py", *MODEL, *keys, "--set", "exit_interval=4")
    shutil.copytree(WORK / name, WORK / "kept" / name)
    shutil.rmtree(WORK / name)
    command("deepy.py", "train.py", *MODEL, *keys)
    rows: dict[int, dict[str, float]] = {}
    for line in (WORK / "logs" / name / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["iteration"], {}).update(row)
    wanted = ("train/lm_loss", "train/grad_norm", "train/learning_rate", "validation/lm_loss")
    losses = {step: {key: row[key] for key in wanted if key in row} for step, row in rows.items()}
    (WORK / "kept" / f"{name}.losses.json").write_text(json.dumps(losses, indent=1) + "\n")
    shutil.rmtree(WORK / name)
    shutil.copytree(WORK / "kept" / name, WORK / name)


def write_generation() -> None:
    checkpoint = WORK / "fp32_pp2_mp2_zero1" / "global_step4"
    os.utime(checkpoint, ns=(MODIFIED_NS, MODIFIED_NS))
    command("tools/generate.py", *GENERATE)
    (WORK / "completions.jsonl").rename(WORK / "completions.whole.jsonl")

    import neox.generation.job as job

    interrupted("tools/generate.py", GENERATE, job, "generate", 2)


def main() -> None:
    WORK.mkdir()
    for name in ("model.yml", "generation.yml", "prompts.txt"):
        shutil.copy(HERE / name, WORK)
    write_data()
    train("fp32_pp2_mp2_zero1")
    train("bf16_dp2_zero1", "pipe_parallel_size=1", "model_parallel_size=1", "num_gpus=2", "precision=bf16")
    command(
        *("tools/convert_to_hf.py", "--input_dir", "fp32_pp2_mp2_zero1/global_step4", "--config_file", "model.yml"),
        *("--output_dir", "hf"),
    )
    write_generation()
    for name in ("documents", "tokenizer.json", "data", "interrupted", "hf", "completions.whole.jsonl"):
        copy = shutil.copytree if (WORK / name).is_dir() else shutil.copy
        copy(WORK / name, HERE / name)
    shutil.rmtree(HERE / "data" / "index_maps")
    shutil.copy(WORK / "completions.jsonl.partial", HERE)
    shutil.copytree(WORK / "kept", HERE, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".run.lock"))


if __name__ == "__main__":
    main()
