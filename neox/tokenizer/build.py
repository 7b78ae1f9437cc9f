"""Choose a tokenizer by NeoX's `tokenizer_type`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from neox.errors import TokenizerError
from neox.tokenizer.base import Tokenizer

TOKENIZER_TYPES = (
    "HFTokenizer",
    "GPT2BPETokenizer",
    "HFGPT2Tokenizer",
    "SPMTokenizer",
    "CharLevelTokenizer",
    "TiktokenTokenizer",
)


def build_tokenizer(
    tokenizer_type: str,
    vocab_file: str | Path | None,
    merge_file: str | Path | None = None,
    *,
    special_in_text: bool | None = None,
) -> Tokenizer:
    """Return the tokenizer of a NeoX `tokenizer_type`; packages are imported only for the type that needs them.

    special_in_text: whether a literal `<|endoftext|>` in a text becomes the end-of-document id. None follows gpt-neox:
        yes for HFTokenizer and HFGPT2Tokenizer, no for the others.
    Raises TokenizerError for an unknown type, a missing or unreadable file, or a package that is not installed.
    """
    choice: dict[str, Any] = {} if special_in_text is None else {"special_in_text": special_in_text}
    if tokenizer_type in ("HFTokenizer", "HFGPT2Tokenizer", "GPT2BPETokenizer"):
        from neox.tokenizer import huggingface

        path = _needed(vocab_file, tokenizer_type, "vocab_file")
        if tokenizer_type == "HFTokenizer":
            return huggingface.HFTokenizer(path, **choice)
        if tokenizer_type == "HFGPT2Tokenizer":
            return huggingface.HFGPT2Tokenizer(path, merge_file, **choice)
        return huggingface.GPT2BPETokenizer(path, _needed(merge_file, tokenizer_type, "merge_file"), **choice)
    if tokenizer_type not in TOKENIZER_TYPES:
        near = difflib.get_close_matches(tokenizer_type, TOKENIZER_TYPES, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TokenizerError(f"tokenizer_type {tokenizer_type!r} is unknown{hint} Known: {', '.join(TOKENIZER_TYPES)}")
    if special_in_text:
        raise TokenizerError(f"{tokenizer_type} cannot read special tokens inside a text: leave special_in_text out")
    if tokenizer_type == "SPMTokenizer":
        from neox.tokenizer.sentencepiece import SPMTokenizer

        return SPMTokenizer(_needed(vocab_file, tokenizer_type, "vocab_file"))
    if tokenizer_type == "TiktokenTokenizer":
        from neox.tokenizer.tiktoken import TiktokenTokenizer

        return TiktokenTokenizer(str(_needed(vocab_file, tokenizer_type, "vocab_file")))
    from neox.tokenizer.character import CharLevelTokenizer

    return CharLevelTokenizer()


def _needed(value: str | Path | None, tokenizer_type: str, key: str) -> str | Path:
    if value is None:
        raise TokenizerError(f"{tokenizer_type} needs {key}: set it in the YAML, or --{key.replace('_', '-')} in tools")
    return value
