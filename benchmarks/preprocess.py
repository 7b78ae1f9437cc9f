"""Documents to ids: gpt-neox's loop and ours in turn on the same text, with the limit of each stage.

    python benchmarks/preprocess.py --mb 200 --workers 2

The text is what the machine has (sources and documentation), each file once: repeated text would flatter code
which remembers words. A share of it trains the vocabulary and is not measured. Efficiency is MB of text per second of
CPU, over all processes of a command, from its start to its end.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import hashlib
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from neox.corpus import BadInput, Document, LineBlock, parse_texts, read_blocks, write_documents
from neox.data import IndexedDatasetBuilder, best_dtype
from neox.errors import NeoXError, run_script
from neox.tokenizer import build_tokenizer, train_tokenizer
from neox.tokenizer.accelerators import make_encoder

ROOT = Path(__file__).resolve().parents[1]
TEXT_SUFFIXES = (
    ".py",
    ".pyi",
    ".h",
    ".hpp",
    ".c",
    ".cpp",
    ".cu",
    ".cuh",
    ".md",
    ".rst",
    ".txt",
    ".html",
    ".js",
    ".pl",
    ".pm",
)
LARGEST_FILE = 2_000_000
PR_SET_CHILD_SUBREAPER = 36
TRAINING_SHARE = 12  # one file in so many trains the vocabulary


@dataclass(frozen=True)
class Timing:
    """One way through the same text. mb_per_cpu_s: text over CPU seconds of all its processes."""

    name: str
    seconds: float
    cpu_seconds: float
    mb_per_cpu_s: float


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mb", type=float, default=200, help="text to measure on, in MB")
    p.add_argument("--workers", type=int, default=2, help="our worker processes")
    p.add_argument("--vocab-size", type=int, default=50257)
    p.add_argument("--roots", nargs="*", help="directories with text (default: Python's, and the system's)")
    p.add_argument("--accelerators", nargs="*", default=["fastokens", "words"], help="ours, each in turn")
    p.add_argument("--skip-peer", action="store_true", help="leave out gpt-neox's loop, which takes minutes")
    p.add_argument("--json", help="write the figures here as well")
    p.add_argument("--peer", nargs=3, metavar=("INPUT", "VOCAB", "PREFIX"), help=argparse.SUPPRESS)
    return p


def machine_texts(roots: Sequence[Path]) -> Iterator[str]:
    """Yield the text files under the roots, each content once, in a stable order."""
    seen = set()
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                if not name.endswith((*TEXT_SUFFIXES, ".gz")) or path.is_symlink():
                    continue
                try:
                    data = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
                    text = data.decode("utf-8")
                except (OSError, EOFError, ValueError):
                    continue
                digest = hashlib.sha256(data).digest()
                if 200 < len(data) < LARGEST_FILE and digest not in seen:
                    seen.add(digest)
                    yield text


def make_corpus(folder: Path, mb: float, vocab_size: int, roots: Sequence[Path]) -> tuple[Path, Path]:
    """Write the text to measure on, and a tokenizer trained on other text."""
    training: list[str] = []

    def measured() -> Iterator[Document]:
        left = mb * 1e6
        for number, text in enumerate(machine_texts(roots)):
            if number % TRAINING_SHARE == 0:
                training.append(text)
                continue
            left -= len(text.encode())
            yield Document(text)
            if left <= 0:
                return
        raise NeoXError(f"the machine's text ends {left / 1e6:.0f} MB early: give more --roots, or a smaller --mb")

    corpus = folder / "corpus.jsonl.zst"
    write_documents(corpus, measured())
    (vocab,) = train_tokenizer(training, vocab_size, folder / "tokenizer.json")
    return corpus, vocab


def peer_loop(corpus: str, vocab: str, prefix: str) -> None:
    """gpt-neox's way: read, `encode` one document, make a list, make an array of it, write."""
    import lm_dataformat

    tokenizer = build_tokenizer("HFTokenizer", vocab)
    with IndexedDatasetBuilder(prefix, best_dtype(tokenizer.vocab_size)) as builder:
        for text in lm_dataformat.Reader(corpus).stream_data():
            if text:
                ids = tokenizer.encode(text)
                ids.append(tokenizer.eod)
                builder.add_document(np.array(ids, dtype=builder.dtype))


def timed_command(name: str, command: Sequence[str], mb: float) -> Timing:
    """Run a command. Its CPU time includes that of all processes it starts."""
    # Workers are children of a server process, which the command does not wait for. Adopt it, and wait for it here.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    seconds = time.monotonic() - started
    with suppress(ChildProcessError):
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Timing(name, seconds, cpu, mb / cpu)


def ours(corpus: Path, vocab: Path, prefix: Path, workers: int, accelerator: str) -> list[str]:
    """The command a user types."""
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(corpus)]
    command += ["--output-prefix", str(prefix), "--tokenizer-type", "HFTokenizer", "--vocab-file", str(vocab)]
    return [*command, "--append-eod", "--workers", str(workers), "--accelerator", accelerator]


def stage_limits(corpus: Path, vocab: Path, folder: Path, accelerator: str) -> list[Timing]:
    """Time each stage alone, in this process, on up to 64 MB of the text."""
    blocks: list[LineBlock] = []
    texts: list[list[str]] = []
    flat: list[tuple[np.ndarray, np.ndarray]] = []
    tokenizer = build_tokenizer("HFTokenizer", str(vocab))
    encoder = make_encoder(tokenizer, accelerator)

    def decompress() -> None:
        for block in read_blocks(str(corpus), block_bytes=1 << 22):
            if not isinstance(block, BadInput):
                blocks.append(block)
            if len(blocks) == 20:
                return

    def parse() -> None:
        texts.extend(parse_texts(block, ["text"])[0][0] for block in blocks)

    def tokenize() -> None:
        flat.extend(encoder.encode_flat(batch) for batch in texts)

    def write() -> None:
        builder = IndexedDatasetBuilder(folder / "limit", best_dtype(tokenizer.vocab_size))
        for ids, lengths in flat:
            builder.add_documents(ids, lengths)
        builder.finalize()

    return [timed_stage(stage, blocks) for stage in (decompress, parse, tokenize, write)]


def timed_stage(stage: Callable[[], None], blocks: Sequence[LineBlock]) -> Timing:
    """Time one stage; its rate is per byte of JSON lines."""
    started, cpu = time.monotonic(), time.process_time()
    stage()
    cpu = time.process_time() - cpu
    mb = sum(len(block.data) for block in blocks) / 1e6
    return Timing(stage.__name__, time.monotonic() - started, cpu, mb / max(cpu, 1e-9))


def check_same(first: Path, second: Path) -> None:
    """Both ways must have written the same bytes."""
    for suffix in ("bin", "idx"):
        digests = {hashlib.sha256(Path(f"{p}.{suffix}").read_bytes()).hexdigest() for p in (first, second)}
        if len(digests) != 1:
            raise NeoXError(f"{first}.{suffix} and {second}.{suffix} differ: the figures mean nothing")


def measure(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Make the text, run every way on it, compare the bytes."""
    default = [
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"],
        "/usr/share",
        "/usr/include",
        "/usr/lib",
    ]
    corpus, vocab = make_corpus(folder, args.mb, args.vocab_size, [Path(root) for root in args.roots or default])
    blocks = [b for b in read_blocks(str(corpus), block_bytes=1 << 22) if not isinstance(b, BadInput)]
    mb = sum(len(text.encode()) for block in blocks for text in parse_texts(block, ["text"])[0][0]) / 1e6
    del blocks
    print(f"{mb:.0f} MB of distinct text, vocabulary {args.vocab_size:,} trained on other text")
    ways, written = [], []
    for accelerator in args.accelerators:
        prefix = folder / accelerator
        ways.append(timed_command(f"ours, {accelerator}", ours(corpus, vocab, prefix, args.workers, accelerator), mb))
        written.append(Path(f"{prefix}_text_document"))
        show(ways[-1])
    if not args.skip_peer:
        peer = [sys.executable, __file__, "--peer", str(corpus), str(vocab), str(folder / "peer")]
        ways.append(timed_command("gpt-neox's loop", peer, mb))
        written.append(folder / "peer")
        show(ways[-1])
    for other in written[1:]:
        check_same(written[0], other)
    limits = {name: stage_limits(corpus, vocab, folder, name) for name in args.accelerators}
    return {"mb": mb, "workers": args.workers, "ways": ways, "limits": limits}


def show(timing: Timing) -> None:
    """Print one line of the table."""
    print(
        f"{timing.name:<24} {timing.seconds:8.1f} s wall {timing.cpu_seconds:8.1f} s CPU "
        f"{timing.mb_per_cpu_s:8.1f} MB per CPU second",
        flush=True,
    )


def main() -> int:
    """Run the benchmark."""
    args = parser().parse_args()
    if args.peer:
        peer_loop(*args.peer)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    ways: list[Timing] = result["ways"]  # type: ignore[assignment]
    if not args.skip_peer:
        print("same bytes from every way")
        for way in ways[:-1]:
            times = way.mb_per_cpu_s / ways[-1].mb_per_cpu_s
            print(f"{way.name}: {times:.1f} times the CPU efficiency of gpt-neox's loop")
    for name, limits in result["limits"].items():  # type: ignore[attr-defined]
        print(
            f"limits with {name}, MB of JSON lines per CPU second: "
            + ", ".join(f"{limit.name} {limit.mb_per_cpu_s:,.0f}" for limit in limits)
        )
    if args.json:
        Path(args.json).write_text(json.dumps(result, default=asdict, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_script(main)
