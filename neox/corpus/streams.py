"""Inputs of all formats as streams of JSON lines. Truncation and damage are detected.

The lines of `.jsonl` and its compressed forms are yielded unchanged. `archives` converts the other formats of
lm-dataformat (text, zip, tar, ...): each document becomes a line that is one JSON string, lm-dataformat's old form.
"""

from __future__ import annotations

import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, cast

import zstandard

from neox.corpus.archives import (
    array_elements,
    each_line,
    json_string_piece,
    length_prefixed,
    tar_members,
    tar_of_tars,
    tar_texts,
    zip_texts,
)
from neox.corpus.document import CorruptInput
from neox.errors import DataError, os_errors
from neox.log import get_logger

_log = get_logger(__name__)

_CHUNK_BYTES = 1 << 18
_NEWLINE = b"\n"
_PLAIN_SUFFIXES = (".jsonl", ".ndjson", ".json")


def is_readable(name: str) -> bool:
    """Return whether a file name has the suffix of an input and does not belong to a dataset of ours."""
    return name.endswith(_suffixes()) and not name.endswith(("_document.json", ".progress.json", ".step.json"))


def expand_inputs(paths: Iterable[str | Path]) -> tuple[str, ...]:
    """Replace each directory by the files in it, sorted by name as in lm-dataformat. Subdirectories are not read.

    Raises:
        DataError: If a path does not exist, has no readable format, or is a directory without inputs.
    """
    files: list[str] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += _files_in(path)
        elif not path.exists():
            raise DataError(f"{path} does not exist; give a file, a directory, or several with commas between them")
        elif not is_readable(path.name):
            raise DataError(f"{path}: no reader for this kind of file; readable are {', '.join(_suffixes())}")
        else:
            files.append(str(path))
    return tuple(files)


def _files_in(directory: Path) -> list[str]:
    """Return the inputs in a directory, sorted; warn about subdirectories. Raises DataError if there is no input."""
    files = []
    subdirectories = []
    for entry in os.scandir(directory):
        if entry.is_dir():
            subdirectories.append(entry.name)
        elif is_readable(entry.name):
            files.append(str(directory / entry.name))
    listed = ", ".join(sorted(subdirectories)[:5])
    if not files:
        hint = ""
        if subdirectories:
            hint = f" itself; its subdirectories ({listed}) can be given"
        raise DataError(f"{directory}: the directory holds no input{hint}; readable are {', '.join(_suffixes())}")
    if subdirectories:
        _log.warning("%s: its subdirectories (%s) are not read; give them too if you need them", directory, listed)
    return sorted(files)


def read_bytes(path: str | Path, *, skip: int = 0, consumed: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """Yield the JSON lines of an input in chunks of about 256 KiB. A line may span several chunks.

    Args:
        path: File to read.
        skip: Number of bytes, after decompression, to skip at the start. Plain files are not read up to there.
        consumed: Function that is called with the number of bytes newly read from the file itself.

    Raises:
        CorruptInput: If the data are damaged or truncated.
        DataError: If the file cannot be opened or read.
    """
    path = Path(path)
    with os_errors(DataError, f"{path} cannot be read"), open(path, "rb") as opened:
        file = cast(IO[bytes], _Counting(opened, consumed))
        if path.name.endswith(_PLAIN_SUFFIXES):
            opened.seek(skip)
            yield from _pieces(file)
        else:
            yield from _after(_reader_of(path)(path, file), skip)


class _Counting:
    """File that reports how many bytes are read from it."""

    def __init__(self, file: IO[bytes], consumed: Callable[[int], None] | None) -> None:
        self._file = file
        self._consumed = consumed

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        if self._consumed is not None:
            self._consumed(len(data))
        return data


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def decompress_zstd(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of one or more zstd frames in chunks of at most 256 KiB.

    The library's stream reader ends without an error if the input ends inside a frame. Therefore a frame of our own,
    the seal, is appended to the input. If the content of the seal does not come out at the end, the input was
    truncated.

    Raises:
        CorruptInput: If the data are damaged, truncated, empty or not zstd.
    """
    seal = os.urandom(32)
    source = _Sealed(file, zstandard.ZstdCompressor(write_checksum=True).compress(seal))
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    reader = decompressor.stream_reader(cast(IO[bytes], source), read_across_frames=True)
    last = b""  # the last chunk; at least as long as the seal, so that it holds the whole seal at the end
    try:
        while chunk := reader.read(_CHUNK_BYTES):
            if len(chunk) < len(seal):
                last += chunk
                continue
            if last:
                yield last
            last = chunk
    except zstandard.ZstdError as error:
        reason = str(error).removeprefix("zstd decompress error: ")
        raise CorruptInput(f"zstd data is damaged or not zstd at all ({reason})") from error
    if not last.endswith(seal):
        raise CorruptInput("zstd data is truncated: the file ends inside a frame")
    if not source.size:
        raise CorruptInput("the file is empty")
    if len(last) > len(seal):
        yield last[: -len(seal)]


class _Sealed:
    """File with some bytes appended.

    Attributes:
        size: Number of bytes read from the file itself.
    """

    def __init__(self, file: IO[bytes], seal: bytes) -> None:
        self._file = file
        self._seal = seal
        self.size = 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.size += len(data)
        if not data:
            data = self._seal
            self._seal = b""
        return data


def _unzipped(file: IO[bytes]) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb"))


def _gzip(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    try:
        yield from _pieces(_unzipped(file))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorruptInput(f"gzip data is damaged or truncated ({error})") from error


def _tar_of_zstd(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of the `.jsonl.zst` files in a tar archive."""
    for member in tar_members(file):
        chunk = _NEWLINE
        for chunk in decompress_zstd(member):
            yield chunk
        if not chunk.endswith(_NEWLINE):
            yield _NEWLINE


def _text_file(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """Yield a text file as one line, in pieces. All kinds of line ends become newlines, as in lm-dataformat."""
    try:
        with open(path, encoding="utf-8") as text:
            started = False
            while piece := text.read(_CHUNK_BYTES):
                file.read(len(piece))  # for the progress display
                yield json_string_piece(piece, is_first=not started)
                started = True
            if started:
                yield b'"\n'
    except UnicodeDecodeError as error:
        raise CorruptInput(f"the text is not UTF-8 ({error.reason})") from error


def _after(chunks: Iterator[bytes], skip: int) -> Iterator[bytes]:
    """Yield the bytes of chunks after the first `skip`."""
    for chunk in chunks:
        if skip >= len(chunk):
            skip -= len(chunk)
        else:
            yield chunk[skip:]
            skip = 0


# If several suffixes match, the first one decides.
_READERS: Mapping[str, Callable[[Path, IO[bytes]], Iterator[bytes]]] = {
    ".jsonl.zst": lambda _, file: decompress_zstd(file),
    ".jsonl.gz": _gzip,
    ".jsonl.zst.tar": _tar_of_zstd,
    ".txt": _text_file,
    ".zip": lambda path, _: zip_texts(path),
    ".tar.gz": lambda _, file: tar_texts(_unzipped(file)),
    ".tar": lambda _, file: tar_texts(file),
    ".json.gz": _gzip,
    ".json.zst": lambda _, file: array_elements(decompress_zstd(file)),
    ".dat.zst": lambda _, file: length_prefixed(decompress_zstd(file)),
    ".gz": lambda _, file: each_line(_unzipped(file)),
    "_data.xz": lambda _, file: tar_texts(lzma.LZMAFile(file)),  # noqa: SIM115 (`file` is closed by `read_bytes`)
    "openwebtext.tar.xz": lambda _, file: tar_of_tars(lzma.LZMAFile(file)),  # noqa: SIM115
}


def _reader_of(path: Path) -> Callable[[Path, IO[bytes]], Iterator[bytes]]:
    return next(reader for suffix, reader in _READERS.items() if path.name.endswith(suffix))


def _suffixes() -> tuple[str, ...]:
    return (*_PLAIN_SUFFIXES, *_READERS)
