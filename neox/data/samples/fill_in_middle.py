"""Fill in the middle: documents rearranged so that a model learns to write text between two others.

A document is divided at two random places. Its parts are written in one of two orders (arXiv:2207.14255, with the
second variant of SPM):

    PSM    PRE prefix SUF suffix MID middle
    SPM    PRE SUF suffix MID prefix middle

A rearranged document has as many tokens as before, so the order of samples does not depend on it. The end of the suffix
makes room for the special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from neox.config.sections.data import DataConfig, FimLevel
from neox.errors import DataError
from neox.tokenizer import Tokenizer, positions

# Prefix, middle and suffix tokens of StarCoder, SantaCoder, Qwen and CodeGemma, DeepSeek, Code Llama, and GLM.
KNOWN_TOKENS = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>"),
    ("▁<PRE>", "▁<MID>", "▁<SUF>"),
    ("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"),
)
_REPLACEMENT = "\ufffd"  # stands for bytes that are not text
_SPECIAL_TOKENS = 3  # in a rearranged document
_CUT_EXAMPLE = "def f(x):\n    return 'naïve  日本' + x"
_SEED = 7  # keeps the draws apart from others with the same seed


class FimTokens(NamedTuple):
    """Ids of special tokens.

    Attributes:
        prefix: Id before the prefix.
        middle: Id before the middle, or before prefix and middle.
        suffix: Id before the suffix.
        eod: End-of-document id.
    """

    prefix: int
    middle: int
    suffix: int
    eod: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, names: Sequence[str] | None) -> FimTokens:
        """Find the tokens in a vocabulary.

        Args:
            tokenizer: Tokenizer with the vocabulary.
            names: Prefix, middle and suffix token. By default the first known ones that the vocabulary has.

        Raises:
            DataError: If the vocabulary lacks a token.
        """
        candidates = KNOWN_TOKENS if names is None else (tuple(names),)
        for candidate in candidates:
            ids = [tokenizer.token_id(name) for name in candidate]
            prefix, middle, suffix = ids
            if prefix is not None and middle is not None and suffix is not None:
                return cls(prefix, middle, suffix, tokenizer.eod)
        listed = "; ".join(" ".join(candidate) for candidate in candidates)
        raise DataError(
            f"the vocabulary lacks tokens for fill in the middle, which `fim_rate` needs (looked for: {listed}); name "
            "its tokens for prefix, middle and suffix with `fim_tokens`, or use a tokenizer that has them"
        )


@dataclass(frozen=True)
class FillInMiddle:
    """Rearrangement of documents.

    Attributes:
        tokens: Special tokens.
        rate: Share of the units that are rearranged.
        spm_rate: Share of the rearranged units that have the order SPM.
        level: Units. `document`: whole documents that fit in a sample. `sample`: the part of each document in a sample.
        divides_at_eod: Whether a sample's documents end at end-of-document tokens, instead of where they were joined.
        seed: Seed of all draws.
        tokenizer: Tokenizer that encodes the parts of a text divided between two characters. None divides between two
            tokens.
    """

    tokens: FimTokens
    rate: float
    spm_rate: float
    level: FimLevel
    seed: int
    tokenizer: Tokenizer | None = None
    divides_at_eod: bool = False

    @classmethod
    def of(cls, data: DataConfig, rate: float, tokenizer: Tokenizer, seed: int) -> FillInMiddle | None:
        """Return the rearrangement of a dataset; None if its rate is 0.

        Args:
            data: Data section of the configuration.
            rate: Share of the units of this dataset that are rearranged.
            tokenizer: Tokenizer of the run.
            seed: Seed of all draws.

        Raises:
            DataError: If the tokenizer lacks the special tokens, or cannot encode parts of texts.
        """
        if rate == 0:
            return None
        tokens = FimTokens.of(tokenizer, data.fim_tokens)
        encoder = None
        if data.fim_split == "characters":
            check_encodes_parts(tokenizer)
            encoder = tokenizer
        divides_at_eod = data.document_boundaries == "eod"
        return cls(tokens, rate, data.fim_spm_rate, data.fim_level, seed, encoder, divides_at_eod)

    def document(self, ids: np.ndarray, entry: int) -> np.ndarray:
        """Return a document, rearranged or not.

        Args:
            ids: Ids of the whole document [tokens].
            entry: Number of the document in the order of training. It determines the draws.

        Returns:
            Ids [tokens].
        """
        random = np.random.default_rng([self.seed, _SEED, 0, entry])
        return self._maybe_rearranged(ids, random)

    def samples(self, rows: np.ndarray, numbers: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return samples in which the part of each document is rearranged or not.

        Args:
            rows: Ids of the samples [samples, tokens].
            numbers: Numbers of the samples, which determine the draws [samples].
            starts: Index in the row at which the document of each token starts [samples, tokens].

        Returns:
            Ids [samples, tokens].
        """
        result = np.empty(rows.shape, dtype=np.int64)
        for row, ids, number, begins in zip(result, rows, numbers.tolist(), starts, strict=True):
            random = np.random.default_rng([self.seed, _SEED, 1, number])
            if self.divides_at_eod:
                ends = np.flatnonzero(ids == self.tokens.eod) + 1
            else:
                ends = np.flatnonzero(np.diff(begins)) + 1
            parts = [self._maybe_rearranged(part, random) for part in np.split(ids, ends)]
            np.concatenate(parts, out=row)
        return result

    def _maybe_rearranged(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return a unit, rearranged or not. An end-of-document token stays at the end."""
        if random.random() >= self.rate:
            return ids
        is_spm = bool(random.random() < self.spm_rate)
        length = len(ids)
        if length and ids[-1] == self.tokens.eod:
            length -= 1
        content = self._rearranged(ids[:length], is_spm, random)
        if content is None:
            return ids
        return np.concatenate([content, ids[length:]])

    def _rearranged(self, ids: np.ndarray, is_spm: bool, random: np.random.Generator) -> np.ndarray | None:
        """Return tokens in the order PSM or SPM, as many as before; None if there is no room for special tokens."""
        room = len(ids) - _SPECIAL_TOKENS
        if room < 0:
            return None
        prefix, middle, suffix = self._divided(ids, random)
        surplus = len(prefix) + len(middle) + len(suffix) - room
        kept_suffix = max(0, len(suffix) - surplus)
        surplus -= len(suffix) - kept_suffix
        if surplus > len(prefix):
            return None
        suffix = suffix[:kept_suffix]
        prefix = prefix[surplus:]
        tokens = self.tokens
        if is_spm:
            parts = [[tokens.prefix, tokens.suffix], suffix, [tokens.middle], prefix, middle]
        else:
            parts = [[tokens.prefix], prefix, [tokens.suffix], suffix, [tokens.middle], middle]
        return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])

    def _divided(self, ids: np.ndarray, random: np.random.Generator) -> list[np.ndarray]:
        """Return the tokens of prefix, middle and suffix. Together they are at least as many as before."""
        if self.tokenizer is not None:
            text = self.tokenizer.decode(ids.tolist())
            first, second = sorted(random.integers(len(text) + 1, size=2).tolist())
            texts = (text[:first], text[first:second], text[second:])
            parts = [positions.continuation(self.tokenizer, part) for part in texts]
            # Otherwise the text does not represent the tokens, or their number would have to grow.
            if _REPLACEMENT not in text and sum(map(len, parts)) >= len(ids):
                return [np.asarray(part, dtype=np.int64) for part in parts]
        return np.split(ids, np.sort(random.integers(len(ids) + 1, size=2)))


def check_encodes_parts(tokenizer: Tokenizer) -> None:
    """Raise DataError if the parts of a text, encoded one by one, are not the text.

    Some tokenizers remove or add blanks, or change letters.
    """
    for place in range(len(_CUT_EXAMPLE) + 1):
        parts = (_CUT_EXAMPLE[:place], _CUT_EXAMPLE[place:])
        ids = [i for part in parts for i in positions.continuation(tokenizer, part)]
        if tokenizer.decode(ids) != _CUT_EXAMPLE:
            raise DataError(
                f"the {tokenizer.name} of this run changes texts that are encoded in parts, so documents cannot be "
                "divided between two characters for `fim_rate`; set `fim_split: tokens`"
            )
