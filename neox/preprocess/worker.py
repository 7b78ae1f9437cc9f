"""One worker process: lines of JSON in, flat token ids out. Buffers travel as they are, nothing is pickled."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import orjson

from neox.corpus import BadInput, LineBlock, Position, parse_texts
from neox.errors import NeoXError, TokenizerError, install_command
from neox.preprocess.settings import TokenizerSpec
from neox.tokenizer import Tokenizer
from neox.tokenizer.flat import choose_encoder, first_difference, longest_piece
from neox.tokenizer.words import cut_reason

_CHECKED_CHARS = 2048  # the tokenizer itself takes about a hundred times as long, so a check must stay small
_CHECKED_AMONG = 16


@dataclass(frozen=True)
class EncodeJob:
    """What a worker does to each block.

    dtype: of the ids it returns. sample: texts to check the accelerator with, the same for every worker, so that all
    choose the same one. piece_bytes: of text in one piece; a longer one is a bad input.
    """

    tokenizer: TokenizerSpec
    accelerator: str
    keys: tuple[str, ...]
    append_eod: bool
    ftfy: bool
    dtype: str
    sample: tuple[str, ...] = ()
    piece_bytes: int = 1 << 24


@dataclass(frozen=True)
class EncodedKey:
    """The documents of one key in a block: ids [all tokens], lengths int32 [documents]."""

    ids: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class EncodedBlock:
    """A block's documents for each key, its bad lines, and where the next block starts.

    text_bytes: of the block. accelerator: used for it, None before the choice; note: what that passed over.
    """

    end: Position
    keys: tuple[EncodedKey, ...]
    bad: tuple[BadInput, ...]
    text_bytes: int
    accelerator: str | None
    note: str | None


class BlockEncoder:
    """Encode blocks in this process. tokenizer: the job's, where it is at hand; else it is built."""

    def __init__(self, job: EncodeJob, tokenizer: Tokenizer | None = None) -> None:
        self.job = job
        self.tokenizer = tokenizer or job.tokenizer.build()
        self.dtype = np.dtype(job.dtype)
        self.fix = load_ftfy() if job.ftfy else None
        choice = choose_encoder(self.tokenizer, job.accelerator, job.sample)
        self.encoder, self.note = choice.encoder, choice.note

    def encode(self, block: LineBlock) -> EncodedBlock:
        """Parse, repair, encode and close each document; documents without ids are left out."""
        columns, bad = parse_texts(block, self.job.keys, self._problem if self.encoder.needs_cuts else None)
        keys = tuple(self._encode_key(texts) for texts in columns)
        return EncodedBlock(block.end, keys, tuple(bad), len(block.data), self.encoder.name, self.note)

    def _problem(self, text: str) -> str | None:
        """Refuse a text that would take too much memory at once."""
        allowed = self.job.piece_bytes
        if 4 * len(text) <= allowed:
            return None
        size = longest_piece(text, allowed // 8, may_cut=self._may_cut)
        if size <= allowed:
            return None
        return (
            f"{size:,} bytes of text without a place where they may be cut, more than the {allowed:,} that memory "
            "allows (--memory-mb; fastokens, where it serves the tokenizer, needs no such place)"
        )

    @cached_property
    def _may_cut(self) -> bool:
        return cut_reason(self.tokenizer) is None

    def _encode_key(self, texts: list[str]) -> EncodedKey:
        if self.fix is not None:
            texts = [fixed for text in texts if (fixed := self.fix(text))]
        if not texts:
            return EncodedKey(np.empty(0, self.dtype), np.empty(0, np.int32))
        ids, lengths = self.encoder.encode_flat(texts)
        self._check_one(texts, len(ids))
        lengths = lengths[lengths > 0]
        if self.job.append_eod:
            return EncodedKey(*_closed(ids, lengths, self.tokenizer.eod, self.dtype))
        return EncodedKey(ids.astype(self.dtype), lengths.astype(np.int32))

    def _check_one(self, texts: Sequence[str], seed: int) -> None:
        """Compare one short document of each block, if one is at hand, with the tokenizer's own ids."""
        if self.encoder.name == "off":
            return
        start = seed % len(texts)
        short = (text for text in texts[start : start + _CHECKED_AMONG] if len(text) <= _CHECKED_CHARS)
        difference = first_difference(self.encoder, self.tokenizer, list(islice(short, 1)))
        if difference is not None:
            raise TokenizerError(f"{difference}. Run again with --accelerator off --restart; nothing was finished")


def _closed(ids: np.ndarray, lengths: np.ndarray, eod: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Put the end-of-document id behind each document."""
    lengths = lengths + 1
    last = np.cumsum(lengths) - 1
    out = np.empty(len(ids) + len(lengths), dtype)
    keep = np.ones(len(out), bool)
    keep[last] = False
    out[keep] = ids
    out[last] = eod
    return out, lengths.astype(np.int32)


def load_ftfy() -> Callable[[str], str]:
    """Return `ftfy.fix_text`; TokenizerError if the package is missing."""
    try:
        import ftfy
    except ImportError as error:
        raise TokenizerError(f"--ftfy needs the package ftfy: {install_command('requirements-corpus.txt')}") from error
    return ftfy.fix_text


def serve(connection: Connection) -> None:
    """Take a job, then answer blocks until the other side closes; the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what Ctrl-C means
    os.environ.update(RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")  # one process per core already
    try:
        job: EncodeJob = connection.recv()
        try:
            encoder: BlockEncoder | NeoXError = BlockEncoder(job)
        except NeoXError as error:
            encoder = error
        while True:
            header = orjson.loads(connection.recv_bytes())
            block = LineBlock(
                header["file"], connection.recv_bytes(), Position(*header["start"]), Position(*header["end"])
            )
            try:
                if isinstance(encoder, NeoXError):
                    raise encoder
                _send_result(connection, encoder.encode(block))
            except NeoXError as error:
                connection.send_bytes(orjson.dumps({"error": str(error)}))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the main process is gone or has no more work


def send_block(connection: Connection, block: LineBlock) -> None:
    """Hand a block to a worker."""
    start, end = block.start, block.end
    header = {"file": block.file, "start": [start.line, start.offset], "end": [end.line, end.offset]}
    connection.send_bytes(orjson.dumps(header))
    connection.send_bytes(block.data)


def _send_result(connection: Connection, result: EncodedBlock) -> None:
    header: dict[str, Any] = {"bad": [[bad.line, bad.offset, bad.reason] for bad in result.bad]}
    header |= {"accelerator": result.accelerator, "note": result.note}
    connection.send_bytes(orjson.dumps(header))
    for key in result.keys:
        connection.send_bytes(key.ids.data)
        connection.send_bytes(key.lengths.data)


def receive_result(connection: Connection, block: LineBlock, job: EncodeJob) -> EncodedBlock:
    """Wait for a worker's answer. Raises TokenizerError with its message, EOFError or OSError if it died."""
    header = orjson.loads(connection.recv_bytes())
    if "error" in header:
        raise TokenizerError(header["error"])
    keys = tuple(
        EncodedKey(np.frombuffer(connection.recv_bytes(), job.dtype), np.frombuffer(connection.recv_bytes(), np.int32))
        for _ in job.keys
    )
    bad = tuple(BadInput(block.file, line, offset, reason) for line, offset, reason in header["bad"])
    return EncodedBlock(block.end, keys, bad, len(block.data), header["accelerator"], header["note"])
