# PYTHON_ARGCOMPLETE_OK
"""Run every step once, on this machine: text, tokenizer, tokens, training, export, generation.

Every step is a command that you could type; it is printed before it runs. A step whose result exists is not run again,
so the next call after an interruption starts where the first one ended. Paths come from the configuration:
configs/quickstart.yml, or the one for --model.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.config import NeoXConfig
from neox.errors import LaunchError, NeoXError, run_script
from neox.launch.hosts.machine import count_accelerators
from neox.launch.status.run_status import SPEED_IS, run_status
from neox.metrics import METRICS_FILE, curves
from neox.plan import config_from_files

CONFIGS = {
    "neox": "quickstart.yml",
    "llama": "quickstart_llama.yml",
    "moe": "quickstart_moe.yml",
    "gpt2": "quickstart_gpt2.yml",
    "bert": "bert/tiny.yml",
}
TEXT_CONFIG = "text_generation.yml"
VOCAB_SIZE = 8000
PROMPT = "def main("
CHECKOUT = Path(__file__).resolve().parent.parent


def located(path: str) -> str:
    """Return a path of the checkout as it is typed in the working directory."""
    if Path.cwd() == CHECKOUT:
        return path
    return str(CHECKOUT / path)


def run(*command: str) -> None:
    """Print and run one script of the checkout. If it fails, the quickstart ends with its exit code."""
    command = (located(command[0]), *command[1:])
    print(f"\n$ python {shlex.join(command)}", flush=True)
    child = subprocess.Popen([sys.executable, *command])
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    code = None
    while code is None:
        with suppress(KeyboardInterrupt):  # Ctrl-C reaches the command as well, which saves and ends
            code = child.wait()
    if code == 0:
        return
    again = "correct that, and run `make quickstart` again to go on"
    if code < 0 or code >= 128:  # it was interrupted
        again = "run `make quickstart` again to go on"
    error = LaunchError(f"`python {shlex.join(command)}` ended with exit code {code}; {again}")
    error.exit_code = code if code > 0 else 128 - code
    raise error


def newer(result: Path, *sources: Path) -> bool:
    """Return whether `result` exists and is not older than any of `sources`."""
    return result.exists() and all(result.stat().st_mtime >= source.stat().st_mtime for source in sources)


def reuse(result: Path) -> None:
    print(f"\n# {result} is there: used again", flush=True)


def describe_source(text: Path | None) -> dict[str, str]:
    """Describe the text, so that the next call notices another one."""
    if text is None:
        return {"source": f"standard library of Python {sys.version.split()[0]}"}
    if not text.is_file():
        raise NeoXError(f"{text}: no such file; TEXT= takes a .txt, .jsonl or .jsonl.zst")
    return {"source": text.name, "sha256": hashlib.sha256(text.read_bytes()).hexdigest()}


def make_corpus(directory: Path, text: Path | None, runs: Path) -> list[Path]:
    """Write the shards, unless those of the same text exist. Raises NeoXError if runs were made from another text."""
    stamp = directory / "source.json"
    source = describe_source(text)
    shards = sorted(directory.glob("quickstart-*.jsonl.zst"))
    if shards and stamp.exists() and json.loads(stamp.read_text()) == source:
        reuse(directory / "quickstart-*.jsonl.zst")
        return shards
    if runs.exists():
        raise NeoXError(f"{runs} was trained on another text; `make clean` starts over, or move that directory away")
    command = ["tools/quickstart_corpus.py", "--out", str(directory)]
    if text is not None:
        command += ["--text", str(text)]
    run(*command)
    stamp.write_text(json.dumps(source))
    return sorted(directory.glob("quickstart-*.jsonl.zst"))


def gpu_settings(accelerators: int) -> list[str]:
    """Return the settings that this machine needs: with one GPU, one rank and one pipeline stage."""
    if accelerators == 1:
        print("\n# one GPU: one rank and one pipeline stage instead of two", flush=True)
        return ["--set", "pipe_parallel_size=1", "--set", "num_gpus=1"]
    return []


def finished_checkpoint(save: Path, steps: int) -> Path | None:
    """Return the newest checkpoint in `save` if it has at least `steps` steps."""
    newest = -1
    for path in save.glob("global_step*"):
        number = path.name.removeprefix("global_step")
        if number.isdigit():
            newest = max(newest, int(number))
    if newest < steps:
        return None
    return save / f"global_step{newest}"


@dataclass(frozen=True)
class Figures:
    """Figures of a run.

    Attributes:
        steps: Number of steps.
        losses: Training loss of each step.
        validation: Last validation loss; None if the text has too few documents to hold one out.
        speed: Tokens per second, as the status of the run has it.
        accuracy: Share of the sentence pairs that BERT tells apart; None for other models.
    """

    steps: int
    losses: list[float]
    validation: float | None
    speed: float
    accuracy: float | None


def read_figures(directory: Path) -> Figures:
    """Read the figures of a run directory."""
    names = ("train/lm_loss", "validation/lm_loss", "validation/sentence_accuracy")
    found = curves(directory / METRICS_FILE, names)
    losses, validation, accuracy = (found.get(name, {}) for name in names)
    return Figures(
        steps=max(losses),
        losses=list(losses.values()),
        validation=last(validation),
        speed=run_status(directory)["tokens_per_second"],
        accuracy=last(accuracy),
    )


def last(curve: dict[int, float]) -> float | None:
    """Return the last value of a curve; None if it has none."""
    return curve[max(curve)] if curve else None


def summarize(name: str, config: NeoXConfig, checkpoint: Path, hf: Path, seconds: float, settings: list[str]) -> None:
    """Print what happened, where the results are, and how to go on."""
    log_dir = Path(config.logging.log_dir or "")
    data = Path(config.data.data_path or "").parent
    figures = read_figures(log_dir)
    validation = "none: the text has too few documents to hold one out"
    if figures.validation is not None:
        validation = f"{figures.validation:.3f}"
    sentences = ""
    if figures.accuracy is not None:
        sentences = f"\n  sentences        {figures.accuracy:.3f} of the pairs are told apart"
    extra = "".join(f" {word}" for word in settings)
    auto = "AutoModelForCausalLM"
    deepy = ".venv/bin/python deepy.py"
    configs = "configs"
    again = """make clean && make quickstart (`make clean` removes what the quickstart made, and nothing else)
  your own text:   make clean && make quickstart TEXT=my.txt"""
    if Path.cwd() != CHECKOUT:  # `make quickstart VENV= DIR=`, on a checkout that cannot be written to
        deepy = f"cd {shlex.quote(str(Path.cwd()))}; {shlex.join([sys.executable, located('deepy.py')])}"
        configs = shlex.quote(located("configs"))
        again = f"remove {data} and {log_dir.parent} there, then the same command (TEXT=my.txt for your own text)"
    text = f"\n  more text:\n    {deepy} generate.py -d {configs} {name} {TEXT_CONFIG}{extra}"
    if config.model.objective == "masked_lm":
        auto = "AutoModelForPreTraining"
        text = ""
    print(
        f"""
quickstart finished in {seconds:,.0f} s
  training loss    {figures.losses[0]:.3f} -> {figures.losses[-1]:.3f} in {figures.steps} steps
  validation loss  {validation}{sentences}
  speed            {figures.speed:,.0f} tokens/s ({SPEED_IS})
  data             {data}/
  logs, metrics    {log_dir}/ (metrics.jsonl, loss.png)
  checkpoint       {checkpoint}/
  Hugging Face     {hf}/ (transformers: {auto}.from_pretrained("{hf}"))

  train on, from the last checkpoint:
    {deepy} train.py -d {configs} {name} --set train_iters={2 * figures.steps}{extra}{text}
  start over:      {again}
  a bigger model:  see configs/README.md""",
        flush=True,
    )


def main() -> None:
    parser = ScriptParser(description=__doc__)
    parser.add_argument("--text", type=Path, help="your own .txt, .jsonl or .jsonl.zst instead of Python's sources")
    parser.add_argument(
        "--directory", type=Path, default=CHECKOUT, help="where data/ and runs/ go (default: the checkout)"
    )
    parser.add_argument("--model", choices=CONFIGS, default="neox", help="family of the model (default: neox)")
    args = parser.parse_args()
    name = CONFIGS[args.model]
    text = args.text.absolute() if args.text else None
    try:
        args.directory.mkdir(parents=True, exist_ok=True)
        os.chdir(args.directory)
    except OSError as error:
        raise NeoXError(
            f"{args.directory}: {error.strerror}; --directory (`make quickstart DIR=`) names another"
        ) from None
    if not os.access(".", os.W_OK):
        raise NeoXError(
            f"{Path.cwd()} cannot be written to; `make quickstart DIR=/path/to/results` uses another directory"
        )
    started = time.monotonic()

    settings = gpu_settings(count_accelerators())
    config = config_from_files([name], conf_dir=located("configs"))
    runs = Path(config.checkpoint.save or "").parent
    shards = make_corpus(Path(config.data.data_path or "").parent, text, runs)
    make_tokens(config, shards)
    checkpoint = train(name, config, settings)
    hf = export(name, checkpoint, runs / "hf")
    if config.model.objective != "masked_lm":
        write_sample(name, runs, settings)
    summarize(name, config, checkpoint, hf, time.monotonic() - started, settings)


def make_tokens(config: NeoXConfig, shards: list[Path]) -> None:
    """Train the tokenizer, and encode the shards."""
    prefix = Path(config.data.data_path or "")
    index = prefix.with_name(f"{prefix.name}.idx")
    tokenizer = Path(config.tokenizer.vocab_file or "")
    inputs = ",".join(map(str, shards))
    kind = []
    form = "--append-eod"
    if config.model.objective == "masked_lm":
        kind = ["--kind", "wordpiece-cased"]
        form = "--presplit-sentences"
    if newer(tokenizer, *shards):
        reuse(tokenizer)
    else:
        size = ("--vocab-size", str(VOCAB_SIZE))
        run("tools/train_tokenizer.py", "--input", inputs, *size, "--output", str(tokenizer), "--overwrite", *kind)
    if newer(index, tokenizer, *shards):
        reuse(index)
        return
    run(
        *("tools/preprocess_data.py", "--input", inputs),
        *("--output-prefix", str(prefix).rpartition("_text_")[0], form),
        *("--tokenizer-type", config.tokenizer.tokenizer_type, "--vocab-file", str(tokenizer)),
        *("--dataset-impl", "mmap"),
        *(("--restart",) if index.exists() else ()),  # data of an earlier tokenizer
    )


def train(name: str, config: NeoXConfig, settings: list[str]) -> Path:
    """Train the model, unless it is trained, and return its checkpoint."""
    save = Path(config.checkpoint.save or "")
    steps = config.training.train_iters or 0
    checkpoint = finished_checkpoint(save, steps)
    if checkpoint is not None:
        reuse(checkpoint)
        return checkpoint
    run("deepy.py", "train.py", "-d", located("configs"), name, *settings)
    checkpoint = finished_checkpoint(save, steps)
    if checkpoint is None:
        raise LaunchError(f"training ended before step {steps}; run `make quickstart` again to go on")
    return checkpoint


def export(name: str, checkpoint: Path, hf: Path) -> Path:
    """Export a checkpoint, unless the export is newer, and return its directory."""
    if newer(hf / "config.json", checkpoint):
        reuse(hf)
        return hf
    command = ["tools/convert_to_hf.py", "--input_dir", str(checkpoint)]
    command += ["--config_file", located(f"configs/{name}"), "--output_dir", str(hf)]
    if hf.exists():  # made from an earlier checkpoint
        command.append("--overwrite")
    run(*command)
    return hf


def write_sample(name: str, runs: Path, settings: list[str]) -> None:
    """Let the model continue a prompt."""
    prompts = runs / "prompts.txt"
    samples = runs / "samples.jsonl"
    prompts.write_text(PROMPT + "\n")
    output = ("-i", str(prompts), "-o", str(samples))
    run("deepy.py", "generate.py", "-d", located("configs"), name, TEXT_CONFIG, *output, *settings)
    for line in samples.read_text().splitlines():
        print(f"\n{PROMPT}{json.loads(line)['text']}")


if __name__ == "__main__":
    run_script(main)
