"""Bytes of an input as JSON lines, decompressed piece by piece, with truncation and damage detected.

`.jsonl` and its compressed forms are read as they are; the other formats of lm-dataformat (text, zip, tar, ...) become
lines that are one JSON string each (lm-dataformat's old form of a document), by `archives`.
"""

from __future__ import annotations

import gzip
import logging
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, cast

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
from neox.errors import DataError, os_errors

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 18
_NEWLINE = b"\n"
_PLAIN_SUFFIXES = (".jsonl", ".ndjson", ".json")


def is_readable(name: str) -> bool:
    """Return whether a file of this name is an input (files beside a dataset are not)."""
    return name.endswith(_suffixes()) and not name.endswith(("_document.json", ".progress.json", ".step.json"))


def expand_inputs(paths: Iterable[str | Path]) -> tuple[str, ...]:
    """Replace each directory by the files in it, sorted by name as in lm-dataformat; its directories are left out.

    Raises:
        DataError: If a path does not exist, is no readable format, or is a directory without inputs.
    """
    files: list[str] = []
    for path in map(Path, paths):
        if path.is_dir():
            folders = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
            inside = sorted(str(path / name) for name in os.listdir(path) if is_readable(name) and name not in folders)
            if not inside:
                within = f" itself; its directories ({', '.join(folders[:5])}) can be given" if folders else ""
                raise DataError(f"{path}: the directory holds no input{within}; readable are {', '.join(_suffixes())}")
            if folders:
                log.warning("%s: its directories (%s) are not read: give them, too", path, ", ".join(folders[:5]))
            files += inside
        elif not path.exists():
            raise DataError(f"{path} does not exist; give a file, a directory, or several with commas between them")
        elif not is_readable(path.name):
            raise DataError(f"{path}: no reader for this kind of file; readable are {', '.join(_suffixes())}")
        else:
            files.append(str(path))
    return tuple(files)


def read_bytes(path: str | Path, *, skip: int = 0, consumed: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """Yield the JSON lines of an input in chunks of about 256 KiB; lines run across chunks.

    Args:
        path: File to read.
        skip: Bytes, after decompression, to leave out at the start; a plain file seeks there.
        consumed: Called with the number of bytes newly read from the file itself, for progress.

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
            read = next(reader for suffix, reader in _READERS.items() if path.name.endswith(suffix))
            yield from _after(read(path, file), skip)


class _Counting:
    """File that reports how many bytes were read."""

    def __init__(self, file: IO[bytes], consumed: Callable[[int], None] | None) -> None:
        self._file, self._consumed = file, consumed

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

    The library's stream reader ends without an error if the input ends inside a frame. So a frame of our own is
    appended to the input: if its content does not come out whole at the end, the input was truncated.

    Raises:
        CorruptInput: If the data are damaged, truncated, empty or not zstd.
    """
    seal = os.urandom(32)
    source = _Sealed(file, zstandard.ZstdCompressor(write_checksum=True).compress(seal))
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    reader = decompressor.stream_reader(cast(IO[bytes], source), read_across_frames=True)
    last = b""  # at least as long as the seal, so that all of the seal is in it at the end
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
    """File with some bytes appended."""

    def __init__(self, file: IO[bytes], seal: bytes) -> None:
        self._file, self._seal, self.size = file, seal, 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.size += len(data)
        if not data:
            data, self._seal = self._seal, b""
        return data


def _gzip(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    try:
        yield from _pieces(cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb")))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CorruptInput(f"gzip data is damaged or truncated ({error})") from error


def _tar_of_zstd(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    for inner in tar_members(file):
        last = _NEWLINE
        for last in decompress_zstd(inner):
            yield last
        if not last.endswith(_NEWLINE):
            yield _NEWLINE


def _text_file(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """Yield a text file as one line, piece by piece; ends of lines become newlines, as in lm-dataformat."""
    try:
        with open(path, encoding="utf-8") as text:
            begun = False
            while piece := text.read(_CHUNK_BYTES):
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


# The first suffix that matches decides.
_READERS: Mapping[str, Callable[[Path, IO[bytes]], Iterator[bytes]]] = {
    ".jsonl.zst": lambda _, file: decompress_zstd(file),
    ".jsonl.gz": _gzip,
    ".jsonl.zst.tar": _tar_of_zstd,
    ".txt": _text_file,
    ".zip": lambda path, _: zip_texts(path),
    ".tar.gz": lambda _, file: tar_texts(gzip.GzipFile(fileobj=file, mode="rb")),
    ".tar": lambda _, file: tar_texts(file),
    ".json.gz": _gzip,
    ".json.zst": lambda _, file: array_elements(decompress_zstd(file)),
    ".dat.zst": lambda _, file: length_prefixed(decompress_zstd(file)),
    ".gz": lambda _, file: each_line(cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb"))),
    "_data.xz": lambda _, file: tar_texts(lzma.LZMAFile(file)),  # noqa: SIM115 (`file` is closed by `read_bytes`)
    "openwebtext.tar.xz": lambda _, file: tar_of_tars(lzma.LZMAFile(file)),  # noqa: SIM115
}


def _suffixes() -> tuple[str, ...]:
    return (*_PLAIN_SUFFIXES, *_READERS)
