"""Tokenizer of OpenAI's named encodings (`cl100k_base`). It needs the optional package `tiktoken`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neox.errors import TokenizerError, needs_package
from neox.tokenizer.base import Tokenizer


class TiktokenTokenizer(Tokenizer):
    """Tokenizer of an encoding of `tiktoken` (gpt-neox's TiktokenTokenizer). `vocab_file` is the encoding's name.

    A literal special token in a text is encoded as ordinary text. gpt-neox raises an error there.
    """

    name = "TiktokenTokenizer"

    def __init__(self, encoding: str) -> None:
        with needs_package(TokenizerError, "TiktokenTokenizer", "tiktoken", "requirements-corpus.txt"):
            import tiktoken
        try:
            self._encoding = tiktoken.get_encoding(encoding)
        except ValueError as error:
            raise TokenizerError(
                f"vocab_file {encoding!r} is not an encoding of tiktoken; "
                f"known: {', '.join(tiktoken.list_encoding_names())}"
            ) from error
        except OSError as error:  # tiktoken downloads an encoding when it is first used
            raise TokenizerError(
                f"tiktoken could not download {encoding!r} ({error}); download it once on a machine with internet "
                "access, and set TIKTOKEN_CACHE_DIR to the directory that holds it"
            ) from error
        self.vocab_size = self._encoding.n_vocab
        self.eod = self._encoding.eot_token

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        return self._encoding.encode_ordinary_batch(list(texts))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self._encoding.decode([int(i) for i in ids])

    def decode_shown(self, ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens."""
        return self.decode([i for i in ids if self.special_name(i) is None])

    def special_name(self, token: int) -> str | None:
        """Return the text of a special token; None for other tokens."""
        if not self._encoding.is_special_token(token):
            return None
        return str(self._encoding.decode([token]))

    def _content(self) -> Any:
        return [self._encoding.name, self._encoding.n_vocab]
