"""Index maps and samples: ours, and gpt-neox's way of doing the same, in turn, in one run, on the same data.

gpt-neox's way is written here in our own few lines, step for step: maps from `np.mgrid`, a compiled loop over documents
and shuffles of narrow integers; samples one document slice at a time, joined, and collated by torch's DataLoader. Both
sides use one thread; times are CPU seconds; results are compared before a figure is printed. Needs a C compiler (`cc`).

    python benchmarks/data.py [--documents 10000000] [--tokens 100000000] [--repeat 3]
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from neox.data import GPTDataset, IndexedDataset, IndexedDatasetBuilder
from neox.data.batches import BatchIterator
from neox.data.samples.index_maps import build_index_maps

SEED = 1234
BATCH = 8
SAMPLE_LOOP = """
#include <stdint.h>
void sample_map(const int32_t *sizes, const int32_t *documents, int32_t seq_length, int64_t samples, int32_t *out) {
    int64_t at = 0;
    int32_t offset = 0;
    out[0] = out[1] = 0;
    for (int64_t sample = 1; sample <= samples; sample++) {
        int32_t left = seq_length + 1;
        while (left) {
            int32_t length = sizes[documents[at]] - offset;
            left -= length;
            if (left <= 0) { offset += left + length - 1; left = 0; } else { at++; offset = 0; }
        }
        out[2 * sample] = (int32_t)at;
        out[2 * sample + 1] = offset;
    }
}
"""


def compiled_loop(directory: Path) -> ctypes.CDLL:
    """Compile the loop over documents as gpt-neox compiles its own (-O3)."""
    source, library = directory / "loop.c", directory / "loop.so"
    source.write_text(SAMPLE_LOOP)
    subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


def neox_maps(loop: ctypes.CDLL, sizes: np.ndarray, epochs: int, seq_length: int) -> tuple[np.ndarray, ...]:
    """The three maps in gpt-neox's steps."""
    documents = np.arange(len(sizes), dtype=np.int32)
    random = np.random.RandomState(seed=SEED)
    tokens = np.sum(sizes[documents])
    order = np.mgrid[0:epochs, 0 : len(documents)][1]
    order[:] = documents
    order = order.reshape(-1).astype(np.int32)
    random.shuffle(order)
    samples = int((epochs * tokens - 1) // seq_length)
    sample_map = np.empty((samples + 1, 2), dtype=np.int32)
    pointer = lambda array: array.ctypes.data_as(ctypes.c_void_p)  # noqa: E731
    loop.sample_map(pointer(sizes), pointer(order), seq_length, ctypes.c_int64(samples), pointer(sample_map))
    shuffled = np.arange(samples, dtype=np.uint32)
    random.shuffle(shuffled)
    return order, sample_map, shuffled


class NeoXDataset(Dataset):
    """Samples in gpt-neox's steps: a buffer view for each document, joined, then converted; maps loaded from disk."""

    def __init__(self, prefix: str, maps: tuple[np.ndarray, ...]) -> None:
        for name, array in zip(("order", "sample_map", "shuffled"), maps, strict=True):
            np.save(f"{prefix}.{name}.npy", array)
            setattr(self, name, np.load(f"{prefix}.{name}.npy", mmap_mode="r"))
        self.index = IndexedDataset(prefix)
        self.buffer = memoryview(np.memmap(f"{prefix}.bin", mode="r", order="C"))
        self.pointers = self.index.starts(np.arange(len(self.index))) * self.index.dtype.itemsize
        self.sizes = self.index.sizes
        self.place = lru_cache(maxsize=8)(lambda document: (self.pointers[document], self.sizes[document]))

    def get(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        pointer, size = self.place(document)
        if length is None:
            length = size - offset
        pointer += offset * np.dtype(self.index.dtype).itemsize
        return np.frombuffer(self.buffer, dtype=self.index.dtype, count=length, offset=pointer)

    def __len__(self) -> int:
        return len(self.shuffled) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = self.shuffled[index]
        first, last = self.sample_map[index][0], self.sample_map[index + 1][0]
        offset, end = self.sample_map[index][1], self.sample_map[index + 1][1]
        if first == last:
            sample = self.get(self.order[first], offset=offset, length=end - offset + 1)
        else:
            parts = [self.get(self.order[first], offset=offset)]
            for i in range(first + 1, last):
                parts.append(self.get(self.order[i]))
            parts.append(self.get(self.order[last], length=end + 1))
            sample = np.concatenate(parts)
        return {"text": np.array(sample, dtype=np.int64)}


def neox_batches(dataset: NeoXDataset, batches: int, batch_size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Read batches through torch's DataLoader in this process, and split them as gpt-neox's get_batch does."""
    numbers = [list(range(i * batch_size, (i + 1) * batch_size)) for i in range(batches)]
    for data in DataLoader(dataset, batch_sampler=numbers, num_workers=0):
        text = data["text"].long()
        labels, tokens = text[:, 1:].contiguous(), text[:, :-1].contiguous()
        yield tokens, labels, torch.ones(tokens.size(), dtype=torch.float)


def our_batches(dataset: GPTDataset, batches: int, batch_size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same batches from our iterator, without reading ahead."""
    iterator = BatchIterator(dataset, batch_size, num_workers=0)
    for _ in range(batches):
        yield tuple(next(iterator).values())


def best_of(repeat: int, *ways: Callable[[], Any]) -> tuple[list[float], list[Any]]:
    """Run the ways in turn, `repeat` times, and keep each one's shortest CPU time in seconds and its last result."""
    seconds, results = [float("inf")] * len(ways), [None] * len(ways)
    for _ in range(repeat):
        for i, way in enumerate(ways):
            started = time.process_time()
            results[i] = way()
            seconds[i] = min(seconds[i], time.process_time() - started)
    return seconds, results


def measure_maps(loop: ctypes.CDLL, documents: int, seq_length: int, repeat: int) -> None:
    """Time both ways of building the maps of one epoch."""
    sizes = lengths(documents)
    samples = int((sizes.sum(dtype=np.int64) - 1) // seq_length)
    arguments = {"num_samples": samples, "seq_length": seq_length, "seed": SEED}
    (theirs, ours), (expected, maps) = best_of(
        repeat,
        lambda: neox_maps(loop, sizes, 1, seq_length),
        lambda: build_index_maps(sizes, range(documents), **arguments),
    )
    for a, b in zip(expected, (maps.document_map, maps.sample_map, maps.shuffle_map), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    print(f"index maps, {documents:,} documents, {samples:,} samples, equal arrays:")
    print(f"  gpt-neox's way {theirs:.2f} s, ours {ours:.2f} s: {theirs / ours:.2f} times as fast")


def measure_samples(loop: ctypes.CDLL, directory: Path, tokens: int, seq_length: int, repeat: int) -> None:
    """Time both ways of reading batches of eight samples from the page cache."""
    prefix = str(directory / "data")
    sizes = lengths(tokens // 700)
    ids = np.random.default_rng(0).integers(0, 50_000, int(sizes.sum()), dtype=np.uint16)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(ids, sizes)
    samples = (len(ids) - 1) // seq_length
    dataset = GPTDataset(IndexedDataset(prefix), range(len(sizes)), samples, seq_length, SEED, directory / "maps")
    peer = NeoXDataset(prefix, neox_maps(loop, sizes, 1, seq_length))
    batches = min(len(dataset), 16_000) // BATCH
    for found, expected in zip(our_batches(dataset, 50, BATCH), neox_batches(peer, 50, BATCH), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    (theirs, ours), _ = best_of(
        repeat,
        lambda: deque(neox_batches(peer, batches, BATCH), maxlen=0),
        lambda: deque(our_batches(dataset, batches, BATCH), maxlen=0),
    )
    read = batches * BATCH * seq_length / 1e6
    print(f"samples of {seq_length} tokens, {len(sizes):,} documents, {sizes.mean():.0f} tokens each, equal batches:")
    print(
        f"  gpt-neox's way {read / theirs:.0f} M tokens/s, ours {read / ours:.0f} M tokens/s: "
        f"{theirs / ours:.2f} times as fast"
    )


def lengths(documents: int) -> np.ndarray:
    """Document lengths like those of web text: log-normal, about 700 tokens on average, at least 1."""
    sizes = np.random.default_rng(1).lognormal(5.9, 1.15, documents).astype(np.int32)
    return np.maximum(sizes, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000, help="for the index maps")
    parser.add_argument("--tokens", type=int, default=100_000_000, help="of the data that samples are read from")
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3, help="each way runs this often; its shortest time counts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        loop = compiled_loop(Path(name))
        measure_maps(loop, arguments.documents, arguments.seq_length, arguments.repeat)
        measure_samples(loop, Path(name), arguments.tokens, arguments.seq_length, arguments.repeat)


if __name__ == "__main__":
    main()
