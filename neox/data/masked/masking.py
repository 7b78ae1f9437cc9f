"""Choice of the masked tokens of a sample, as in BERT (arXiv:1810.04805)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from neox.errors import DataError
from neox.tokenizer import Tokenizer

# Of the chosen tokens, these shares are masked and kept. Random tokens replace the others.
_MASKED_SHARE = 0.8
_KEPT_SHARE = 0.1
# Names of the special tokens in BERT's vocabularies, Megatron-LM's SentencePiece vocabularies, and others.
_NAMES = {
    "cls": ("[CLS]", "<CLS>", "<cls>", "<s>"),
    "sep": ("[SEP]", "<SEP>", "<sep>", "</s>"),
    "mask": ("[MASK]", "<MASK>", "<mask>"),
    "pad": ("[PAD]", "<PAD>", "<pad>", "<|padding|>"),
}


@dataclass(frozen=True)
class MaskingVocabulary:
    """Special tokens and word pieces of a vocabulary.

    Attributes:
        cls: Id at the start of a sample.
        sep: Id after each sentence.
        mask: Id that replaces a masked token.
        pad: Id of padding.
        size: Number of ids. Random tokens are drawn from all of them.
        continues: Whether each id continues the word of the token before it, bool [size].
    """

    cls: int
    sep: int
    mask: int
    pad: int
    size: int
    continues: np.ndarray

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> MaskingVocabulary:
        """Return the vocabulary of a tokenizer. Raises DataError if it lacks a special token."""
        ids = {field: _first_id(tokenizer, names) for field, names in _NAMES.items()}
        return cls(**ids, size=tokenizer.vocab_size, continues=np.asarray(tokenizer.word_continuations()))


def _first_id(tokenizer: Tokenizer, names: tuple[str, ...]) -> int:
    """Return the id of the first token that the vocabulary has. Raises DataError if it has none."""
    for name in names:
        found = tokenizer.token_id(name)
        if found is not None:
            return found
    raise DataError(
        f"the vocabulary has none of {', '.join(names)}, and `objective: masked_lm` needs one; use a vocabulary of "
        "BERT, or train one (tools/train_tokenizer.py --kind wordpiece)"
    )


class Masked(NamedTuple):
    """Sample with masked tokens.

    Attributes:
        tokens: Ids of the sample, some of which are replaced, int64 [n].
        positions: Positions of the tokens to predict, ascending, int64 [predictions].
        ids: Original ids of the tokens to predict, int64 [predictions].
    """

    tokens: np.ndarray
    positions: np.ndarray
    ids: np.ndarray


def mask_tokens(
    tokens: np.ndarray,
    vocabulary: MaskingVocabulary,
    random: np.random.Generator,
    *,
    share: float,
    most: int,
    whole_words: bool,
) -> Masked:
    """Choose the tokens of a sample to predict, and replace most of them.

    Of the chosen tokens, 80 % become [MASK], 10 % become random ids, and 10 % are kept. [CLS] and [SEP] are never
    chosen.

    Args:
        tokens: Ids of the sample without padding, int64 [n].
        vocabulary: Vocabulary of the ids.
        random: Source of the draws.
        share: Share of all tokens to choose, but at least one token.
        most: Largest number of tokens to choose.
        whole_words: Whether all pieces of a word are chosen together.
    """
    candidates = np.flatnonzero((tokens != vocabulary.cls) & (tokens != vocabulary.sep))
    wanted = min(most, max(1, round(share * len(tokens))))
    if whole_words:
        positions = _choose_words(tokens, candidates, vocabulary, random, wanted)
    else:
        positions = np.sort(random.permutation(candidates)[:wanted])
    ids = tokens[positions]
    draws = random.random(len(positions))
    replaced = np.where(draws < _MASKED_SHARE, vocabulary.mask, ids)
    is_random = draws >= _MASKED_SHARE + _KEPT_SHARE
    replaced[is_random] = random.integers(vocabulary.size, size=len(positions))[is_random]
    masked = tokens.copy()
    masked[positions] = replaced
    return Masked(masked, positions, ids)


def _choose_words(
    tokens: np.ndarray,
    candidates: np.ndarray,
    vocabulary: MaskingVocabulary,
    random: np.random.Generator,
    wanted: int,
) -> np.ndarray:
    """Choose the tokens of whole words. A word that has more tokens than are still wanted is skipped.

    Args:
        tokens: Ids of the sample.
        candidates: Positions that may be chosen, ascending [candidates].
        vocabulary: Vocabulary of the ids.
        random: Source of the order in which words are tried.
        wanted: Number of tokens to choose.

    Returns:
        Chosen positions, ascending.
    """
    # A piece continues a word only if it directly follows a piece of the word.
    continues = vocabulary.continues[tokens[candidates]] & (np.diff(candidates, prepend=-2) == 1)
    words = np.cumsum(~continues) - 1  # number of the word of each candidate
    sizes = np.bincount(words)
    is_chosen = np.zeros(len(sizes), bool)
    room = wanted
    for word in random.permutation(len(sizes)).tolist():
        if sizes[word] <= room:
            is_chosen[word] = True
            room -= int(sizes[word])
            if not room:
                break
    return candidates[is_chosen[words]]
