"""Tokenizers: text to ids and back; `flat` (with numpy) encodes many texts at once."""

from neox.tokenizer.base import END_OF_DOCUMENT, PADDING, Tokenizer
from neox.tokenizer.build import TOKENIZER_TYPES, build_tokenizer
from neox.tokenizer.train import TOKENIZER_KINDS, TokenizerKind, train_tokenizer

__all__ = [
    "END_OF_DOCUMENT",
    "PADDING",
    "TOKENIZER_KINDS",
    "TOKENIZER_TYPES",
    "Tokenizer",
    "TokenizerKind",
    "build_tokenizer",
    "train_tokenizer",
]
