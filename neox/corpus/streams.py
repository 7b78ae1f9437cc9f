"""Inputs of all formats as streams of JSON lines. Truncation and damage are detected.

The lines of `.jsonl` and its compressed forms are yielded unchanged. `archives` converts the other formats of
lm-dataformat (text, zip, tar, ...): each document becomes a line that is one JSON string, lm-dataformat's old form.

    name ends with           read by                       chunks of about 256 KiB
    .jsonl .ndjson .json     as on disk, or `_content` ->  JSON lines          an array becomes lines (`json_lines`)
    .jsonl.zst .json.gz ...  `_content`, by first bytes    JSON lines          UTF-16 becomes UTF-8 (`as_utf_8`)
    .parquet .arrow .csv     `neox.corpus.tables`          rows: JSON lines, or texts if one column is wanted
    .txt .txt.gz ...         `_one_text`                   one JSON string for the text
    .zip .tar .tar.gz ...    `neox.corpus.archives`        of each member: JSON lines, or one JSON string for its text
    .gz .zst .bz2 .xz        `_by_content`                 by first bytes: JSON lines, a tar archive, or a text a line
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
    tar_lines,
    tar_members,
    tar_of_tars,
    text_line,
    zip_lines,
)
from neox.corpus.contents import (
    BYTE_ORDER_MARK,
    HEAD_BYTES,
    OTHER_ENCODING,
    as_utf_8,
    begins_as_json,
    check_is_data,
    holds_whole_values,
    is_tar,
    json_lines,
    looks_like_text,
    packing_of,
)
from neox.corpus.document import CorruptInput
from neox.corpus.left_out import is_desktop_file
from neox.corpus.tables import Chunk, TableReader, arrow_rows, csv_lines, parquet_rows
from neox.errors import DataError, os_errors
from neox.storage import name_of, open_file, shown

_CHUNK_BYTES = 1 << 18
_NEWLINE = b"\n"
_TEXT_COLUMNS = frozenset({"text", "content", "prompt", "response", "instruction", "output", "messages"})
PLAIN_SUFFIXES = (".jsonl", ".ndjson", ".json")
_OUTPUTS = ("_document.json", ".columns.jsonl", ".progress.json", ".step.json")


def is_readable(name: str) -> bool:
    """Return whether a file name has the suffix of an input, and is none of a dataset of ours or of macOS."""
    return name.endswith(suffixes()) and not is_output(name) and not is_desktop_file(name)


def is_output(name: str) -> bool:
    """Return whether a file name is one that this project writes next to data sets."""
    return name.endswith(_OUTPUTS)


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
        for chunk in reader(file, shown(path)):
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


def _unpacked(what: str, opened: Any) -> Iterator[bytes]:
    """Yield the content of a file of gzip, bz2 or xz, opened by its module. Raises CorruptInput if it is damaged."""
    try:
        yield from _pieces(opened)
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CorruptInput(f"{what} data is damaged or truncated ({error})") from error


def _packing_named(name: str) -> str | None:
    """Return the suffix of a compression at the end of a name; None if there is none."""
    return next((packed for packed in _PACKED if name.endswith(packed)), None)


def _content(file: _CountingFile, named: str | None = None) -> Iterator[bytes]:
    """Yield the content of a file that may be compressed, whatever its name says.

    Args:
        file: The file.
        named: Suffix of the compression that its name says; None for none. It counts if the first bytes are neither
            text nor of another compression.
    """
    packing = packing_of(file.head)
    if packing is None and not looks_like_text(file.head) and not is_tar(file.head):
        packing = named
    if packing is None:
        return _pieces(file)
    return _PACKED[packing](file)


def _json(named: str | None = None) -> Reader:
    """Return the reader of JSON lines or an array, for the compression that a name says."""
    return lambda file, path: json_lines(as_utf_8(_content(file, named)))


def _tar(named: str | None = None) -> Reader:
    """Return the reader of a tar archive, for the compression that a name says."""
    return lambda file, path: tar_lines(_stream(_content(file, named)), path, _member)


def _tar_of_zstd(file: _CountingFile, path: str) -> Iterator[bytes]:
    """Yield the lines of the `.jsonl.zst` files in a tar archive."""
    for _, member in tar_members(file, path):
        chunk = _NEWLINE
        for chunk in decompress_zstd(member):
            yield chunk
        if not chunk.endswith(_NEWLINE):
            yield _NEWLINE


def _member(name: str, stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a member of an archive: those of JSON, or one line for a text.

    The same checks are made as for files of these contents.
    """
    file = _CountingFile(stream, None)
    content = _peekable(as_utf_8(_content(file, _packing_named(name)), pages_are_text=_is_text_name(name)))
    head = content.peek(_CHUNK_BYTES)
    if begins_as_json(head) or name.removesuffix(_packing_named(name) or "").endswith(PLAIN_SUFFIXES):
        last = _NEWLINE
        for last in json_lines(_pieces(content)):
            yield last
        if not last.endswith(_NEWLINE):
            yield _NEWLINE
        return
    _check_is_no_table(head)
    yield from text_line(_pieces(content))


def _by_content(named: str) -> Reader:
    """Return the reader of a compressed file whose name says nothing of its content.

    JSON lines and tar archives are read as such. Of any other text each line is a document, as in lm-dataformat.
    """

    def read(file: _CountingFile, path: str) -> Iterator[bytes]:
        unpacked = _peekable(_content(file, named))
        if is_tar(unpacked.peek(HEAD_BYTES)):
            yield from tar_lines(unpacked, path, _member)
            return
        content = _peekable(as_utf_8(_pieces(unpacked)))
        head = content.peek(_CHUNK_BYTES)
        if begins_as_json(head):
            yield from json_lines(_pieces(content))
            return
        _check_is_no_table(head)
        yield from each_line(_pieces(content))

    return read


def _is_text_name(name: str) -> bool:
    """Return whether a name ends as that of a text, compressed or not."""
    return name.removesuffix(_packing_named(name) or "").endswith(".txt")


def _stream(chunks: Iterator[bytes]) -> io.RawIOBase:
    return _FileOfChunks(chunks)


def _peekable(chunks: Iterator[bytes]) -> io.BufferedReader:
    return io.BufferedReader(_FileOfChunks(chunks), _CHUNK_BYTES)


def _one_text(named: str | None = None) -> Reader:
    """Return the reader of a text file, for the compression that a name says.

    The text becomes one line, in pieces. All kinds of line ends become newlines, as in lm-dataformat.
    """

    def read(file: _CountingFile, path: str) -> Iterator[bytes]:
        content = as_utf_8(_content(file, named), pages_are_text=True)
        text = io.TextIOWrapper(_peekable(content), encoding="utf-8-sig")
        started = False
        try:
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

    return read


def _check_is_one_text(piece: str) -> None:
    """Raise CorruptInput if a text begins as JSON lines or a table do, which are other kinds of inputs."""
    first = piece.partition("\n")[0].strip()
    if first.startswith("{") and len(first) > 2:
        try:
            orjson.loads(first)
        except orjson.JSONDecodeError:
            return
        raise CorruptInput("it holds JSON lines, not one text: give it a name that ends with .jsonl")
    _check_is_no_table(piece.encode())


def _check_is_no_table(head: bytes) -> None:
    """Raise CorruptInput if a text begins with the names of columns, one of which is usual for texts."""
    first = head.removeprefix(BYTE_ORDER_MARK).partition(b"\n")[0].decode("utf-8", "replace").strip()
    for delimiter, suffix in ((",", ".csv"), ("\t", ".tsv")):
        names = first.split(delimiter)
        if len(names) > 1 and all(map(str.isidentifier, names)) and not _TEXT_COLUMNS.isdisjoint(names):
            raise CorruptInput(f"it holds a table, not one text: give it a name that ends with {suffix}")


Reader = Callable[[_CountingFile, str], Iterator[bytes]]
"""Yields the lines of an opened file, whose path is for messages."""
_PACKED: Mapping[str, Callable[[Any], Iterator[bytes]]] = {
    ".gz": lambda file: _unpacked("gzip", gzip.GzipFile(fileobj=file, mode="rb")),
    ".bz2": lambda file: _unpacked("bz2", bz2.BZ2File(file)),
    ".xz": lambda file: _unpacked("xz", lzma.LZMAFile(file)),  # noqa: SIM115 (`file` is closed by `read_chunks`)
    ".zst": decompress_zstd,
}
# If several suffixes match, the first one decides.
_READERS: Mapping[str, Reader] = {
    ".jsonl.zst.tar": _tar_of_zstd,
    "openwebtext.tar.xz": lambda file, path: tar_of_tars(_stream(_content(file, ".xz")), path, _member),
    "_data.xz": _tar(".xz"),
    ".zip": lambda file, path: zip_lines(file, path, _member),
    ".tar": _tar(),
    ".tgz": _tar(".gz"),
    ".txt": _one_text(),
    ".dat.zst": lambda file, path: length_prefixed(_PACKED[".zst"](file)),
    **{f"{plain}{packed}": _json(packed) for plain in PLAIN_SUFFIXES for packed in _PACKED},
    **{f".tar{packed}": _tar(packed) for packed in _PACKED},
    **{f".txt{packed}": _one_text(packed) for packed in _PACKED},
    **{packed: _by_content(packed) for packed in _PACKED},
}
_BINARY_TABLES: Mapping[str, TableReader] = {".parquet": parquet_rows, ".arrow": arrow_rows}
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
