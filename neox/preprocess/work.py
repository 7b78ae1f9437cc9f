"""Work of the processes of a preprocessing run: encode one block of lines after another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from neox.corpus import BadInput, LineBlock
from neox.preprocess.chat import ChatEncoder
from neox.preprocess.encode import BlockEncoder, EncodedBlock, EncodeJob
from neox.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodeWork:
    """Function of a block, for a `WorkerPool`. Each process builds its encoder for the first block."""

    job: EncodeJob

    def __call__(self, item: LineBlock | BadInput) -> EncodedBlock | BadInput:
        """Return the encoded block; a bad input is returned as it is, to keep its place."""
        if isinstance(item, BadInput):
            return item
        return self._encoder.encode(item)

    @cached_property
    def _encoder(self) -> BlockEncoder | ChatEncoder:
        return build_encoder(self.job)


def build_encoder(job: EncodeJob, tokenizer: Tokenizer | None = None) -> BlockEncoder | ChatEncoder:
    """Return the encoder of texts or of conversations; arguments and errors are theirs."""
    chat = job.settings.chat
    if chat is None:
        return BlockEncoder(job, tokenizer)
    return ChatEncoder(job, chat, tokenizer)


def text_size(item: LineBlock | BadInput) -> int:
    """Return the bytes of text of an item."""
    if isinstance(item, BadInput):
        return 0
    return len(item.data)


def lines_of(item: LineBlock | BadInput) -> str:
    """Return what messages call an item: its file and lines."""
    if isinstance(item, BadInput):
        return str(item)
    return f"{item.file}:{item.start.line} to line {item.end.line - 1}"
