r"""Memory-mapped token datasets (`.bin` and `.idx`), and the two layouts of their index.

A dataset is a flat array of token ids, `PREFIX.bin`, and an index, `PREFIX.idx`. All integers are little-endian.

The layout `mmap` is that of Megatron-LM and gpt-neox:

    MMIDIDX\0\0 | u64 version 1 | u8 dtype code | u64 sequences | u64 documents + 1
    int32 sizes [sequences]                  number of tokens of each sequence
    int64 pointers [sequences]               bytes in `.bin` before each sequence
    int64 document index [documents + 1]     document d consists of the sequences index[d] to index[d + 1] - 1

The layout `cached` (also called `lazy`) is that of fairseq:

    TNTIDX\0\0 | u64 version 1 | u64 dtype code | u64 element size | u64 sequences | u64 sizes | u64 documents + 1
    int64 dimension offsets [sequences + 1]  0, 1, 2, ..., because sequences are one-dimensional
    int64 data offsets [sequences + 1]       elements in `.bin` before each sequence
    int64 sizes [sizes]                      number of tokens of each sequence
    int64 document index [documents + 1]     as above
"""

from __future__ import annotations

import glob
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from neox.data.token_files.remote_blocks import RemoteTokens
from neox.errors import DataError
from neox.log import get_logger
from neox.storage import RemoteIds, ids_file

_log = get_logger(__name__)

IndexLayout = Literal["mmap", "cached"]

IGNORED = -100
"""Label of a token that is left out of the loss, as in label files of gpt-neox and in PyTorch."""

MMAP_MAGIC = b"MMIDIDX\x00\x00"
CACHED_MAGIC = b"TNTIDX\x00\x00"
_VERSION = 1
_MMAP_HEADER = struct.Struct("<QBQQ")
_CACHED_HEADER = struct.Struct("<QQQQQQ")
# Codes 6 and 7 are floats, of different widths in NeoX and Megatron: the length of `.bin` says which.
_FLOAT_CODES = (6, 7)
_FLOATS: dict[int, np.dtype] = {4: np.dtype("<f4"), 8: np.dtype("<f8")}
_DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_CHUNK = 1 << 22  # index entries that are processed at once, to bound memory
_BLOCK_TOKENS = 1 << 24


@dataclass(frozen=True)
class TokenIndex:
    """Memory-mapped arrays of one `.idx`.

    Attributes:
        layout: Layout of the file.
        dtype: Dtype of the token ids in `.bin`.
        sizes: Number of tokens of each sequence, int32 (mmap) or int64 (cached) [sequences].
        pointers: Start of each sequence in `.bin`, in units of `pointer_unit` bytes, int64 [sequences].
        pointer_unit: 1 if pointers count bytes, the size of `dtype` if they count elements.
        document_index: First sequence of each document, and then the number of sequences, int64 [documents + 1].
        num_tokens: Sum of the sizes.
    """

    layout: IndexLayout
    dtype: np.dtype
    sizes: np.ndarray
    pointers: np.ndarray
    pointer_unit: int
    document_index: np.ndarray
    num_tokens: int


def best_dtype(vocab_size: int | None) -> np.dtype:
    """Return gpt-neox's dtype for token ids: uint16 for vocabularies of less than 65,500 ids, otherwise int32."""
    if vocab_size is not None and vocab_size < 65500:
        return np.dtype(np.uint16)
    return np.dtype(np.int32)


def dtype_code(dtype: np.dtype) -> int:
    """Return the code of an integer dtype in the index. Raises DataError for a dtype without a code."""
    for code, known in _DTYPES.items():
        if known == dtype:
            return code
    raise DataError(f"token ids cannot be stored as {dtype}; use one of {', '.join(map(str, _DTYPES.values()))}")


def idx_path(prefix: str | Path) -> Path:
    """Return `PREFIX.idx`."""
    return Path(f"{prefix}.idx")


def bin_path(prefix: str | Path) -> Path:
    """Return `PREFIX.bin`."""
    return Path(f"{prefix}.bin")


def json_path(prefix: str | Path) -> Path:
    """Return `PREFIX.json`, the sidecar."""
    return Path(f"{prefix}.json")


def read_index(prefix: str | Path, *, floats: bool = False) -> TokenIndex:
    """Map `PREFIX.idx` and check that it is consistent and agrees with the length of `PREFIX.bin`.

    Args:
        prefix: Path without `.bin` and `.idx`.
        floats: Whether numbers may be floating-point, which token ids are not.

    Raises:
        DataError: If a file is missing, truncated, inconsistent or of another format.
    """
    path = idx_path(prefix)
    data = ids_file(prefix)
    missing = [str(file) for file in (path, data) if not file.is_file()]
    if missing:
        hint = ""
        similar = sorted(Path(prefix).parent.glob(f"{glob.escape(Path(prefix).stem)}*.idx"))
        if similar:
            hint = f"; there is {similar[0].with_suffix('')}"
        raise DataError(
            f"{' and '.join(missing)} not found{hint}. "
            "A dataset is named by its prefix, without .bin or .idx; make one with "
            "tools/preprocess_data.py --input FILES --output-prefix PREFIX (it writes PREFIX_text_document.bin, .idx)."
        )
    data_bytes = _size_of_ids(data)
    raw = _map_bytes(path)
    if raw[: len(MMAP_MAGIC)].tobytes() == MMAP_MAGIC:
        index = _read_mmap(path, raw, data_bytes)
    elif raw[: len(CACHED_MAGIC)].tobytes() == CACHED_MAGIC:
        index = _read_cached(path, raw)
    else:
        raise DataError(
            f"{path} is not a token index: it starts with {raw[:9].tobytes()!r}, neither MMIDIDX nor TNTIDX"
        )
    if index.dtype.kind == "f" and not floats:
        raise DataError(f"{path} holds floating-point data, not token ids")
    _check_pointers(path, index)
    if len(index.document_index) == 1 and index.document_index[0] == 0 and len(index.sizes):
        # gpt-neox's tools/datasets/merge_datasets.py joins the sequences, and leaves the document index at its first
        # entry. gpt-neox trains on sequences, and its tools write one for each document.
        _log.info("%s lists no documents, as files joined by gpt-neox: each sequence counts as one", path)
        index = replace(index, document_index=np.arange(len(index.sizes) + 1, dtype=np.int64))
    _check_documents(path, index)
    expected_bytes = index.num_tokens * index.dtype.itemsize
    if data_bytes != expected_bytes:
        raise DataError(
            f"{data} has {data_bytes:,} bytes, but {path} describes {index.num_tokens:,} tokens of "
            f"{index.dtype.itemsize} bytes ({expected_bytes:,}); one of them is truncated or from another run"
        )
    return index


def _size_of_ids(path: Path) -> int:
    """Return the bytes of a `.bin`, which a description may name."""
    if path.suffix == ".json":
        return RemoteIds.read(path).size
    return path.stat().st_size


def _map_bytes(path: Path) -> np.ndarray:
    """Map the bytes of a file."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r")


def _unpack(path: Path, raw: np.ndarray, header: struct.Struct, start: int) -> tuple[int, ...]:
    """Return the fields of a header, except the version. Raises DataError for another version or a short file."""
    if len(raw) < start + header.size:
        raise DataError(f"{path} ends inside its header ({len(raw)} bytes); it is truncated, make it again")
    fields = header.unpack(raw[start : start + header.size].tobytes())
    if fields[0] != _VERSION:
        raise DataError(f"{path} has format version {fields[0]}; only version {_VERSION} exists")
    return fields[1:]


def _dtype(path: Path, code: int, width: int) -> np.dtype:
    """Return the dtype with a code, in which a float has `width` bytes. Raises DataError if it is unknown."""
    if code in _FLOAT_CODES and width in _FLOATS:
        return _FLOATS[width]
    if code not in _DTYPES:
        raise DataError(f"{path} has the unknown dtype code {code}; its header is damaged")
    return _DTYPES[code]


def _arrays(path: Path, raw: np.ndarray, start: int, parts: list[tuple[str, int]]) -> list[np.ndarray]:
    """Split the bytes of a file into arrays.

    Args:
        path: Path of the file, for messages.
        raw: Bytes of the file.
        start: Size of the header.
        parts: Dtype and length of each array.

    Raises:
        DataError: If the arrays do not fill the rest of the file.
    """
    end = start + sum(np.dtype(dtype).itemsize * count for dtype, count in parts)
    if end != len(raw):
        raise DataError(f"{path} has {len(raw):,} bytes, but its header announces {end:,}; it is truncated or damaged")
    arrays = []
    for dtype, count in parts:
        array = np.frombuffer(raw, dtype=dtype, count=count, offset=start)
        arrays.append(array)
        start += array.nbytes
    return arrays


def _read_mmap(path: Path, raw: np.ndarray, data_bytes: int) -> TokenIndex:
    start = len(MMAP_MAGIC) + _MMAP_HEADER.size
    code, sequences, documents = _unpack(path, raw, _MMAP_HEADER, len(MMAP_MAGIC))
    sizes, pointers, document_index = _arrays(
        path, raw, start, [("<i4", sequences), ("<i8", sequences), ("<i8", documents)]
    )
    numbers = int(sizes.sum(dtype=np.int64))
    dtype = _dtype(path, code, data_bytes // max(1, numbers))
    return TokenIndex("mmap", dtype, sizes, pointers, 1, document_index, numbers)


def _read_cached(path: Path, raw: np.ndarray) -> TokenIndex:
    start = len(CACHED_MAGIC) + _CACHED_HEADER.size
    code, element_size, sequences, num_sizes, documents = _unpack(path, raw, _CACHED_HEADER, len(CACHED_MAGIC))
    dtype = _dtype(path, code, element_size)
    if element_size != dtype.itemsize:
        raise DataError(f"{path} says that {dtype} takes {element_size} bytes; its header is damaged")
    dims, offsets, sizes, document_index = _arrays(
        path, raw, start, [("<i8", sequences + 1), ("<i8", sequences + 1), ("<i8", num_sizes), ("<i8", documents)]
    )
    if num_sizes != sequences or not np.array_equal(dims, np.arange(sequences + 1)):
        raise DataError(f"{path}: sequences are not one-dimensional, so they are not token ids")
    index = TokenIndex(
        "cached", dtype, sizes, offsets[:-1], dtype.itemsize, document_index, int(sizes.sum(dtype=np.int64))
    )
    if offsets[-1] != index.num_tokens:
        raise DataError(f"{path}: its last offset {offsets[-1]} is not its number of tokens, {index.num_tokens}")
    return index


def _check_pointers(path: Path, index: TokenIndex) -> None:
    """Check that every sequence starts where the previous one ends."""
    scale = index.dtype.itemsize // index.pointer_unit
    position = 0
    for start, sizes in _chunks(index.sizes):
        if sizes.min(initial=0) < 0:
            bad = start + int(np.argmax(sizes < 0))
            raise DataError(f"{path}: sequence {bad} has a negative size ({index.sizes[bad]}); the index is damaged")
        ends = np.cumsum(sizes, dtype=np.int64)
        ends += position
        expected = (ends - sizes) * scale
        wrong = expected != index.pointers[start : start + len(sizes)]
        if wrong.any():
            bad = int(np.argmax(wrong))
            raise DataError(
                f"{path}: sequence {start + bad} points at {index.pointers[start + bad]}, but the sizes before it put "
                f"it at {expected[bad]}; the index is damaged"
            )
        position = int(ends[-1])


def _check_documents(path: Path, index: TokenIndex) -> None:
    """Check that the document index rises from 0 to the number of sequences."""
    documents = index.document_index
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != len(index.sizes):
        raise DataError(
            f"{path}: its document index does not run from 0 to {len(index.sizes):,} sequences; the index is damaged"
        )
    for start, part in _chunks(documents):
        stop = min(start + len(part) + 1, len(documents))
        if (np.diff(documents[start:stop]) < 0).any():
            raise DataError(f"{path}: its document index falls near entry {start:,}; the index is damaged")


def _chunks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield an array in chunks of at most _CHUNK entries, each with the number of its first entry."""
    for start in range(0, len(array), _CHUNK):
        yield start, array[start : start + _CHUNK]


def index_parts(
    layout: IndexLayout, dtype: np.dtype, sizes: np.ndarray, counts: np.ndarray | None = None
) -> Iterator[bytes]:
    """Yield the bytes of an `.idx`.

    Args:
        layout: Layout to write.
        dtype: Dtype of the token ids.
        sizes: Number of tokens of each sequence, int [sequences]. The array may be memory-mapped.
        counts: Number of sequences of each document, int [documents]. By default each document is one sequence.
    """
    sequences = len(sizes)
    documents = sequences if counts is None else len(counts)
    code = dtype_code(dtype)
    if layout == "mmap":
        yield MMAP_MAGIC + _MMAP_HEADER.pack(_VERSION, code, sequences, documents + 1)
        yield from _integers(sizes, "<i4")
        yield from _starts(sizes, dtype.itemsize, with_end=False)
    else:
        header = _CACHED_HEADER.pack(_VERSION, code, dtype.itemsize, sequences, sequences, documents + 1)
        yield CACHED_MAGIC + header
        yield from _count_to(sequences)
        yield from _starts(sizes, 1, with_end=True)
        yield from _integers(sizes, "<i8")
    if counts is None:
        yield from _count_to(documents)
    else:
        yield from _starts(counts, 1, with_end=True)


def _integers(values: np.ndarray, dtype: str) -> Iterator[bytes]:
    """Yield the bytes of an array in another dtype."""
    for _, chunk in _chunks(values):
        yield chunk.astype(dtype, copy=False).tobytes()


def _starts(sizes: np.ndarray, scale: int, *, with_end: bool) -> Iterator[bytes]:
    """Yield the bytes of the starts of parts with given sizes, times `scale`, as int64.

    Args:
        sizes: Size of each part.
        scale: Factor of the starts.
        with_end: Whether the end of the last part follows.
    """
    position = 0
    for _, part in _chunks(sizes):
        ends = np.cumsum(part, dtype=np.int64)
        yield ((ends - part + position) * scale).astype("<i8", copy=False).tobytes()
        position += int(ends[-1])
    if with_end:
        yield struct.pack("<q", position * scale)


def _count_to(n: int) -> Iterator[bytes]:
    """Yield the bytes of 0, 1, ..., n as int64."""
    for start in range(0, n + 1, _CHUNK):
        yield np.arange(start, min(start + _CHUNK, n + 1), dtype="<i8").tobytes()


class TokenBlock(NamedTuple):
    """Some whole sequences of a dataset, one after another.

    Attributes:
        first: Number of the first sequence.
        sizes: Number of tokens of each sequence [sequences].
        tokens: Their ids [sum of the sizes].
    """

    first: int
    sizes: np.ndarray
    tokens: np.ndarray


class IndexedDataset:
    """Read-only token sequences of a memory-mapped `.bin` file.

    Attributes:
        prefix: Path without `.bin` and `.idx`.
        layout: Layout of the index.
        dtype: Dtype of the token ids.
        sizes: Number of tokens of each sequence [sequences].
        document_index: First sequence of each document, and then the number of sequences [documents + 1].
        tokens: All ids, [num_tokens]; slices of them are taken.
        num_tokens: Number of ids.
    """

    def __init__(self, prefix: str | Path, data_impl: str = "infer", *, floats: bool = False) -> None:
        """Open a dataset.

        Args:
            prefix: Path without `.bin` and `.idx`.
            data_impl: Layout that the index must have: `mmap`, `cached` or `lazy` (two names of one layout), or
                `infer` for any.
            floats: Whether numbers may be floating-point, which token ids are not.

        Raises:
            DataError: If a file is missing or damaged, or has another layout.
        """
        self.prefix = str(prefix)
        index = read_index(prefix, floats=floats)
        self.layout: IndexLayout = index.layout
        required = {"infer": index.layout, "lazy": "cached"}.get(data_impl, data_impl)
        if required != index.layout:
            raise DataError(
                f'{prefix}.idx is in the {index.layout} layout, but "data_impl" is "{data_impl}"; use "infer"'
            )
        self.dtype = index.dtype
        self.sizes = index.sizes
        self.document_index = index.document_index
        self.num_tokens = index.num_tokens
        self._pointers = index.pointers
        self._unit = index.dtype.itemsize // index.pointer_unit
        self.tokens: np.ndarray | RemoteTokens = np.empty(0, self.dtype)
        path = ids_file(prefix)
        if self.num_tokens and path.suffix == ".json":
            self.tokens = RemoteTokens(RemoteIds.read(path), self.dtype)
        elif self.num_tokens:
            self.tokens = np.asarray(np.memmap(path, dtype=self.dtype, mode="r"))

    def __len__(self) -> int:
        """Return the number of sequences. In datasets of gpt-neox's tools each document is one sequence."""
        return len(self.sizes)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_index) - 1

    @property
    def has_sentences(self) -> bool:
        """Whether there is a document that is not exactly one sequence."""
        return self.num_documents != len(self) or bool((np.diff(self.document_index) != 1).any())

    def warm_up(self) -> None:
        """Read both files once, so that they are in the page cache. Ids in object storage are not fetched for that."""
        for path in (idx_path(self.prefix), ids_file(self.prefix)):
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 26):
                    pass

    def joined(self, begins: Sequence[int], ends: Sequence[int]) -> np.ndarray:
        """Return the ids of pieces of `tokens`, one after another.

        Args:
            begins: First id of each piece.
            ends: Id after the last one of each piece.
        """
        tokens = self.tokens
        if isinstance(tokens, RemoteTokens):
            return tokens.joined(begins, ends)
        return np.concatenate([tokens[begin:end] for begin, end in zip(begins, ends, strict=True)])

    def starts(self, sequences: np.ndarray) -> np.ndarray:
        """Return the starts of sequences in `tokens`, int64 with the shape of `sequences`."""
        return np.asarray(self._pointers[sequences] // self._unit)

    def __getitem__(self, sequence: int) -> np.ndarray:
        """Return the ids of one sequence, as a view of the file."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"{self.prefix} has {len(self)} sequences, numbered from 0; {sequence} does not exist")
        start = int(self._pointers[sequence]) // self._unit
        return self.tokens[start : start + int(self.sizes[sequence])]

    def blocks(self) -> Iterator[TokenBlock]:
        """Yield the dataset in blocks of about 16 million tokens."""
        first = 0
        start = 0
        while first < len(self):
            sizes = np.asarray(self.sizes[first : first + _BLOCK_TOKENS // 16])
            ends = np.cumsum(sizes, dtype=np.int64)
            count = max(1, int(np.searchsorted(ends, _BLOCK_TOKENS, side="right")))
            stop = start + int(ends[count - 1])
            yield TokenBlock(first, sizes[:count], self.tokens[start:stop])
            first += count
            start = stop
