"""Dividing documents into train, validation and test sets of their own, with a way back to where each came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
import zstandard

from neox.corpus import BadInput, SkipBudget, expand_inputs, read_blocks
from neox.data.builder import IndexedDatasetBuilder
from neox.data.indexed_dataset import IndexedDataset
from neox.data.sidecar import read_sidecar, write_sidecar
from neox.data.verify import pieces
from neox.data.weights import split_documents, split_shares
from neox.errors import DataError
from neox.files import atomic_write
from neox.log import progress

PARTS = ("train", "valid", "test")
_BLOCK_BYTES = 1 << 20
_DRAWS = 4096


def divide_dataset(prefix: str | Path, output_prefix: str | Path, split: str, seed: int) -> dict[str, int]:
    """Divide a dataset into OUTPUT_train, OUTPUT_valid, OUTPUT_test; return the documents of each.

    Which documents go where is drawn with `seed`, in exactly the numbers `split` gives; they keep their order inside a
    part.
    OUTPUT_train.tsv says for each document, one a line, the prefix and the number in it of the document it was.
    """
    data, sidecar = IndexedDataset(prefix), read_sidecar(prefix)
    if data.num_documents != len(data):
        raise DataError(f"{prefix} has several sequences in a document; only one-sequence documents can be divided")
    part_of = np.empty(len(data), dtype=np.int8)
    order = np.random.default_rng(seed).permutation(len(data))
    for number, part in enumerate(split_documents(split, len(data))):
        part_of[order[part.start : part.stop]] = number
    outputs = [f"{output_prefix}_{name}" for name in PARTS]
    _refuse_existing([f"{output}.idx" for output in outputs])
    with ExitStack() as stack:
        builders = [stack.enter_context(IndexedDatasetBuilder(out, data.dtype, impl=data.layout)) for out in outputs]
        maps = [stack.enter_context(atomic_write(Path(f"{output}.tsv"))) for output in outputs]
        bar = stack.enter_context(progress(f"split {prefix}", data.num_tokens, "tokens"))
        for first, sizes, tokens in pieces(data):
            for number, (builder, lines) in enumerate(zip(builders, maps, strict=True)):
                chosen = part_of[first : first + len(sizes)] == number
                builder.add_documents(tokens[np.repeat(chosen, sizes)], sizes[chosen])
                lines.write("".join(f"{prefix}\t{first + i}\n" for i in np.flatnonzero(chosen)).encode())
            bar.update(len(tokens))
    for name, output, builder in zip(PARTS, outputs, builders, strict=True):
        if sidecar is not None:
            settings = {**sidecar.settings, "split": split, "split_seed": seed, "part": name}
            write_sidecar(output, replace(sidecar, settings=settings, **builder.progress))
    return {name: builder.num_documents for name, builder in zip(PARTS, builders, strict=True)}


def divide_lines(
    inputs: Sequence[str | Path], output_prefix: str | Path, split: str, seed: int, *, skip_bad: int = 0
) -> dict[str, int]:
    """Divide documents before tokenizing into OUTPUT_{train,valid,test}.jsonl.zst; return the documents of each.

    Reads everything preprocessing reads, once, in little memory, so the shares of `split` hold on average: each
    document's part is drawn with `seed`. Lines are passed on as they are; blank ones are left out.
    OUTPUT_train.tsv says for each line of OUTPUT_train.jsonl.zst which file it came from, and its line there, from 1.
    """
    bounds = np.cumsum(split_shares(split))[:-1]
    draws = _drawn(bounds, seed)
    budget, counts = SkipBudget(skip_bad), [0] * len(PARTS)
    names = [f"{output_prefix}_{name}" for name in PARTS]
    _refuse_existing([f"{name}.jsonl.zst" for name in names])
    with ExitStack() as stack:
        outputs = [stack.enter_context(_compressed(Path(f"{name}.jsonl.zst"))) for name in names]
        maps = [stack.enter_context(atomic_write(Path(f"{name}.tsv"))) for name in names]
        bar = stack.enter_context(progress("split", None, "B"))
        for file, number, line in _lines(inputs, budget, bar.update):
            part = next(draws)
            outputs[part].write(line + b"\n")
            maps[part].write(f"{file}\t{number}\n".encode())
            counts[part] += 1
    return dict(zip(PARTS, counts, strict=True))


def _lines(
    inputs: Sequence[str | Path], budget: SkipBudget, consumed: Callable[[int], object]
) -> Iterator[tuple[str, int, bytes]]:
    """Every line that is not blank: file, number, bytes."""
    for file in expand_inputs(inputs):
        for block in read_blocks(file, block_bytes=_BLOCK_BYTES, consumed=consumed):
            if isinstance(block, BadInput):
                budget.add(block)
                continue
            for number, line in enumerate(block.data.split(b"\n"), start=block.start.line):
                if line and not line.isspace():
                    yield file, number, line


def _drawn(bounds: np.ndarray, seed: int) -> Iterator[int]:
    """An endless sequence of part numbers; `bounds` are the cumulated shares of all parts but the last."""
    random = np.random.default_rng(seed)
    while True:
        yield from np.searchsorted(bounds, random.random(_DRAWS), side="right").tolist()


def _refuse_existing(paths: Sequence[str]) -> None:
    existing = [path for path in paths if Path(path).exists()]
    if existing:
        raise DataError(f"{', '.join(existing)} would be overwritten; remove it, or choose another output prefix")


@contextmanager
def _compressed(path: Path) -> Iterator[IO[bytes]]:
    """Open a zstd file with a checksum that replaces `path` once the block has ended without an exception."""
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    with atomic_write(path) as file, compressor.stream_writer(file, closefd=False) as stream:
        yield stream  # type: ignore[misc]
