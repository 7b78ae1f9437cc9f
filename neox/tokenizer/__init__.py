"""Tokenizers, which convert between text and ids. `accelerators` encodes many texts at once (it needs numpy)."""

from neox.tokenizer.base import END_OF_DOCUMENT, PADDING, Tokenizer
from neox.tokenizer.huggingface import (
    ADDED_TOKENS_DECODER,
    BERT_SPECIALS,
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    HFTokenizer,
    end_ids_of,
    generation_config,
    special_token,
    tokenizer_backend,
)
from neox.tokenizer.identity import (
    TokenizerIdentity,
    identify,
    identify_configured,
    is_larger,
    other_tokenizer,
    saved_tokenizer_identity,
    write_tokenizer_identity,
)
from neox.tokenizer.tokenizer_types import TOKENIZER_TYPES, build_tokenizer, tokenizer_of
from neox.tokenizer.train import TOKENIZER_KINDS, TokenizerKind, tokenizer_files, train_tokenizer

__all__ = [
    "ADDED_TOKENS_DECODER",
    "BERT_SPECIALS",
    "END_OF_DOCUMENT",
    "GENERATION_CONFIG",
    "PADDING",
    "SPECIAL_TOKENS_MAP",
    "TOKENIZER_CONFIG",
    "TOKENIZER_FILE",
    "TOKENIZER_KINDS",
    "TOKENIZER_TYPES",
    "HFTokenizer",
    "Tokenizer",
    "TokenizerIdentity",
    "TokenizerKind",
    "build_tokenizer",
    "end_ids_of",
    "generation_config",
    "identify",
    "identify_configured",
    "is_larger",
    "other_tokenizer",
    "saved_tokenizer_identity",
    "special_token",
    "tokenizer_backend",
    "tokenizer_files",
    "tokenizer_of",
    "train_tokenizer",
    "write_tokenizer_identity",
]
