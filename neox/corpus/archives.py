"""Older formats of lm-dataformat as JSON lines, piece by piece, so that no member of an archive is held in memory.

Each document becomes a line that is one JSON string.
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
from pathlib import Path
from typing import IO, Any

import orjson

from neox.corpus.document import CorruptInput

_PIECE_BYTES = 1 << 18
_LONGEST_ARRAY = 1 << 28
_LENGTH_DIGITS = 16
_TAR_BLOCK = 512
_DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    UnicodeDecodeError,
)
_REFUSED = (NotImplementedError, RuntimeError, KeyError, ValueError)  # zipfile's: encrypted, unknown compression, ...


def zip_texts(path: Path) -> Iterator[bytes]:
    """Yield each file of a zip archive as a line."""
    with _naming("zip archive"), zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as stream:
                yield from text_line(_pieces(stream))


def tar_texts(stream: Any) -> Iterator[bytes]:
    """Yield each file of a tar archive as a line.

    Args:
        stream: Decompressed stream. It is read to its end, where compressed data have their checksum; tarfile's own
            decompression checks neither that nor truncation.
    """
    for inner in tar_members(stream):
        yield from text_line(_pieces(inner))


def tar_of_tars(stream: Any) -> Iterator[bytes]:
    """Yield each file of the archives inside an archive as a line (OpenWebText's form: all of them `.xz`)."""
    for inner in tar_members(stream):
        with lzma.LZMAFile(inner) as plain:
            yield from tar_texts(plain)


def tar_members(stream: Any) -> Iterator[IO[bytes]]:
    """Yield the files of a tar archive. Raises CorruptInput without the end that tarfile does not check."""
    ended = _Tail(stream)
    with _naming("tar archive"):
        with tarfile.open(fileobj=ended, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                inner = archive.extractfile(member)
                if inner is not None:
                    yield inner
        while ended.read(_PIECE_BYTES):
            pass
    if len(ended.tail) < _TAR_BLOCK or any(ended.tail):
        raise CorruptInput("tar archive is truncated: the empty block at its end is missing")


class _Tail:
    """Stream that keeps its last bytes, at most a block, as `tail`."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.tail = stream, b""

    def read(self, size: int) -> bytes:
        data: bytes = self._stream.read(size)
        self.tail = (self.tail + data[-_TAR_BLOCK:])[-_TAR_BLOCK:]
        return data


def each_line(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield each line of a text as a document, including its newline."""
    line: list[bytes] = []
    with _naming("gzip data"):
        while piece := stream.readline(_PIECE_BYTES):
            line.append(piece)
            if piece.endswith(b"\n"):
                yield from text_line(line)
                line = []
        yield from text_line(line)


def length_prefixed(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the documents of a `.dat`, each after 16 digits with its number of bytes."""
    source = _Bytes(chunks)
    with _naming("data"):
        while length := b"".join(source.take(_LENGTH_DIGITS)):
            if len(length) < _LENGTH_DIGITS or not length.isdigit():
                raise CorruptInput(f"the data is damaged or truncated: {length!r} is no length of a document")
            yield from text_line(source.take(int(length)))
            if source.missing:
                raise CorruptInput("the data is truncated: it ends inside a document")


def array_elements(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the elements of one JSON array, which is held in memory and has a limit."""
    data = bytearray()
    for chunk in chunks:
        data += chunk
        if len(data) > _LONGEST_ARRAY:
            raise CorruptInput(
                f"it is one JSON array of more than {_LONGEST_ARRAY:,} bytes, which would have to be held in memory; "
                "write its elements as lines (.jsonl.zst)"
            )
    try:
        elements = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CorruptInput(f"not JSON ({error})") from error
    if not isinstance(elements, list):
        raise CorruptInput("it should be one JSON array of documents")
    for element in elements:
        yield orjson.dumps(element) + b"\n"


def text_line(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a text, given in pieces of UTF-8, as a line that is one JSON string; nothing if it is empty."""
    decoder, begun = codecs.getincrementaldecoder("utf-8")(), False
    for piece in pieces:
        if text := decoder.decode(piece):
            yield orjson.dumps(text)[1 if begun else 0 : -1]
            begun = True
    decoder.decode(b"", final=True)
    if begun:
        yield b'"\n'


class _Bytes:
    """Chunks as a stream; `missing` is whether the last `take` met the end too soon."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks, self._held, self.missing = iter(chunks), b"", False

    def take(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes in pieces."""
        self.missing = False
        while size:
            self._held = self._held or next(self._chunks, b"")
            if not self._held:
                self.missing = True
                return
            piece, self._held = self._held[:size], self._held[size:]
            size -= len(piece)
            yield piece


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    while piece := stream.read(_PIECE_BYTES):
        yield piece


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise CorruptInput(f"{what} is damaged, truncated or not text ({error})") from error
    except _REFUSED as error:
        raise CorruptInput(f"{what} cannot be read ({type(error).__name__}: {error})") from error
