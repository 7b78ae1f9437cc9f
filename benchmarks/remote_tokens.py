"""Batches from token files in object storage through the cache of blocks, after the first pass, and from local files.

    python benchmarks/remote_tokens.py --tokens 20000000 --turns 10

Both read the same shuffled samples in turn, as the loader does: batches of eight samples of 2048 tokens. The server
(moto) is in this process and only serves the first pass. Times are those of the processor, which other work moves less.
Prints the time of the first pass, the rates of both ways (medians of turns), and their ratio with its range.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from benchmarks.data import BATCH, SEED, lengths, our_batches
from neox.data import IndexedDataset, IndexedDatasetBuilder
from neox.data.samples.gpt_dataset import GPTDataset
from neox.preflight.remote_data import prepare_blocks
from tests.unit.corpus.s3_server import s3_server

SEQ_LENGTH = 2048


def read_all(dataset: GPTDataset) -> float:
    """Read every batch once, and return the seconds of the processor."""
    started = time.process_time()
    for _ in our_batches(dataset, len(dataset) // BATCH, BATCH):
        pass
    return time.process_time() - started


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--turns", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = lengths(arguments.tokens // 700)
    ids = np.random.default_rng(0).integers(0, 50_000, int(sizes.sum()), dtype=np.uint16)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch, s3_server(patch):
        local = Path(name, "t")
        with IndexedDatasetBuilder(str(local), np.dtype(np.uint16)) as builder:
            builder.add_documents(ids, sizes)
        for suffix in (".bin", ".idx"):
            fsspec.filesystem("s3").put_file(f"{local}{suffix}", f"bucket/t{suffix}")
        limit = local.with_suffix(".bin").stat().st_size
        remote = prepare_blocks("s3://bucket/t", Path(name, "cache"), Path(name, "blocks"), limit)
        ways = []
        for prefix in (local, remote):
            samples = (len(ids) - 1) // SEQ_LENGTH
            ways.append(GPTDataset(IndexedDataset(prefix), range(len(sizes)), samples, SEQ_LENGTH, SEED, None))
        of_local, of_remote = ways
        first = read_all(of_remote)
        seconds: list[tuple[float, float]] = []
        for turn in range(arguments.turns):
            if turn % 2:
                again = read_all(of_remote)
                seconds.append((read_all(of_local), again))
            else:
                once = read_all(of_local)
                seconds.append((once, read_all(of_remote)))
    millions = len(of_local) // BATCH * BATCH * SEQ_LENGTH / 1e6
    ratios = [of_one[0] / of_one[1] for of_one in seconds]
    sums = [statistics.median(side) for side in zip(*seconds, strict=True)]
    print(f"{limit / 1e6:,.0f} MB in blocks; first pass {first:.1f} s; load {os.getloadavg()[0]:.0f}")
    print(f"local {millions / sums[0]:.0f} M tokens/s, blocks {millions / sums[1]:.0f} M tokens/s (medians of turns)")
    print(f"ratio {sums[0] / sums[1]:.3f}; of single turns {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
