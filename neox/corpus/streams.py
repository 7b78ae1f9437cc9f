"""Inputs of all formats as streams of JSON lines. Truncation and damage are detected.

The lines of `.jsonl` and its compressed forms are yielded unchanged. `archives` converts the other formats of
lm-dataformat (text, zip, tar, ...): each document becomes a line that is one JSON string, lm-dataformat's old form.

    name ends with           read by                       chunks of about 256 KiB
    .jsonl .ndjson .json     as on disk, or `_content` ->  JSON lines          an array becomes lines (`json_lines`)
    .jsonl.zst .json.gz ...  `_content`, by first bytes    JSON lines          UTF-16 becomes UTF-8 (`as_utf_8`)
    .parquet .arrow .csv     `neox.corpus.tables`          rows: JSON lines, or texts if one column is wanted
    .txt .zip .tar .gz ...   `neox.corpus.archives`        one JSON string for each text
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import orjson
import zstandard

from neox.corpus.archives import (
    each_line,
    json_string_piece,
    length_prefixed,
    tar_members,
    tar_of_tars,
    tar_texts,
    zip_texts,
)
from neox.corpus.contents import (
    BYTE_ORDER_MARK,
    HEAD_BYTES,
    OTHER_ENCODING,
    as_utf_8,
    check_is_data,
    holds_whole_values,
    json_lines,
    looks_like_text,
    packing_of,
)
from neox.corpus.document import CorruptInput
from neox.corpus.tables import Chunk, TableReader, arrow_rows, csv_lines, parquet_rows
from neox.errors import DataError, os_errors
from neox.storage import name_of, open_file, shown

_CHUNK_BYTES = 1 << 18
_NEWLINE = b"\n"
_TEXT_COLUMNS = frozenset({"text", "content", "prompt", "response", "instruction", "output", "messages"})
PLAIN_SUFFIXES = (".jsonl", ".ndjson", ".json")
_OUTPUTS = ("_document.json", ".columns.jsonl", ".progress.json", ".step.json")


def is_readable(name: str) -> bool:
    """Return whether a file name has the suffix of an input and does not belong to a dataset of ours."""
    return name.endswith(suffixes()) and not name.endswith(_OUTPUTS)


def read_chunks(
    path: str | Path,
    *,
    skip: int = 0,
    skip_lines: int = 0,
    columns: Sequence[str] | None = None,
    consumed: Callable[[int], None] | None = None,
) -> Iterator[Chunk]:
    """Yield the JSON lines of an input in chunks of about 256 KiB. A line may span several chunks.

    Texts of a table, if they are the only column that is wanted, come as rows instead.

    Args:
        path: File to read, or its address.
        skip: Number of bytes, after decompression, to skip at the start. Plain files are not read up to there.
        skip_lines: Number of lines in these bytes.
        columns: Columns of tables to read; None for all of them.
        consumed: Function that is called with the number of bytes newly read from the file itself.

    Raises:
        CorruptInput: If the data are damaged or truncated.
        DataError: If the file cannot be opened or read.
    """
    path = str(path)
    name = name_of(path)
    with os_errors(DataError, f"{shown(path)} cannot be read"), open_file(path) as opened:
        file = _CountingFile(opened, consumed)
        if name.endswith(_CSV_SUFFIXES):
            yield from _csv(path, file, skip_lines, columns)
            return
        for suffix, table in _BINARY_TABLES.items():
            if name.endswith(suffix):
                check_is_data(file.head, is_text=False)
                yield from table(path, cast(IO[bytes], file), skip_lines, columns)
                return
        if name.endswith(PLAIN_SUFFIXES):
            check_is_data(file.head)
            is_utf_16 = file.head.startswith((b"\xff\xfe", b"\xfe\xff"))
            if packing_of(file.head) is None and not holds_whole_values(file.head) and not is_utf_16:
                file.seek(skip)  # lines of UTF-8, as on disk: the first ones need not be read
                yield from _pieces(file)
                return
            reader = _json()
        else:
            reader = next(reader for suffix, reader in _READERS.items() if name.endswith(suffix))
        for chunk in reader(file):
            if skip < len(chunk):
                yield chunk[skip:]
            skip = max(0, skip - len(chunk))


class _CountingFile(io.RawIOBase):
    """File that reports how many bytes are read from it.

    Attributes:
        head: First bytes of the file, which tell what it holds.
    """

    def __init__(self, file: IO[bytes], consumed: Callable[[int], None] | None) -> None:
        self._file = file
        self._consumed = consumed
        self.head = file.read(HEAD_BYTES)
        self._ahead = self.head  # what has been read from the file, but not yet from this one

    def read(self, size: int = -1) -> bytes:
        data = self._ahead
        if 0 <= size <= len(data):
            self._ahead = data[size:]
            data = data[:size]
        else:
            self._ahead = b""
            data += self._file.read(size if size < 0 else size - len(data))
        if self._consumed is not None:
            self._consumed(len(data))
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_SET and offset == 0 and self.tell() == 0:
            return 0
        if whence == io.SEEK_CUR:
            offset -= len(self._ahead)
        self._ahead = b""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell() - len(self._ahead)


class _FileOfChunks(io.RawIOBase):
    """File of the bytes of an iterator of chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = chunk
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


def _pieces(file: Any) -> Iterator[bytes]:
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
    source = _SealedFile(file, zstandard.ZstdCompressor(write_checksum=True).compress(seal))
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


class _SealedFile:
    """File with some bytes appended.

    Attributes:
        size: Number of bytes read from the file itself.
    """

    def __init__(self, file: Any, seal: bytes) -> None:
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


def _unzipped(file: Any) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb"))


def _unpacked(what: str, opened: Any) -> Iterator[bytes]:
    """Yield the content of a file of gzip, bz2 or xz, opened by its module. Raises CorruptInput if it is damaged."""
    try:
        yield from _pieces(opened)
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CorruptInput(f"{what} data is damaged or truncated ({error})") from error


def _tar_of_zstd(file: Any) -> Iterator[bytes]:
    """Yield the lines of the `.jsonl.zst` files in a tar archive."""
    for member in tar_members(file):
        chunk = _NEWLINE
        for chunk in decompress_zstd(member):
            yield chunk
        if not chunk.endswith(_NEWLINE):
            yield _NEWLINE


def _content(file: _CountingFile, named: str | None = None) -> Iterator[bytes]:
    """Yield the content of a file that may be compressed, whatever its name says.

    Args:
        file: The file.
        named: Suffix of the compression that its name says; None for none. It counts if the first bytes are neither
            text nor of another compression.
    """
    packing = packing_of(file.head)
    if packing is None and not looks_like_text(file.head):
        packing = named
    if packing is None:
        return _pieces(file)
    return _PACKED[packing](file)


def _json(named: str | None = None) -> Callable[[Any], Iterator[bytes]]:
    """Return the reader of JSON lines or an array, for the compression that a name says."""
    return lambda file: json_lines(as_utf_8(_content(file, named)))


def _text_file(file: _CountingFile) -> Iterator[bytes]:
    """Yield a text file as one line, in pieces. All kinds of line ends become newlines, as in lm-dataformat."""
    is_page = packing_of(file.head) is None and file.head.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"<")
    if is_page:  # HTML is text too
        content = _pieces(file)
    else:
        content = as_utf_8(_content(file))
    text = io.TextIOWrapper(io.BufferedReader(_FileOfChunks(content), _CHUNK_BYTES), encoding="utf-8-sig")
    try:
        started = False
        while piece := text.read(_CHUNK_BYTES):
            if not started:
                _check_is_one_text(piece)
            if "\0" in piece:
                raise CorruptInput("the text has NUL bytes: the file is binary, or was not written to its end")
            yield json_string_piece(piece, is_first=not started)
            started = True
        if started:
            yield b'"\n'
    except UnicodeDecodeError as error:
        raise CorruptInput(f"the text is not UTF-8 ({error.reason}); {OTHER_ENCODING}") from error


def _check_is_one_text(piece: str) -> None:
    """Raise CorruptInput if a text begins as JSON lines or a table do, which are other kinds of inputs.

    A file is a table if its first line holds only names of columns, and one of them is usual for texts.
    """
    first = piece.partition("\n")[0].strip()
    if first.startswith("{") and len(first) > 2:
        try:
            orjson.loads(first)
        except orjson.JSONDecodeError:
            return
        raise CorruptInput("it holds JSON lines, not one text: give it a name that ends with .jsonl")
    for delimiter, suffix in ((",", ".csv"), ("\t", ".tsv")):
        names = first.split(delimiter)
        if len(names) > 1 and all(map(str.isidentifier, names)) and not _TEXT_COLUMNS.isdisjoint(names):
            raise CorruptInput(f"it holds a table, not one text: give it a name that ends with {suffix}")


# If several suffixes match, the first one decides.
_READERS: Mapping[str, Callable[[Any], Iterator[bytes]]] = {
    ".jsonl.zst": _json(".zst"),
    ".jsonl.gz": _json(".gz"),
    ".jsonl.bz2": _json(".bz2"),
    ".jsonl.xz": _json(".xz"),
    ".jsonl.zst.tar": _tar_of_zstd,
    ".txt": _text_file,
    ".zip": zip_texts,
    ".tar.gz": lambda file: tar_texts(_unzipped(file)),
    ".tar": tar_texts,
    ".json.gz": _json(".gz"),
    ".json.zst": _json(".zst"),
    ".dat.zst": lambda file: length_prefixed(decompress_zstd(file)),
    ".gz": lambda file: each_line(_unzipped(file)),
    "_data.xz": lambda file: tar_texts(lzma.LZMAFile(file)),  # noqa: SIM115 (`file` is closed by `read_chunks`)
    "openwebtext.tar.xz": lambda file: tar_of_tars(lzma.LZMAFile(file)),  # noqa: SIM115
}
_BINARY_TABLES: Mapping[str, TableReader] = {".parquet": parquet_rows, ".arrow": arrow_rows}
_PACKED: Mapping[str, Callable[[Any], Iterator[bytes]]] = {
    ".gz": lambda file: _unpacked("gzip", _unzipped(file)),
    ".bz2": lambda file: _unpacked("bz2", bz2.BZ2File(file)),
    ".xz": lambda file: _unpacked("xz", lzma.LZMAFile(file)),  # noqa: SIM115
    ".zst": decompress_zstd,
}
_PACKED_TABLES = tuple(f"{table}{packed}" for table in (".csv", ".tsv") for packed in _PACKED)
_CSV_SUFFIXES = (".csv", ".tsv", *_PACKED_TABLES)


def _csv(path: str, file: _CountingFile, skip: int, columns: Sequence[str] | None) -> Iterator[Chunk]:
    """Yield the rows of a CSV file, compressed or not, as JSON lines."""
    plain = name_of(path)
    named = None
    if plain.endswith(_PACKED_TABLES):
        plain, _, packed = plain.rpartition(".")
        named = f".{packed}"
    content = io.BufferedReader(_FileOfChunks(as_utf_8(_content(file, named))), _CHUNK_BYTES)
    return csv_lines(plain, content, skip, columns)


def suffixes() -> tuple[str, ...]:
    """Return the endings of the names of inputs."""
    return (*PLAIN_SUFFIXES, *_BINARY_TABLES, *_CSV_SUFFIXES, *_READERS)
