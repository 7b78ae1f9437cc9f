"""Tokenizers of the library `tokenizers`: a `tokenizer.json`, or GPT-2's vocabulary and merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from neox.errors import TokenizerError
from neox.tokenizer.base import END_OF_DOCUMENT, PADDING, Tokenizer

TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_BERT_END = "[SEP]"
_END_TOKENS = (END_OF_DOCUMENT, "</s>", "<|end_of_text|>", _BERT_END)
"""Tokens that end documents where `tokenizer_config.json` names none: of GPT-NeoX and GPT-2, Llama 2 and 3, BERT."""
_WORD_PIECE = "##"
BERT_UNKNOWN = "[UNK]"
BERT_SPECIALS: Mapping[str, str] = MappingProxyType(
    {
        "pad_token": "[PAD]",
        "unk_token": BERT_UNKNOWN,
        "cls_token": "[CLS]",
        "sep_token": _BERT_END,
        "mask_token": "[MASK]",
    }
)
"""BERT's special tokens by Hugging Face's names, in the order of its vocabularies."""


class HFTokenizer(Tokenizer):
    """Tokenizer of a `tokenizer.json` of Hugging Face, such as `20B_tokenizer.json`.

    The `eos_token` of a `tokenizer_config.json` beside a `tokenizer.json` ends documents; without one `<|endoftext|>`
    does, or `</s>`, or `<|end_of_text|>`, the first that is in the vocabulary.

    A literal `<|endoftext|>` in a text becomes the end-of-document id, as in gpt-neox (it is an added token there);
    `special_in_text=False` encodes it as ordinary text, whatever the end-of-document token is named.
    Padding and truncation stored in the file are switched off.

    Attributes:
        backend: The tokenizer of the library.
        special_in_text: Whether special tokens in a text are recognized.
        eod_token: Token that ends a document.
    """

    name = "HFTokenizer"

    def __init__(self, path: str | Path, *, special_in_text: bool = True) -> None:
        eos = special_token(Path(path), "eos_token")
        self._setup(_from_file(Path(path)), str(path), (eos,) if eos else _END_TOKENS, special_in_text)

    def _setup(
        self, backend: tokenizers.Tokenizer, origin: str, eod_tokens: Sequence[str], special_in_text: bool
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = not special_in_text
        self.backend = backend
        self.special_in_text = special_in_text
        self.vocab_size = backend.get_vocab_size()
        self.eod, self.eod_token = _end_of_document(backend, eod_tokens, origin)
        self.pad = backend.token_to_id(PADDING)
        if self.is_bert:  # BERT's tokenizers add [CLS] and [SEP], which samples do here
            backend.post_processor = processors.Sequence([])

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self.backend.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary has none."""
        found: int | None = self.backend.token_to_id(token)
        return found

    def word_continuations(self) -> list[bool]:
        """Return whether each id continues a word: WordPiece's pieces that start with `##`."""
        return [(self.backend.id_to_token(i) or "").startswith(_WORD_PIECE) for i in range(self.vocab_size)]

    @property
    def is_bert(self) -> bool:
        """Whether the vocabulary is BERT's: [SEP] ends its documents."""
        return self.eod_token == _BERT_END

    def paired(self) -> tokenizers.Tokenizer:
        """Return BERT's tokenizer as Hugging Face has it, which adds [CLS] and [SEP] to a text or a pair of texts."""
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        cls, sep = BERT_SPECIALS["cls_token"], BERT_SPECIALS["sep_token"]
        ids = {token: backend.token_to_id(token) for token in (cls, sep)}
        if None in ids.values():
            raise TokenizerError(f"the vocabulary lacks {cls} or {sep}, which BERT's inputs begin and end with")
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1", special_tokens=list(ids.items())
        )
        return backend

    def to_json(self) -> str:
        """Return the text of a `tokenizer.json`, for accelerators that read this format."""
        return self.backend.to_str()

    def _content(self) -> Any:
        state = orjson.loads(self.backend.to_str())
        for key in ("version", "truncation", "padding"):
            state.pop(key, None)
        return {"tokenizer": state, "eod": self.eod}


class HFGPT2Tokenizer(HFTokenizer):
    """GPT-2's byte-level BPE as in Hugging Face's `GPT2TokenizerFast`.

    `<|endoftext|>` in a text is the end-of-document id, and `<|padding|>` is added as one more id.
    """

    name = "HFGPT2Tokenizer"

    def __init__(self, path: str | Path, merge_file: str | Path | None = None, *, special_in_text: bool = True) -> None:
        """Read the vocabulary.

        Args:
            path: Directory with `tokenizer.json` or `vocab.json` and `merges.txt`, a `tokenizer.json`, or a
                `vocab.json`.
            merge_file: `merges.txt` of a `vocab.json` (default: in the same directory).
            special_in_text: Whether special tokens in a text are recognized.

        Raises:
            TokenizerError: If a file is missing or unreadable, or has no `<|endoftext|>`.
        """
        backend = _gpt2_like(Path(path), None if merge_file is None else Path(merge_file))
        backend.add_special_tokens([END_OF_DOCUMENT, PADDING])
        self._setup(backend, str(path), [END_OF_DOCUMENT], special_in_text)


class GPT2BPETokenizer(HFTokenizer):
    """GPT-2's original byte-level BPE from `vocab.json` and `merges.txt`.

    A literal `<|endoftext|>` in a text is encoded as ordinary text, as OpenAI's encoder and gpt-neox do;
    `special_in_text=True` encodes it as the end-of-document id.
    """

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str | Path, merge_file: str | Path, *, special_in_text: bool = False) -> None:
        backend = _byte_level_bpe(Path(vocab_file), Path(merge_file))
        if special_in_text:
            backend.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
        self._setup(backend, str(vocab_file), [END_OF_DOCUMENT], special_in_text)

    def _content(self) -> Any:
        content = super()._content()
        content["tokenizer"]["added_tokens"] = []  # `special_in_text` adds one
        return content


class WordPieceTokenizer(HFTokenizer):
    """BERT's tokenizer from a `vocab.txt` (a token a line) or a `tokenizer.json`. [SEP] ends documents.

    Chinese characters are words of their own. [CLS] and [SEP] are not added to texts: samples add them.
    """

    lowercase: bool

    def __init__(self, path: str | Path, *, special_in_text: bool = False) -> None:
        path = Path(path)
        backend = _from_file(path) if path.suffix == ".json" else _word_piece(path, lowercase=self.lowercase)
        self._setup(backend, str(path), [_BERT_END], special_in_text)


class BertWordPieceLowerCase(WordPieceTokenizer):
    """BERT's uncased tokenizer: texts in lower case, without accents."""

    name = "BertWordPieceLowerCase"
    lowercase = True


class BertWordPieceCase(WordPieceTokenizer):
    """BERT's cased tokenizer."""

    name = "BertWordPieceCase"
    lowercase = False


def word_piece_backend(model: models.WordPiece, *, lowercase: bool) -> tokenizers.Tokenizer:
    """Return BERT's tokenizer around a WordPiece model."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=_WORD_PIECE)
    return backend


def _word_piece(path: Path, *, lowercase: bool) -> tokenizers.Tokenizer:
    _check_file(path, "vocabulary file")
    try:
        model = models.WordPiece.from_file(str(path), unk_token=BERT_UNKNOWN, max_input_chars_per_word=200)
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path}: not a vocabulary of BERT's, one token a line ({error})") from error
    backend = word_piece_backend(model, lowercase=lowercase)
    special = [token for token in BERT_SPECIALS.values() if backend.token_to_id(token) is not None]
    if BERT_UNKNOWN not in special:
        raise TokenizerError(f"{path}: the vocabulary has no token {BERT_UNKNOWN!r}: is it a vocab.txt of BERT's?")
    backend.add_special_tokens(special)
    return backend


def _from_file(path: Path) -> tokenizers.Tokenizer:
    _check_file(path, "tokenizer file")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(
            f"{path}: not a tokenizer.json that `tokenizers` {tokenizers.__version__} can read ({error}); "
            "make one with tools/train_tokenizer.py, or give vocab.json and merges.txt to GPT2BPETokenizer"
        ) from error


def _byte_level_bpe(vocab_file: Path, merge_file: Path) -> tokenizers.Tokenizer:
    """Build GPT-2's tokenizer without special tokens, so that a literal `<|endoftext|>` is ordinary text."""
    _check_file(vocab_file, "vocabulary file")
    _check_file(merge_file, "merges file")
    try:
        model = models.BPE.from_file(str(vocab_file), str(merge_file))
    except Exception as error:
        raise TokenizerError(
            f"{vocab_file} and {merge_file}: not a GPT-2 vocabulary (one JSON object, token to id) with its merges "
            f"(two tokens a line): {error}"
        ) from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _gpt2_like(path: Path, merge_file: Path | None) -> tokenizers.Tokenizer:
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return _from_file(path / "tokenizer.json")
        return _byte_level_bpe(path / "vocab.json", path / "merges.txt")
    if merge_file is not None:
        return _byte_level_bpe(path, merge_file)
    if (path.parent / "merges.txt").is_file() and path.name == "vocab.json":
        return _byte_level_bpe(path, path.parent / "merges.txt")
    return _from_file(path)


def _check_file(path: Path, what: str) -> None:
    if not path.is_file():
        why = "is a directory" if path.is_dir() else "does not exist"
        raise TokenizerError(
            f"{what} {path} {why}; set vocab_file (and merge_file for GPT2BPETokenizer) to an existing file, "
            "or make one with tools/train_tokenizer.py"
        )


def tokenizer_config(vocab_file: Path) -> Mapping[str, Any]:
    """Return the `tokenizer_config.json` beside a `tokenizer.json`; nothing for a file of another name.

    Raises:
        TokenizerError: If the configuration cannot be read.
    """
    path = vocab_file.parent / TOKENIZER_CONFIG
    if vocab_file.name != TOKENIZER_FILE or not path.is_file():
        return {}
    try:
        config = orjson.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError(f"it holds a {type(config).__name__}")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read as a JSON object: {error}") from error
    return config


def special_token(vocab_file: Path, key: str) -> str | None:
    """Return a special token that the `tokenizer_config.json` beside a `tokenizer.json` names.

    Args:
        vocab_file: The `tokenizer.json`; a file of another name belongs to no configuration.
        key: Such as `eos_token`.

    Raises:
        TokenizerError: If the configuration cannot be read.
    """
    value = tokenizer_config(vocab_file).get(key)
    return value.get("content") if isinstance(value, dict) else value


def _end_of_document(backend: tokenizers.Tokenizer, tokens: Sequence[str], origin: str) -> tuple[int, str]:
    """Return id and text of the first token of `tokens` that is in the vocabulary."""
    for token in tokens:
        if (found := backend.token_to_id(token)) is not None:
            return found, token
    raise TokenizerError(
        f"{origin}: the vocabulary has no token {' or '.join(map(repr, tokens))}, which ends a document; add it to the "
        f"vocabulary (tools/train_tokenizer.py does), or name it as `eos_token` in a {TOKENIZER_CONFIG} beside a "
        f"{TOKENIZER_FILE}"
    )
