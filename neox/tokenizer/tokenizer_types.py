"""Choice of a tokenizer by NeoX's key `tokenizer_type`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from neox.errors import TokenizerError
from neox.tokenizer.base import CharLevelTokenizer, Tokenizer
from neox.tokenizer.huggingface import (
    BertWordPieceCase,
    BertWordPieceLowerCase,
    GPT2BPETokenizer,
    HFGPT2Tokenizer,
    HFTokenizer,
    WordPieceTokenizer,
)
from neox.tokenizer.sentencepiece import SPMTokenizer
from neox.tokenizer.tiktoken import TiktokenTokenizer

if TYPE_CHECKING:
    from neox.config import NeoXConfig

TOKENIZER_TYPES = (
    "HFTokenizer",
    "GPT2BPETokenizer",
    "HFGPT2Tokenizer",
    "SPMTokenizer",
    "CharLevelTokenizer",
    "TiktokenTokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
)

_WORD_PIECE: Mapping[str, type[WordPieceTokenizer]] = MappingProxyType(
    {kind.name: kind for kind in (BertWordPieceLowerCase, BertWordPieceCase)}
)


def tokenizer_of(config: NeoXConfig) -> Tokenizer:
    """Build the tokenizer of a configuration. Raises the same errors as `build_tokenizer`."""
    keys = config.tokenizer
    return build_tokenizer(keys.tokenizer_type, keys.vocab_file, keys.merge_file, added_tokens=keys.added_tokens)


def build_tokenizer(
    tokenizer_type: str,
    vocab_file: str | Path | None,
    merge_file: str | Path | None = None,
    *,
    special_in_text: bool | None = None,
    added_tokens: Sequence[str] = (),
) -> Tokenizer:
    """Build the tokenizer of a NeoX `tokenizer_type`.

    Args:
        tokenizer_type: One of TOKENIZER_TYPES.
        vocab_file: File of the vocabulary. Its format depends on the type.
        merge_file: File `merges.txt` of the types for GPT-2.
        special_in_text: Whether a literal `<|endoftext|>` in a text becomes the end-of-document id. By default it does
            with HFTokenizer and HFGPT2Tokenizer only, as in gpt-neox.
        added_tokens: Tokens that are added after the vocabulary of the files.

    Raises:
        TokenizerError: If the type is unknown, a file is missing or unreadable, or a package is not installed.
    """
    tokenizer = _tokenizer_of_files(tokenizer_type, vocab_file, merge_file, special_in_text)
    if added_tokens:
        if not isinstance(tokenizer, HFTokenizer):
            raise TokenizerError(
                f"{tokenizer_type} cannot take added_tokens: use a tokenizer.json, or train the vocabulary with them"
            )
        tokenizer.add_tokens(added_tokens)
    return tokenizer


def _tokenizer_of_files(
    tokenizer_type: str,
    vocab_file: str | Path | None,
    merge_file: str | Path | None,
    special_in_text: bool | None,
) -> Tokenizer:
    """Build a tokenizer as its files describe it. Arguments as for `build_tokenizer`."""
    if tokenizer_type not in TOKENIZER_TYPES:
        hint = ""
        for similar in difflib.get_close_matches(tokenizer_type, TOKENIZER_TYPES, n=1, cutoff=0.4):
            hint = f" (did you mean {similar}?)"
        raise TokenizerError(f"tokenizer_type {tokenizer_type!r} is unknown{hint}. Known: {', '.join(TOKENIZER_TYPES)}")
    if special_in_text and tokenizer_type in ("SPMTokenizer", "CharLevelTokenizer", "TiktokenTokenizer"):
        raise TokenizerError(f"{tokenizer_type} cannot read special tokens inside a text: leave special_in_text out")
    if tokenizer_type == "CharLevelTokenizer":
        return CharLevelTokenizer()
    path = _required(vocab_file, tokenizer_type, "vocab_file")
    if tokenizer_type == "SPMTokenizer":
        return SPMTokenizer(path)
    if tokenizer_type == "TiktokenTokenizer":
        return TiktokenTokenizer(str(path))
    if tokenizer_type == "GPT2BPETokenizer":
        merges = _required(merge_file, tokenizer_type, "merge_file")
        return GPT2BPETokenizer(path, merges, special_in_text=special_in_text is True)
    if tokenizer_type in _WORD_PIECE:
        return _WORD_PIECE[tokenizer_type](path, special_in_text=special_in_text is True)
    if tokenizer_type == "HFGPT2Tokenizer":
        return HFGPT2Tokenizer(path, merge_file, special_in_text=special_in_text is not False)
    return HFTokenizer(path, special_in_text=special_in_text is not False)


def _required(value: str | Path | None, tokenizer_type: str, key: str) -> str | Path:
    if value is None:
        raise TokenizerError(f"{tokenizer_type} needs {key}: set it in the YAML, or --{key.replace('_', '-')} in tools")
    return value
