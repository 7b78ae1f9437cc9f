"""One id per byte of UTF-8: no vocabulary file, nothing to train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neox.tokenizer.base import Tokenizer


class CharLevelTokenizer(Tokenizer):
    """gpt-neox's character tokenizer: the bytes of the text, end-of-document 0, padding 1, vocabulary 512.

    gpt-neox raises ids below 32 to a space when it decodes; here every byte comes back as it was, and ids above 255 and
    the end of a document are written as U+FFFD.
    """

    name = "CharLevelTokenizer"

    @property
    def vocab_size(self) -> int:
        return 512

    @property
    def eod(self) -> int:
        return 0

    @property
    def pad(self) -> int:
        return 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        runs = bytes(i if 0 < i < 256 else 0 for i in ids).split(b"\0")
        return "\ufffd".join(run.decode("utf-8", "replace") for run in runs)

    def _content(self) -> Any:
        return "utf-8 bytes, eod 0, pad 1, vocabulary 512"
