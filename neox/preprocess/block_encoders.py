"""Encoders of blocks of lines, as the processes of a preprocessing run choose and call them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from neox.corpus import BadInput, LineBlock
from neox.preprocess.chat import ChatEncoder
from neox.preprocess.encode import BlockEncoder, EncodedBlock, EncodeJob
from neox.preprocess.preference_lines import PreferenceEncoder
from neox.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodeWork:
    """Function that encodes a block, for a `WorkerPool`. Each process builds its encoder for its first block."""

    job: EncodeJob

    def __call__(self, item: LineBlock | BadInput) -> EncodedBlock | BadInput:
        """Return the encoded block. A bad input is returned unchanged, so that it keeps its place in the order."""
        if isinstance(item, BadInput):
            return item
        return self.encoder.encode(item)

    @cached_property
    def encoder(self) -> BlockEncoder | ChatEncoder | PreferenceEncoder:
        """Encoder of this process."""
        return build_encoder(self.job)


def build_encoder(job: EncodeJob, tokenizer: Tokenizer | None = None) -> BlockEncoder | ChatEncoder | PreferenceEncoder:
    """Return the encoder of texts, conversations or preferences. Arguments and errors are those of the encoders."""
    settings = job.settings
    if settings.chat is not None:
        return ChatEncoder(job, settings.chat, tokenizer)
    if settings.preferences is not None:
        return PreferenceEncoder(job, settings.preferences, tokenizer)
    return BlockEncoder(job, tokenizer)


def text_size(item: LineBlock | BadInput) -> int:
    """Return the number of bytes of text in an item."""
    if isinstance(item, BadInput):
        return 0
    return len(item.data)


def lines_of(item: LineBlock | BadInput) -> str:
    """Return the name of an item in messages: its file and lines."""
    if isinstance(item, BadInput):
        return str(item)
    return f"{item.file}:{item.start.line} to line {item.end.line - 1}"
