"""Documents to ids from Parquet and from `.jsonl.zst` in turn: the same ids, speed and memory.

    nice -n 15 python benchmarks/input_formats.py --mb 500 --workers 1 --repeats 3

The documents are those of `benchmarks/preprocess.py`, in row groups of `--rows`. Memory is that of the largest process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import pyarrow
from pyarrow import parquet

from benchmarks.preprocess import check_same, make_corpus, ours, timed_command
from neox.corpus import read_documents
from neox.errors import run_script


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mb", type=float, default=500, help="text to measure on, in MB")
    p.add_argument("--vocab-size", type=int, default=50257)
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--repeats", type=int, default=3, help="turns of each format")
    p.add_argument("--rows", type=int, default=1000, help="documents in a row group")
    p.add_argument("--accelerator", default="auto")
    p.add_argument("--dir", type=Path, help="where files go; a temporary directory otherwise")
    p.add_argument("--one", nargs=3, metavar=("INPUT", "VOCAB", "PREFIX"), help=argparse.SUPPRESS)
    return p


def write_parquet(corpus: Path, target: Path, rows: int) -> None:
    """Write the documents of a corpus as a table, compressed by zstd."""
    schema = pyarrow.schema([("text", pyarrow.string())])
    texts: Iterator[str] = (document.text for document in read_documents(corpus))
    with parquet.ParquetWriter(target, schema, compression="zstd") as writer:
        while group := list(islice(texts, rows)):
            writer.write_table(pyarrow.table({"text": group}, schema=schema))


def one_turn(args: argparse.Namespace) -> None:
    """Run the tool once in this process's children, and print its figures."""
    source, vocab, prefix = map(Path, args.one)
    timing = timed_command(source.name, ours(source, vocab, prefix, args.workers, args.accelerator), args.mb)
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(json.dumps({**asdict(timing), "memory_mib": memory}))


def turn(args: argparse.Namespace, source: Path, vocab: Path, prefix: Path) -> dict[str, float]:
    """Run the tool once in processes of its own, and return its figures."""
    command = [sys.executable, __file__, "--one", str(source), str(vocab), str(prefix)]
    command += ["--workers", str(args.workers), "--mb", str(args.mb), "--accelerator", args.accelerator]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Make the files, read them in turn, compare the ids, and print the figures."""
    paths = sysconfig.get_paths()
    roots = [paths["stdlib"], paths["purelib"], "/usr/share", "/usr/include", "/usr/lib"]
    corpus, vocab = make_corpus(folder, args.mb, args.vocab_size, list(map(Path, roots)))
    table = folder / "corpus.parquet"
    write_parquet(corpus, table, args.rows)
    sizes = " and ".join(f"{path.stat().st_size / 1e6:,.0f} MB {path.name}" for path in (corpus, table))
    print(f"{args.mb:,.0f} MB of text, {sizes}, load {os.getloadavg()[0]:.0f}", flush=True)
    turns: dict[Path, list[dict[str, float]]] = {corpus: [], table: []}
    for number in range(args.repeats):
        prefixes = []
        for source, figures in turns.items():
            prefixes.append(folder / f"{source.suffix[1:]}{number}")
            figures.append(turn(args, source, vocab, prefixes[-1]))
            print(f"{source.name:<18} {figures[-1]['seconds']:7.1f} s wall {figures[-1]['cpu_seconds']:7.1f} s CPU")
        check_same(*(Path(f"{prefix}_text_document") for prefix in prefixes))
        for prefix in prefixes:
            for suffix in (".bin", ".idx", ".json"):
                Path(f"{prefix}_text_document{suffix}").unlink()
    print("same bytes from both")
    for name in ("seconds", "cpu_seconds", "memory_mib"):
        plain, rows = (statistics.median(each[name] for each in figures) for figures in turns.values())
        print(f"{name:<12} {plain:8.1f} of .jsonl.zst, {rows:8.1f} of Parquet, ratio {plain / rows:.2f}")
    print(f"load {os.getloadavg()[0]:.0f} at the end")


def main() -> int:
    """Run the benchmark."""
    args = parser().parse_args()
    if args.one:
        one_turn(args)
        return 0
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        measure(args, Path(folder))
    return 0


if __name__ == "__main__":
    run_script(main)
