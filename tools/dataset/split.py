"""Division of documents into separate train, validation and test sets, or by a column."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import compress, islice, repeat
from pathlib import Path
from typing import IO, Any

import numpy as np
import zstandard

from neox.config.sections.data import SPLITS, split_shares
from neox.corpus import BadInput, SkipBudget, expand_inputs, read_blocks
from neox.data.samples.gpt_dataset import split_documents
from neox.data.token_files.builder import DatasetTotals, IndexedDatasetBuilder
from neox.data.token_files.columns import column_lines, column_names, column_values
from neox.data.token_files.indexed_dataset import IndexedDataset
from neox.data.token_files.sidecar import DOCUMENT_BYTES, read_sidecar, write_sidecar
from neox.errors import DataError
from neox.files import atomic_write
from neox.log import progress

_BLOCK_BYTES = 1 << 20
_DRAWS = 4096
_MOST_VALUES = 200  # each has open files
_NO_FILE_NAME = re.compile(r"[^A-Za-z0-9._-]")


def split_dataset(prefix: str | Path, output_prefix: str | Path, split: str, seed: int) -> dict[str, int]:
    """Divide a dataset at random into OUTPUT_train, OUTPUT_valid and OUTPUT_test; a part with share 0 is not written.

    Documents keep their order inside a part. OUTPUT_train.tsv holds, one line per document, the prefix it came from and
    its number there.

    Args:
        prefix: Dataset with one sequence per document.
        output_prefix: Prefix of the outputs, which must not exist.
        split: Shares as in NeoX's `split`; each part gets exactly its number of documents.
        seed: Seed of the draw.

    Returns:
        Number of documents of each part.

    Raises:
        DataError: If the dataset cannot be divided, an output exists, or `split` is invalid.
    """
    data = IndexedDataset(prefix)
    _check_whole_documents(data)
    part_of = np.empty(len(data), dtype=np.int8)
    order = np.random.default_rng(seed).permutation(len(data))
    outputs: dict[str, str] = {}
    for name, share, part in zip(SPLITS, split_shares(split), split_documents(split, len(data)), strict=True):
        if share or part:  # rounding may give training a document although its share is 0
            part_of[order[part.start : part.stop]] = len(outputs)
            outputs[name] = f"{output_prefix}_{name}"
    with ExitStack() as stack:
        maps = []
        for output in outputs.values():
            maps.append(stack.enter_context(atomic_write(Path(f"{output}.tsv"))))
        written = _write_datasets(data, part_of, outputs, {"split": split, "split_seed": seed})
        for document, number in enumerate(part_of.tolist()):
            maps[number].write(f"{prefix}\t{document}\n".encode())
    return {name: totals["documents"] for name, totals in written.items()}


def split_by_column(prefix: str | Path, output_prefix: str | Path, column: str) -> dict[str, tuple[str, DatasetTotals]]:
    """Divide a dataset by the value of a column that preprocessing has kept: OUTPUT_VALUE for each value.

    Documents keep their order. Characters of a value that do not suit a file name become underscores.

    Args:
        prefix: Dataset with one sequence per document.
        output_prefix: Prefix of the outputs, which must not exist.
        column: Name of the column.

    Returns:
        Prefix and size of the dataset of each value, in the order in which values appear.

    Raises:
        DataError: If the dataset cannot be divided, there are more than 200 values, two values have the same file name,
            or an output exists.
    """
    data = IndexedDataset(prefix)
    _check_whole_documents(data)
    numbers: dict[str, int] = {}
    part_of = np.empty(len(data), dtype=np.int16)
    for document, value in enumerate(column_values(prefix, column)):
        part_of[document] = numbers.setdefault(value, len(numbers))
        if len(numbers) > _MOST_VALUES:
            raise DataError(f"{prefix}: column {column!r} has more than {_MOST_VALUES} values; choose another column")
    outputs: dict[str, str] = {}
    for value in numbers:
        output = f"{output_prefix}_{_NO_FILE_NAME.sub('_', value)}"
        if output in outputs.values():
            raise DataError(f"{prefix}: two values of {column!r} have the same file name, {output}: rename one of them")
        outputs[value] = output
    written = _write_datasets(data, part_of, outputs, {"split_by": column})
    return dict(zip(numbers, zip(outputs.values(), written.values(), strict=True), strict=True))


def _check_whole_documents(data: IndexedDataset) -> None:
    if data.num_documents != len(data):
        raise DataError(f"{data.prefix} has several sequences in a document; only one-sequence documents can be split")


def _write_datasets(
    data: IndexedDataset, part_of: np.ndarray, outputs: Mapping[str, str], settings: Mapping[str, Any]
) -> dict[str, DatasetTotals]:
    """Write the documents of each part as a dataset, with the sidecar and the columns of the whole.

    Args:
        data: The whole.
        part_of: Number of the part of each document [documents].
        outputs: Prefix of each part, by its name. None of them may exist.
        settings: What sidecars say about the division.

    Returns:
        Size of each part.
    """
    _refuse_existing([f"{output}.idx" for output in outputs.values()])
    sidecar = read_sidecar(data.prefix)
    columns = bool(column_names(sidecar))
    metadata = column_lines(data.prefix) if columns else repeat(b"")
    with ExitStack() as stack:
        builders = []
        for output in outputs.values():
            builder = IndexedDatasetBuilder(output, data.dtype, impl=data.layout, columns=columns)
            builders.append(stack.enter_context(builder))
        bar = stack.enter_context(progress(f"split {data.prefix}", data.num_tokens, "tokens"))
        for first, sizes, tokens in data.blocks():
            lines = list(islice(metadata, len(sizes)))
            for number, builder in enumerate(builders):
                chosen = part_of[first : first + len(sizes)] == number
                kept = b"".join(compress(lines, chosen))
                builder.add_documents(tokens[np.repeat(chosen, sizes)], sizes[chosen], None, kept)
            bar.update(len(tokens))
        if columns:
            next(metadata, None)  # there is none, and the checksum is compared
    for (name, output), builder in zip(outputs.items(), builders, strict=True):
        if sidecar is not None:
            described = {**sidecar.settings, **settings, "part": name, **builder.columns_state}
            described.pop(DOCUMENT_BYTES, None)  # those of the parts are not known
            write_sidecar(output, replace(sidecar, settings=described, **builder.totals))
    return {name: builder.totals for name, builder in zip(outputs, builders, strict=True)}


def split_lines(
    inputs: Sequence[str | Path], output_prefix: str | Path, split: str, seed: int, *, skip_bad: int = 0
) -> dict[str, int]:
    """Divide documents before tokenization at random into OUTPUT_{train,valid,test}.jsonl.zst.

    A part with share 0 is not written. The inputs are read once, in bounded memory. The part of each document is drawn
    independently, so the shares hold on average. Lines are copied unchanged; blank lines are left out. OUTPUT_train.tsv
    holds, for each line of OUTPUT_train.jsonl.zst, the file it came from and its line there, from 1.

    Args:
        inputs: Files or directories of any format that preprocessing reads.
        output_prefix: Prefix of the outputs, which must not exist.
        split: Shares as in NeoX's `split`.
        seed: Seed of the draw.
        skip_bad: Number of bad inputs that may be skipped.

    Returns:
        Number of documents of each part.

    Raises:
        ConfigError: If `split` is invalid.
        DataError: If an output exists, or more inputs are bad than may be skipped.
    """
    draws = draw_parts(split, seed)
    outputs: list[tuple[Path, Path] | None] = []
    for name, share in zip(SPLITS, split_shares(split), strict=True):
        if share:
            outputs.append((Path(f"{output_prefix}_{name}.jsonl.zst"), Path(f"{output_prefix}_{name}.tsv")))
        else:
            outputs.append(None)
    _refuse_existing([str(output[0]) for output in outputs if output is not None])
    with progress("split", None, "B") as bar:
        return write_parts(_lines(inputs, SkipBudget(skip_bad), bar.update), draws, outputs)


def draw_parts(split: str, seed: int) -> Iterator[int]:
    """Draw the part of one document after another, endlessly: 0 is train, 1 validation, 2 test.

    Raises:
        ConfigError: If `split` is invalid.
    """
    return _drawn(np.cumsum(split_shares(split))[:-1], seed)


def write_parts(
    lines: Iterable[tuple[str, int, bytes]], parts: Iterator[int], outputs: Sequence[tuple[Path, Path] | None]
) -> dict[str, int]:
    """Write each line to its part, and where it came from to the map of this part.

    Args:
        lines: File, number of the line, and the line without its newline.
        parts: Part of each line; there may be more parts than lines.
        outputs: Files for the documents (`.jsonl` or `.jsonl.zst`) and for the map of train, validation and test. They
            are replaced. None for a part that no line belongs to.

    Returns:
        Number of documents of each part that has files.
    """
    counts = {}
    with ExitStack() as stack:
        files: dict[int, tuple[IO[bytes], IO[bytes]]] = {}
        for part, output in enumerate(outputs):
            if output is not None:
                documents, origins = output
                files[part] = (stack.enter_context(_compressed(documents)), stack.enter_context(atomic_write(origins)))
                counts[SPLITS[part]] = 0
        for file, number, line in lines:
            part = next(parts)
            texts, places = files[part]
            texts.write(line + b"\n")
            places.write(f"{file}\t{number}\n".encode())
            counts[SPLITS[part]] += 1
    return counts


def _lines(
    inputs: Sequence[str | Path], budget: SkipBudget, consumed: Callable[[int], Any]
) -> Iterator[tuple[str, int, bytes]]:
    """Yield every line that is not blank: file, number of the line, bytes."""
    for file in expand_inputs(inputs):
        for block in read_blocks(file, block_bytes=_BLOCK_BYTES, consumed=consumed):
            if isinstance(block, BadInput):
                budget.add(block)
                continue
            for number, line in enumerate(block.data.split(b"\n"), start=block.start.line):
                if line and not line.isspace():
                    yield file, number, line


def _drawn(bounds: np.ndarray, seed: int) -> Iterator[int]:
    """Draw part numbers endlessly; `bounds` are the cumulative shares of all parts but the last."""
    random = np.random.default_rng(seed)
    while True:
        yield from np.searchsorted(bounds, random.random(_DRAWS), side="right").tolist()


def _refuse_existing(paths: Sequence[str]) -> None:
    existing = [path for path in paths if Path(path).exists()]
    if existing:
        raise DataError(f"{', '.join(existing)} already exists; remove it, or choose another --output-prefix")


@contextmanager
def _compressed(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` at the end of the block. If its name ends with `.zst`, it is compressed."""
    with atomic_write(path) as file:
        if not path.name.endswith(".zst"):
            yield file
            return
        with zstandard.ZstdCompressor(write_checksum=True).stream_writer(file, closefd=False) as stream:
            yield stream
