"""Older formats of lm-dataformat, converted to JSON lines.

Each document becomes one line that holds one JSON string. Members of archives are read in pieces, and never held in
memory as a whole.
"""

from __future__ import annotations

import codecs
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import orjson

from neox.corpus.document import CorruptInput

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
    UnicodeDecodeError,
)
# What zipfile raises for encrypted members, unknown compression methods and the like.
_UNSUPPORTED_ERRORS = (NotImplementedError, RuntimeError, KeyError, ValueError)


def zip_texts(file: Any) -> Iterator[bytes]:
    """Yield each file of a zip archive, an opened file, as a line."""
    with _corrupt_input("zip archive"), zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            with archive.open(member) as stream:
                yield from text_line(_pieces(stream))


def tar_texts(stream: Any) -> Iterator[bytes]:
    """Yield each file of a tar archive as a line.

    Args:
        stream: Stream of decompressed bytes. It is read to its end, because compressed data store their checksum
            there. (tarfile's own decompression checks neither the checksum nor truncation.)
    """
    for member in tar_members(stream):
        yield from text_line(_pieces(member))


def tar_of_tars(stream: Any) -> Iterator[bytes]:
    """Yield each file of the `.xz` archives inside an archive as a line. OpenWebText has this form."""
    for member in tar_members(stream):
        with lzma.LZMAFile(member) as archive:
            yield from tar_texts(archive)


def tar_members(stream: Any) -> Iterator[IO[bytes]]:
    """Yield the files of a tar archive.

    Args:
        stream: Stream of decompressed bytes.

    Raises:
        CorruptInput: If the archive is damaged, or the block of zeros at its end is missing. tarfile does not check
            the latter.
    """
    remembering = _StreamWithTail(stream)
    with _corrupt_input("tar archive"):
        with tarfile.open(fileobj=remembering, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                file = archive.extractfile(member)
                if file is not None:
                    yield file
        while remembering.read(_PIECE_BYTES):
            pass
    tail = remembering.tail
    if len(tail) < _TAR_BLOCK or any(tail):
        raise CorruptInput("tar archive is truncated: the empty block at its end is missing")


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


def each_line(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield each line of a text as a document. The newline belongs to the document."""
    line: list[bytes] = []
    with _corrupt_input("gzip data"):
        while piece := stream.readline(_PIECE_BYTES):
            line.append(piece)
            if piece.endswith(b"\n"):
                yield from text_line(line)
                line = []
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
    for piece in pieces:
        text = decoder.decode(piece)
        if text:
            yield json_string_piece(text, is_first=not started)
            started = True
    decoder.decode(b"", final=True)  # raises an error if the text ends inside a character
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


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    while piece := stream.read(_PIECE_BYTES):
        yield piece


@contextmanager
def _corrupt_input(what: str) -> Iterator[None]:
    """Raise a CorruptInput that names `what` instead of the errors of the libraries that read archives."""
    try:
        yield
    except _DAMAGE_ERRORS as error:
        raise CorruptInput(f"{what} is damaged, truncated or not text ({error})") from error
    except _UNSUPPORTED_ERRORS as error:
        raise CorruptInput(f"{what} cannot be read ({type(error).__name__}: {error})") from error
