# PYTHON_ARGCOMPLETE_OK
"""Run every step once, on this machine: text, tokenizer, tokens, training, export, generation.

Every step is the command a user would type, echoed before it runs. A step whose result is there already is not done
again, so that a call after an interrupted one starts at the step that was interrupted. Paths come from the
configuration: configs/quickstart.yml, or that of the family that --model names.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.config import NeoXConfig
from neox.errors import LaunchError, NeoXError, run_script
from neox.launch.machine import count_accelerators
from neox.metrics import METRICS_FILE, curves
from neox.plan import config_from_files

CONFIGS = {
    "neox": "quickstart.yml",
    "llama": "quickstart_llama.yml",
    "gpt2": "quickstart_gpt2.yml",
    "bert": "bert/tiny.yml",
}
TEXT_CONFIG = "text_generation.yml"
VOCAB_SIZE = 8000
PROMPT = "def main("


def run(*command: str) -> None:
    """Echo and run one command with this interpreter; its failure ends the quickstart with its exit code."""
    print(f"\n$ python {shlex.join(command)}", flush=True)
    child = subprocess.Popen([sys.executable, *command])
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    while True:  # Ctrl-C reaches the command as well: it saves and ends, and is waited for
        try:
            code = child.wait()
            break
        except KeyboardInterrupt:
            continue
    if code != 0:
        interrupted = code < 0 or code >= 128
        again = "run `make quickstart` again" if interrupted else "with that put right, run `make quickstart` again"
        error = LaunchError(f"`python {shlex.join(command)}` ended with exit code {code}; {again} to go on")
        error.exit_code = code if code > 0 else 128 - code
        raise error


def newer(result: Path, *sources: Path) -> bool:
    """Whether `result` exists and is not older than any of `sources`."""
    return result.exists() and all(result.stat().st_mtime >= source.stat().st_mtime for source in sources)


def reuse(result: Path) -> None:
    print(f"\n# {result} is there: used again", flush=True)


def describe_source(text: Path | None) -> dict[str, str]:
    """Name the text this quickstart is made from, so that another text is noticed."""
    if text is None:
        return {"source": f"standard library of Python {sys.version.split()[0]}"}
    if not text.is_file():
        raise NeoXError(f"{text}: no such file; TEXT= takes a .txt, .jsonl or .jsonl.zst")
    return {"source": text.name, "sha256": hashlib.sha256(text.read_bytes()).hexdigest()}


def make_corpus(directory: Path, text: Path | None, runs: Path) -> list[Path]:
    """Write the shards, unless those of the same text are there; refuse to mix two texts in one run."""
    stamp = directory / "source.json"
    source = describe_source(text)
    shards = sorted(directory.glob("quickstart-*.jsonl.zst"))
    if shards and stamp.exists() and json.loads(stamp.read_text()) == source:
        reuse(directory / "quickstart-*.jsonl.zst")
        return shards
    if runs.exists():
        raise NeoXError(f"{runs} was trained on another text; `make clean` starts over, or move that directory away")
    run("tools/quickstart_corpus.py", "--out", str(directory), *(("--text", str(text)) if text else ()))
    stamp.write_text(json.dumps(source))
    return sorted(directory.glob("quickstart-*.jsonl.zst"))


def gpu_settings(accelerators: int) -> list[str]:
    """What the configuration needs on this machine beside its file: one GPU means one rank and one stage."""
    if accelerators == 1:
        print("\n# one GPU: one rank and one pipeline stage instead of two", flush=True)
        return ["--set", "pipe_parallel_size=1", "--set", "num_gpus=1"]
    return []


def finished_checkpoint(save: Path, steps: int) -> Path | None:
    """The newest checkpoint in `save`, where training came to `steps` or was carried on beyond them."""
    found = {int(path.name[11:]): path for path in save.glob("global_step*") if path.name[11:].isdigit()}
    return found[max(found)] if found and max(found) >= steps else None


def summarize(name: str, config: NeoXConfig, checkpoint: Path, hf: Path, seconds: float, settings: list[str]) -> None:
    """Print what happened, where everything lies, and how to go on."""
    log_dir = Path(config.logging.log_dir or "")
    names = ("train/lm_loss", "validation/lm_loss", "runtime/tokens_per_sec", "validation/sentence_accuracy")
    found = curves(log_dir / METRICS_FILE, names)
    losses, validation, tokens, accuracy = (list(found.get(name, {}).values()) for name in names)
    steps = max(found[names[0]])
    held_out = f"{validation[-1]:.3f}" if validation else "none: the text has too few documents to hold one out"
    extra = "".join(f" {word}" for word in settings)
    masked = config.model.objective == "masked_lm"
    auto = "AutoModelForPreTraining" if masked else "AutoModelForCausalLM"
    text = f"\n  more text:\n    .venv/bin/python deepy.py generate.py -d configs {name} {TEXT_CONFIG}{extra}"
    sentences = f"\n  sentences        {accuracy[-1]:.3f} of the pairs are told apart" if accuracy else ""
    print(
        f"""
quickstart finished in {seconds:,.0f} s
  training loss    {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps
  validation loss  {held_out}{sentences}
  speed            {sorted(tokens)[len(tokens) // 2]:,.0f} tokens/s (median)
  data             {Path(config.data.data_path or "").parent}/
  logs, metrics    {log_dir}/ (metrics.jsonl, loss.png)
  checkpoint       {checkpoint}/
  Hugging Face     {hf}/ (transformers: {auto}.from_pretrained("{hf}"))

  train on, from the last checkpoint:
    .venv/bin/python deepy.py train.py -d configs {name} --set train_iters={2 * steps}{extra}{"" if masked else text}
  start over:      make clean && make quickstart
  your own text:   make clean && make quickstart TEXT=my.txt
  a bigger model:  see configs/README.md""",
        flush=True,
    )


def main() -> None:
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--text", type=Path, help="your own .txt, .jsonl or .jsonl.zst instead of Python's sources")
    parser.add_argument("--model", choices=CONFIGS, default="neox", help="family of the model (default: neox)")
    args = parser.parse_args()
    name = CONFIGS[args.model]
    text = args.text.absolute() if args.text else None
    os.chdir(Path(__file__).resolve().parent.parent)
    started = time.monotonic()

    settings = gpu_settings(count_accelerators())
    config = config_from_files([name], conf_dir="configs")
    prefix = Path(config.data.data_path or "")
    tokenizer = Path(config.tokenizer.vocab_file or "")
    save = Path(config.checkpoint.save or "")
    runs = save.parent

    shards = make_corpus(prefix.parent, text, runs)
    masked = config.model.objective == "masked_lm"
    if newer(tokenizer, *shards):
        reuse(tokenizer)
    else:
        run(
            *("tools/train_tokenizer.py", "--input", ",".join(map(str, shards))),
            *("--vocab-size", str(VOCAB_SIZE), "--output", str(tokenizer)),
            *(("--kind", "wordpiece-cased") if masked else ()),
        )
    if newer(prefix.with_name(prefix.name + ".idx"), tokenizer, *shards):
        reuse(prefix.with_name(prefix.name + ".idx"))
    else:
        run(
            *("tools/preprocess_data.py", "--input", ",".join(map(str, shards))),
            *("--output-prefix", str(prefix).rpartition("_text_")[0]),
            "--presplit-sentences" if masked else "--append-eod",
            *("--tokenizer-type", config.tokenizer.tokenizer_type, "--vocab-file", str(tokenizer)),
            *("--dataset-impl", "mmap"),
        )

    steps = config.training.train_iters or 0
    checkpoint = finished_checkpoint(save, steps)
    if checkpoint:
        reuse(checkpoint)
    else:
        run("deepy.py", "train.py", "-d", "configs", name, *settings)
        checkpoint = finished_checkpoint(save, steps)
    if checkpoint is None:
        raise LaunchError(f"training ended before step {steps}; run `make quickstart` again to go on")

    hf = runs / "hf"
    if newer(hf / "config.json", checkpoint):
        reuse(hf)
    else:
        run(
            *("tools/convert_to_hf.py", "--input_dir", str(checkpoint)),
            *("--config_file", f"configs/{name}", "--output_dir", str(hf)),
            *(["--overwrite"] if hf.exists() else []),  # of an earlier checkpoint
        )

    if not masked:
        write_sample(name, runs, settings)
    summarize(name, config, checkpoint, hf, time.monotonic() - started, settings)


def write_sample(name: str, runs: Path, settings: list[str]) -> None:
    """Let the model go on from a prompt."""
    prompts, samples = runs / "prompts.txt", runs / "samples.jsonl"
    prompts.write_text(PROMPT + "\n")
    output = ("-i", str(prompts), "-o", str(samples))
    run("deepy.py", "generate.py", "-d", "configs", name, TEXT_CONFIG, *output, *settings)
    for line in samples.read_text().splitlines():
        print(f"\n{PROMPT}{json.loads(line)['text']}")


if __name__ == "__main__":
    run_script(main)
