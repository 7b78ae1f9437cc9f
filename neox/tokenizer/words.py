"""Encoder with a cache of words. It is exact for byte-level BPE with GPT-2's pre-tokenizer.

GPT-2's pattern never looks back, and NFC never joins white space to the character before it. Therefore a text can be
cut before white space that follows another character, and in scripts without spaces between a letter and a punctuation
mark. The ids of the pieces are then the ids of the text. Pieces of ASCII are split into GPT-2's words by a pattern that
needs no Unicode tables. Pieces with other characters are encoded by `tokenizers` as a whole.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import orjson

from neox.errors import TokenizerError
from neox.tokenizer.base import Tokenizer
from neox.tokenizer.huggingface import HFTokenizer

_SPACE = r"\t-\r "  # the ASCII characters of \s in GPT-2's pattern
_CUT = re.compile(
    r"(?<=\S)(?=[ \t\n\r])"
    r"|(?<=[\u3041-\u3096\u30a1-\u30fa\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3])(?=[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
)
_ASCII_WORD = re.compile(
    rf"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^{_SPACE}A-Za-z0-9]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
)
# Byte-level BPE represents the invisible ASCII characters, 0 to 32 and 127, by these characters.
_SPELLING = {code: chr(256 + i) for i, code in enumerate((*range(33), 127))}
_SLICE_CHARS = 1 << 19
_MAX_WORDS = 300_000
_LONGEST_WORD = 48


def cut_reason(tokenizer: Tokenizer) -> str | None:
    """Return the reason why a text may not be cut for a tokenizer; None if it may."""
    if not isinstance(tokenizer, HFTokenizer):
        return f"a {tokenizer.name} is not a Hugging Face tokenizer with byte-level BPE"
    state = orjson.loads(tokenizer.to_json())
    if state["model"]["type"] != "BPE" or state["model"].get("dropout"):
        return "its model is not plain BPE"
    if _step_types(state["normalizer"], "normalizers") not in ([], ["NFC"]):
        return "it has another normalizer than NFC"
    if _step_types(state["post_processor"], "processors") not in ([], ["ByteLevel"]):
        return "it adds ids to a text"
    splits = state["pre_tokenizer"]
    is_byte_level = splits is not None and splits["type"] == "ByteLevel"
    if not is_byte_level or not splits.get("use_regex", True) or splits.get("add_prefix_space"):
        return "it does not split texts like GPT-2"
    for token in state["added_tokens"]:
        depends_on_context = token["lstrip"] or token["rstrip"] or token["single_word"]
        if depends_on_context or _CUT.search(token["content"]) is not None:
            return f"its added token {token['content']!r} depends on the characters around it"
    return None


def _step_types(step: dict[str, Any] | None, members: str) -> list[str]:
    """Return the types of a step of a `tokenizer.json`. A sequence of steps stores them under `members`."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [member["type"] for member in step[members]]
    return [step["type"]]


def cut(text: str, size: int) -> Iterator[str]:
    """Yield a text in pieces of about `size` characters. The ids of the pieces are the ids of the text."""
    start = 0
    while len(text) - start > size:
        found = _CUT.search(text, start + size)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


class WordEncoder:
    """Encoder that looks words up in a cache of bounded size. `tokenizers` encodes the words that are not in it."""

    name = "words"
    needs_cuts = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        reason = cut_reason(tokenizer)
        if reason is not None or not isinstance(tokenizer, HFTokenizer):
            raise TokenizerError(f"the accelerator `words` cannot serve this tokenizer: {reason}")
        self._tokenizer = tokenizer
        self._dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self._ids: dict[str, bytes] = {}
        self._bpe = tokenizer.backend.model.tokenize
        added_tokens = orjson.loads(tokenizer.to_json())["added_tokens"]
        alternatives = [r"[^\x00-\x7f]+"]
        for token in added_tokens:
            alternatives.append(re.escape(token["content"]))
        self._not_ascii_words = re.compile("|".join(alternatives))

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts, uint32 [all tokens], and the length of each, int64 [texts]."""
        encoded: list[bytes] = []
        lengths = np.zeros(len(texts), dtype=np.int64)
        for number, text in enumerate(texts):
            for piece in cut(text, _SLICE_CHARS):
                ids = self._encode(piece)
                lengths[number] += len(ids) // self._dtype.itemsize
                encoded.append(ids)
        return np.frombuffer(b"".join(encoded), self._dtype).astype(np.uint32), lengths

    def _encode(self, text: str) -> bytes:
        """Return the ids of a text as bytes of `_dtype`."""
        # It is split into ASCII words. A piece with other characters or an added token is not split further:
        #
        #     To| be| or naïve| questions
        #           start     done
        words: list[str] = []
        done = 0  # number of characters split so far
        for found in self._not_ascii_words.finditer(text):
            if found.start() < done:
                continue
            start = found.start()  # moved back to the last place where the text can be cut
            while start > done and (text[start] not in " \t\n\r" or text[start - 1].isspace()):
                start -= 1
            words += _ASCII_WORD.findall(text, done, start)
            cut_after = _CUT.search(text, found.end())
            if cut_after is None:
                done = len(text)
            else:
                done = cut_after.start()
            words.append(text[start:done])
        words += _ASCII_WORD.findall(text, done)
        try:
            return b"".join(map(self._ids.__getitem__, words))
        except KeyError:
            return self._learn(words)

    def _learn(self, words: list[str]) -> bytes:
        """Encode the words of a text, some of which are unknown, and cache the short ones."""
        if len(self._ids) > _MAX_WORDS:
            self._ids.clear()
        ids: dict[str, bytes] = {}
        pieces = []  # for `tokenizers`
        for word in set(words):
            known = self._ids.get(word)
            if known is not None:
                ids[word] = known
            elif self._not_ascii_words.search(word) is None:
                ids[word] = self._pack(token.id for token in self._bpe(word.translate(_SPELLING)))
            else:
                pieces.append(word)
        for piece, piece_ids in zip(pieces, self._tokenizer.encode_batch(pieces), strict=True):
            ids[piece] = self._pack(piece_ids)
        for word, word_ids in ids.items():
            if len(word) <= _LONGEST_WORD:
                self._ids[word] = word_ids
        return b"".join(map(ids.__getitem__, words))

    def _pack(self, ids: Iterable[int]) -> bytes:
        return array(self._dtype.char, ids).tobytes()
