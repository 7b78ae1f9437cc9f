"""Tokenizer of SentencePiece models (`.model` files). It needs the optional package `sentencepiece`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neox.errors import TokenizerError, needs_package
from neox.files import placeholder
from neox.tokenizer.base import END_OF_DOCUMENT, Tokenizer


class SPMTokenizer(Tokenizer):
    """Tokenizer of a SentencePiece model whose vocabulary has a piece `<|endoftext|>` (gpt-neox's SPMTokenizer)."""

    name = "SPMTokenizer"

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        with needs_package(TokenizerError, "SPMTokenizer", "sentencepiece", "requirements-corpus.txt"):
            import sentencepiece
        if not path.is_file():
            raise TokenizerError(f"SentencePiece model {path} does not exist; set vocab_file to a .model file")
        self._model_bytes = path.read_bytes()
        try:
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=self._model_bytes)
        except (RuntimeError, OSError) as error:
            reason = placeholder(self._model_bytes) or f"not a SentencePiece model ({error})"
            raise TokenizerError(f"{path}: {reason}") from error
        self.vocab_size = self._processor.get_piece_size()
        if self._processor.pad_id() >= 0:
            self.pad = self._processor.pad_id()
        self.eod = self._processor.piece_to_id(END_OF_DOCUMENT)
        if self.eod == self._processor.unk_id():
            raise TokenizerError(
                f"{path}: the vocabulary has no piece {END_OF_DOCUMENT!r} to end documents; train the model with "
                f"user_defined_symbols={END_OF_DOCUMENT} (tools/train_tokenizer.py --kind sentencepiece does)"
            )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        ids: list[list[int]] = self._processor.encode(list(texts))
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """Return the ids of a text that follows another text."""
        ids = self.encode(END_OF_DOCUMENT + text)  # the blank of the first text stands before its end then
        return ids[ids.index(self.eod) + 1 :]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return str(self._processor.decode([int(i) for i in ids]))

    def decode_shown(self, ids: Sequence[int]) -> str:
        """Return the text of ids without ends of documents. Control pieces have no text anyway."""
        return self.decode([i for i in ids if i != self.eod])

    def special_name(self, token: int) -> str | None:
        """Return the text of the end of a document; None for other tokens."""
        return END_OF_DOCUMENT if token == self.eod else None

    def token_id(self, token: str) -> int | None:
        """Return the id of a piece; None if it is not in the vocabulary."""
        found: int = self._processor.piece_to_id(token)
        if found == self._processor.unk_id():
            return None
        return found

    def word_continuations(self) -> list[bool]:
        """Return, for each id, whether it continues a word: pieces that do not start with U+2581 do."""
        pieces = self._processor.id_to_piece(list(range(self.vocab_size)))
        return [not piece.startswith("\u2581") for piece in pieces]

    def _content(self) -> Any:
        return hashlib.sha256(self._model_bytes).hexdigest()
