"""The bytes of an input, decompressed piece by piece, with truncation and corruption noticed.

Every format becomes JSON lines here: `.jsonl` and its compressed forms as they are, and what `lm-dataformat` reads
besides (text, zip, tar, ...) as lines that are one JSON string each (lm-dataformat's own old form of a document), by
`archives`.
"""

from __future__ import annotations

import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import orjson
import zstandard

from neox.corpus.archives import (
    array_elements,
    each_line,
    length_prefixed,
    tar_members,
    tar_of_tars,
    tar_texts,
    zip_texts,
)
from neox.corpus.document import CorruptInput
from neox.errors import DataError

CHUNK_BYTES = 1 << 18
LINE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.zst", ".jsonl.gz", ".jsonl.zst.tar")
TEXT_SUFFIXES = (
    ".txt",
    ".zip",
    ".tar.gz",
    ".tar",
    ".json.gz",
    ".json.zst",
    ".dat.zst",
    ".gz",
    "_data.xz",
    "openwebtext.tar.xz",
)

_NEWLINE = b"\n"


def is_readable(name: str) -> bool:
    """Whether a file of this name is an input (what stands beside a dataset is not)."""
    return name.endswith(LINE_SUFFIXES + TEXT_SUFFIXES) and not name.endswith(("_document.json", ".progress.json"))


def expand_inputs(paths: Iterable[str | Path]) -> tuple[str, ...]:
    """Replace each directory by the inputs in it, sorted by name (as lm-dataformat does), and check that all exist."""
    files: list[str] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(str(path / name) for name in os.listdir(path) if is_readable(name))
            if not inside:
                raise DataError(f"{path}: the directory holds no input; readable are {_known()}")
            files += inside
        elif not path.exists():
            raise DataError(f"{path} does not exist; give a file, a directory, or several with commas between them")
        elif not is_readable(path.name):
            raise DataError(f"{path}: no reader for this kind of file; readable are {_known()}")
        else:
            files.append(str(path))
    return tuple(files)


def _known() -> str:
    return ", ".join(LINE_SUFFIXES + TEXT_SUFFIXES)


def read_bytes(path: str | Path, *, skip: int = 0, consumed: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """Yield the JSON lines of an input as chunks of about 256 KiB, decompressed; lines run across chunks.

    skip: bytes (after decompression) to leave out at the start; a plain file seeks there.
    consumed: called with the number of bytes newly read from the file itself, for progress.
    Raises CorruptInput for damaged or truncated data, DataError if the file cannot be opened or read.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            if path.name.endswith((".jsonl", ".ndjson", ".json")):
                file.seek(skip)
                yield from _plain(_Counting(file, consumed))
            else:
                yield from _after(_chunks(path, _Counting(file, consumed)), skip)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _chunks(path: Path, file: _Counting) -> Iterator[bytes]:
    name = path.name
    if name.endswith(".jsonl.zst"):
        yield from decompress_zstd(file)
    elif name.endswith(".jsonl.zst.tar"):
        yield from _tar_of_zstd(file)
    elif name.endswith(".jsonl.gz"):
        yield from _gzip(file)
    elif name.endswith(".txt"):
        yield from _text_file(path, file)
    elif name.endswith(".json.gz"):
        yield from _gzip(file)
    elif name.endswith(".zip"):
        yield from zip_texts(path)
    elif name.endswith(".tar.gz"):
        yield from tar_texts(gzip.GzipFile(fileobj=file))  # type: ignore[arg-type]
    elif name.endswith("openwebtext.tar.xz"):
        with lzma.LZMAFile(file) as plain:  # type: ignore[arg-type]
            yield from tar_of_tars(plain)
    elif name.endswith("_data.xz"):
        with lzma.LZMAFile(file) as plain:  # type: ignore[arg-type]
            yield from tar_texts(plain)
    elif name.endswith(".tar"):
        yield from tar_texts(file)
    elif name.endswith(".gz"):
        with gzip.open(file, "rb") as stream:  # type: ignore[call-overload]
            yield from each_line(stream)
    elif name.endswith(".dat.zst"):
        yield from length_prefixed(decompress_zstd(file))
    else:
        assert name.endswith(".json.zst"), name
        yield from array_elements(decompress_zstd(file))


class _Counting:
    """A file that tells how much was read from it."""

    def __init__(self, file: IO[bytes], consumed: Callable[[int], None] | None) -> None:
        self._file, self._consumed = file, consumed

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        if self._consumed is not None:
            self._consumed(len(data))
        return data


def _plain(file: _Counting) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def decompress_zstd(file: IO[bytes] | _Counting) -> Iterator[bytes]:
    """Yield what one or more zstd frames hold, in chunks of at most 256 KiB, however well they compress.

    The library's stream reader ends without a word when the input is cut inside a frame, so a last frame of our own is
    put behind the input: if its content does not come out whole at the end, the input was cut.
    """
    seal = os.urandom(32)
    source = _Sealed(file, zstandard.ZstdCompressor(write_checksum=True).compress(seal))
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 31).stream_reader(source, read_across_frames=True)
    last = b""  # at least as long as the seal, so that all of the seal is in it at the end
    try:
        while chunk := reader.read(CHUNK_BYTES):
            if len(chunk) < len(seal):
                last += chunk
                continue
            if last:
                yield last
            last = chunk
    except zstandard.ZstdError as error:
        raise CorruptInput(f"zstd data is damaged or not zstd at all ({_reason(error)})") from error
    if not last.endswith(seal):
        raise CorruptInput("zstd data is truncated: the file ends inside a frame")
    if not source.size:
        raise CorruptInput("the file is empty")
    if len(last) > len(seal):
        yield last[: -len(seal)]


def _reason(error: zstandard.ZstdError) -> str:
    return str(error).removeprefix("zstd decompress error: ")


class _Sealed:
    """A file with some bytes behind its end."""

    def __init__(self, file: IO[bytes] | _Counting, seal: bytes) -> None:
        self._file, self._seal, self.size = file, seal, 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.size += len(data)
        if not data:
            data, self._seal = self._seal, b""
        return data


def _gzip(file: _Counting) -> Iterator[bytes]:
    try:
        with gzip.open(file, "rb") as stream:  # type: ignore[call-overload]
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorruptInput(f"gzip data is damaged or truncated ({error})") from error


def _tar_of_zstd(file: _Counting) -> Iterator[bytes]:
    for inner in tar_members(file):
        last = _NEWLINE
        for last in decompress_zstd(inner):
            yield last
        if not last.endswith(_NEWLINE):
            yield _NEWLINE


def _text_file(path: Path, file: _Counting) -> Iterator[bytes]:
    """Yield a text file as one line, a piece at a time (lm-dataformat holds all of it); line ends become newlines."""
    try:
        with open(path, encoding="utf-8") as text:
            begun = False
            while piece := text.read(CHUNK_BYTES):
                file.read(len(piece))  # for the progress display
                yield orjson.dumps(piece)[1 if begun else 0 : -1]
                begun = True
            if begun:
                yield b'"\n'
    except UnicodeDecodeError as error:
        raise CorruptInput(f"the text is not UTF-8 ({error.reason})") from error


def _after(chunks: Iterator[bytes], skip: int) -> Iterator[bytes]:
    for chunk in chunks:
        if skip >= len(chunk):
            skip -= len(chunk)
        else:
            yield chunk[skip:] if skip else chunk
            skip = 0
