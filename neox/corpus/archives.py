"""Older formats of lm-dataformat, converted to JSON lines.

Each text becomes one line that holds one JSON string. Members of archives are read in pieces, and never held in memory
as a whole. What an archive holds besides documents (entries of macOS and editors, links, empty files) is left out, and
counted in a log line.
"""

from __future__ import annotations

import codecs
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import orjson

from neox.corpus.contents import OTHER_ENCODING
from neox.corpus.document import CorruptInput
from neox.corpus.left_out import LeftOut

_PIECE_BYTES = 1 << 18
_LENGTH_DIGITS = 16
_TAR_BLOCK = 512
_DAMAGE_ERRORS = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
)
# What zipfile raises for encrypted members, unknown compression methods and the like.
_UNSUPPORTED_ERRORS = (NotImplementedError, RuntimeError, KeyError, ValueError)


MemberReader = Callable[[str, IO[bytes]], Iterator[bytes]]
"""Yields the lines of a member of an archive, by its name and its bytes."""


def zip_lines(file: Any, path: str, read_member: MemberReader) -> Iterator[bytes]:
    """Yield the lines of the files of a zip archive.

    Args:
        file: The archive, an opened file.
        path: Its name, for messages.
        read_member: Reader of a member.
    """
    left_out = LeftOut(path)
    with _corrupt_input("zip archive"), zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.is_dir():
                continue
            if not left_out.takes(member.filename, member.file_size):
                continue
            with archive.open(member) as stream:
                yield from _member_lines(member.filename, stream, read_member)
    left_out.report()


def tar_lines(stream: Any, path: str, read_member: MemberReader) -> Iterator[bytes]:
    """Yield the lines of the files of a tar archive.

    Args:
        stream: Stream of decompressed bytes. It is read to its end, because compressed data store their checksum
            there. (tarfile's own decompression checks neither the checksum nor truncation.)
        path: Name of the archive, for messages.
        read_member: Reader of a member.
    """
    for name, member in tar_members(stream, path):
        yield from _member_lines(name, member, read_member)


def tar_of_tars(stream: Any, path: str, read_member: MemberReader) -> Iterator[bytes]:
    """Yield the lines of the files of the `.xz` archives inside an archive. OpenWebText has this form."""
    for name, member in tar_members(stream, path):
        with lzma.LZMAFile(member) as archive:
            yield from tar_lines(archive, f"{path}: {name}", read_member)


def _member_lines(name: str, stream: IO[bytes], read_member: MemberReader) -> Iterator[bytes]:
    """Yield the lines of a member. Raises CorruptInput with its name."""
    try:
        yield from read_member(name, stream)
    except CorruptInput as error:
        raise CorruptInput(f"member {name}: {error}") from error


def tar_members(stream: Any, path: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield names and contents of the files of a tar archive that may be documents.

    Args:
        stream: Stream of decompressed bytes.
        path: Name of the archive, for messages.

    Raises:
        CorruptInput: If the archive is damaged, or the block of zeros at its end is missing. tarfile does not check
            the latter.
    """
    left_out = LeftOut(path)
    remembering = _StreamWithTail(stream)
    with _corrupt_input("tar archive"):
        with tarfile.open(fileobj=remembering, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                if member.isdir():
                    continue
                if not member.isfile():
                    left_out.add("links or devices", member.name)
                    continue
                if not left_out.takes(member.name, member.size):
                    continue
                file = archive.extractfile(member)
                assert file is not None, "a file of a tar archive has contents"
                yield member.name, file
        while remembering.read(_PIECE_BYTES):
            pass
    tail = remembering.tail
    if len(tail) < _TAR_BLOCK or any(tail):
        raise CorruptInput("tar archive is truncated: the empty block at its end is missing")
    left_out.report()


class _StreamWithTail:
    """Stream that remembers the last bytes that were read.

    Attributes:
        tail: The last bytes, at most one tar block.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.tail = b""

    def read(self, size: int) -> bytes:
        data: bytes = self._stream.read(size)
        self.tail = (self.tail + data[-_TAR_BLOCK:])[-_TAR_BLOCK:]
        return data


def each_line(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield each line of a text as a document. The newline belongs to the document."""
    line: list[bytes] = []
    with _corrupt_input("text"):
        for chunk in chunks:
            start = 0
            while end := chunk.find(b"\n", start) + 1:
                yield from text_line([*line, chunk[start:end]])
                line = []
                start = end
            line.append(chunk[start:])
        yield from text_line(line)


def length_prefixed(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the documents of a `.dat` file as lines. Sixteen digits before each document give its size in bytes."""
    source = _ChunkReader(chunks)
    with _corrupt_input("data"):
        while length := b"".join(source.take(_LENGTH_DIGITS)):
            if len(length) < _LENGTH_DIGITS or not length.isdigit():
                raise CorruptInput(f"the data is damaged or truncated: {length!r} is no length of a document")
            yield from text_line(source.take(int(length)))
            if source.ended_early:
                raise CorruptInput("the data is truncated: it ends inside a document")


def text_line(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a text as one line that holds one JSON string; nothing for an empty text.

    Args:
        pieces: UTF-8 of the text. A character may be split between two pieces.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    started = False
    try:
        for piece in pieces:
            text = decoder.decode(piece)
            if "\0" in text:
                raise CorruptInput("the text has NUL bytes: the file is binary, or was not written to its end")
            if text:
                yield json_string_piece(text, is_first=not started)
                started = True
        decoder.decode(b"", final=True)  # raises an error if the text ends inside a character
    except UnicodeDecodeError as error:
        raise CorruptInput(f"the text is not UTF-8 ({error.reason}); {OTHER_ENCODING}") from error
    if started:
        yield b'"\n'


def json_string_piece(text: str, *, is_first: bool) -> bytes:
    """Return a piece of a JSON string: without the closing quote and, except for the first one, the opening quote."""
    encoded = orjson.dumps(text)
    if is_first:
        return encoded[:-1]
    return encoded[1:-1]


class _ChunkReader:
    """Reader of a given number of bytes from a stream of chunks.

    Attributes:
        ended_early: Whether the stream ended before the last `take` had all its bytes.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._left = b""
        self.ended_early = False

    def take(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes in pieces."""
        self.ended_early = False
        while size:
            self._left = self._left or next(self._chunks, b"")
            if not self._left:
                self.ended_early = True
                return
            piece = self._left[:size]
            self._left = self._left[size:]
            size -= len(piece)
            yield piece


@contextmanager
def _corrupt_input(what: str) -> Iterator[None]:
    """Raise a CorruptInput that names `what` instead of the errors of the libraries that read archives."""
    try:
        yield
    except _DAMAGE_ERRORS as error:
        raise CorruptInput(f"{what} is damaged or truncated ({error})") from error
    except _UNSUPPORTED_ERRORS as error:
        raise CorruptInput(f"{what} cannot be read ({type(error).__name__}: {error})") from error
