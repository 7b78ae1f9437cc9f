"""The tokenizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from neox.config.sections.base import Section


class TokenizerConfig(Section):
    """How text becomes ids."""

    tokenizer_type: Literal[
        "GPT2BPETokenizer",
        "HFTokenizer",
        "HFGPT2Tokenizer",
        "SPMTokenizer",
        "CharLevelTokenizer",
        "TiktokenTokenizer",
    ] = "GPT2BPETokenizer"
    """Kind of tokenizer; `HFTokenizer` reads a `tokenizer.json`."""

    vocab_file: str | None = None
    """The tokenizer's vocabulary file."""

    merge_file: str | None = None
    """Merges of GPT2BPETokenizer."""

    padded_vocab_size: int | None = Field(None, ge=1)
    """Rows of the embedding. Derived from the vocabulary; where given, at least that large and a multiple of
    model_parallel_size."""
