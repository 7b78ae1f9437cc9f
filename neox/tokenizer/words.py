"""Encoder with a cache of words, exact for byte-level BPE with GPT-2's pre-tokenizer.

GPT-2's pattern never looks back, and NFC never joins a white-space character to the one before it. So a text may be cut
before white space that follows another character (or, in scripts without spaces, between a letter and a full stop), and
the ids of the pieces are the ids of the text. ASCII pieces are split into GPT-2's words by a pattern that needs no
Unicode tables; pieces with other characters are given to `tokenizers` whole.
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

_SPACE = r"\t-\r "  # GPT-2's \s within ASCII
_CUT = re.compile(
    r"(?<=\S)(?=[ \t\n\r])"
    r"|(?<=[\u3041-\u3096\u30a1-\u30fa\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3])(?=[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
)
_ASCII_WORD = re.compile(
    rf"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^{_SPACE}A-Za-z0-9]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
)
# Characters with which byte-level BPE represents the invisible ASCII characters, 0 to 32 and 127.
_SPELLING = {code: chr(256 + i) for i, code in enumerate((*range(33), 127))}
_SLICE_CHARS = 1 << 19
_MAX_WORDS = 300_000
_LONGEST_WORD = 48


def cut_reason(tokenizer: Tokenizer) -> str | None:
    """Return why a tokenizer's texts may not be cut; None if they may."""
    if not isinstance(tokenizer, HFTokenizer):
        return f"a {tokenizer.name} is not byte-level BPE of Hugging Face's kind"
    state = orjson.loads(tokenizer.to_json())
    if state["model"]["type"] != "BPE" or state["model"].get("dropout"):
        return "its model is not plain BPE"
    if _types(state["normalizer"], "normalizers") not in ([], ["NFC"]):
        return "it has another normalizer than NFC"
    if _types(state["post_processor"], "processors") not in ([], ["ByteLevel"]):
        return "it adds ids to a text"
    splitter = state["pre_tokenizer"] or {}
    if splitter.get("type") != "ByteLevel" or splitter.get("add_prefix_space") or not splitter.get("use_regex", True):
        return "it does not split as GPT-2 does"
    for token in state["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or token["single_word"] or _CUT.search(token["content"]):
            return f"its added token {token['content']!r} depends on the characters around it"
    return None


def _types(step: dict[str, Any] | None, inner: str) -> list[str]:
    if step is None:
        return []
    return [each["type"] for each in step[inner]] if step["type"] == "Sequence" else [step["type"]]


def cut(text: str, size: int) -> Iterator[str]:
    """Yield a text in pieces of about `size` characters; their ids are those of the whole."""
    start = 0
    while len(text) - start > size:
        found = _CUT.search(text, start + size)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.start()
    yield text[start:] if start else text


class WordEncoder:
    """Encoder that looks up known words and gives new ones to `tokenizers`; the cache is bounded."""

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
        added = [re.escape(token["content"]) for token in orjson.loads(tokenizer.to_json())["added_tokens"]]
        self._whole = re.compile("|".join([r"[^\x00-\x7f]+", *added]))

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts, uint32 [all tokens], and the length of each, int64 [texts]."""
        encoded = [b"".join(self._encode(piece) for piece in cut(text, _SLICE_CHARS)) for text in texts]
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64) // self._dtype.itemsize
        return np.frombuffer(b"".join(encoded), self._dtype).astype(np.uint32), lengths

    def _encode(self, text: str) -> bytes:
        words = self._words(text)
        try:
            return b"".join(map(self._ids.__getitem__, words))
        except KeyError:
            return self._learn(words)

    def _words(self, text: str) -> list[str]:
        """Split ASCII into words; a piece with other characters or an added token stays whole."""
        words: list[str] = []
        done = 0
        for found in self._whole.finditer(text):
            if found.start() < done:
                continue
            start, end = _cut_before(text, found.start(), done), _CUT.search(text, found.end())
            words += _ASCII_WORD.findall(text, done, start)
            done = len(text) if end is None else end.start()
            words.append(text[start:done])
        words += _ASCII_WORD.findall(text, done)
        return words

    def _learn(self, words: list[str]) -> bytes:
        """Encode the unknown words of a text and cache the short ones."""
        if len(self._ids) > _MAX_WORDS:
            self._ids.clear()
        ids, others = {}, []
        for word in set(words).difference(self._ids):
            if self._whole.search(word) is None:
                ids[word] = self._pack(token.id for token in self._bpe(word.translate(_SPELLING)))
            else:
                others.append(word)
        ids.update(zip(others, map(self._pack, self._tokenizer.encode_batch(others)), strict=True))
        self._ids.update((word, found) for word, found in ids.items() if len(word) <= _LONGEST_WORD)
        ids.update((word, self._ids[word]) for word in set(words).difference(ids))
        return b"".join(map(ids.__getitem__, words))

    def _pack(self, ids: Iterable[int]) -> bytes:
        return array(self._dtype.char, ids).tobytes()


def _cut_before(text: str, position: int, first: int) -> int:
    """Return the last position to cut at or before `position`, at least `first`."""
    while position > first and (text[position] not in " \t\n\r" or text[position - 1].isspace()):
        position -= 1
    return position
