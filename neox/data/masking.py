"""Masked tokens of a sample, as BERT chooses them (arXiv:1810.04805)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from neox.errors import DataError
from neox.tokenizer import Tokenizer

_MASKED, _KEPT = 0.8, 0.1  # of the chosen tokens; the rest are replaced by random ones
# Names of the special tokens: BERT's, Megatron-LM's of SentencePiece, and those of other vocabularies.
_NAMES = {
    "cls": ("[CLS]", "<CLS>", "<cls>", "<s>"),
    "sep": ("[SEP]", "<SEP>", "<sep>", "</s>"),
    "mask": ("[MASK]", "<MASK>", "<mask>"),
    "pad": ("[PAD]", "<PAD>", "<pad>", "<|padding|>"),
}


@dataclass(frozen=True)
class MaskingVocabulary:
    """What masking needs to know of a vocabulary.

    Attributes:
        cls: Id at the start of a sample.
        sep: Id after each sentence.
        mask: Id that replaces a masked token.
        pad: Id of padding.
        size: Number of ids, from which random tokens are drawn.
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
        """Return the vocabulary of a tokenizer. Raises DataError for a special token that it lacks."""
        ids: dict[str, int] = {}
        for field, names in _NAMES.items():
            known = [number for name in names if (number := tokenizer.token_id(name)) is not None]
            if not known:
                raise DataError(
                    f"the vocabulary has none of {', '.join(names)}, which `objective: masked_lm` needs: use a "
                    "vocabulary of BERT's, or train one (tools/train_tokenizer.py --kind wordpiece)"
                )
            ids[field] = known[0]
        return cls(**ids, size=tokenizer.vocab_size, continues=np.asarray(tokenizer.word_continuations()))


class Masked(NamedTuple):
    """A sample with masked tokens.

    Attributes:
        tokens: The ids, of which some are replaced, int64 [n].
        positions: Positions of the tokens to predict, ascending, int64 [predictions].
        ids: Their original ids, int64 [predictions].
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
    """Choose the tokens of a sample that are to be predicted, and replace them.

    `share` of the tokens are chosen, at least one and at most `most`, never [CLS] or [SEP]. Of these 80 % become
    [MASK], 10 % stay, and 10 % become random ids. With `whole_words` the pieces of a word are chosen together; a word
    for which no room is left is passed over.

    Args:
        tokens: Ids of the sample without padding, int64 [n].
        vocabulary: The vocabulary.
        random: Source of the draws.
        share: Share of the tokens, special ones counted.
        most: Most predictions.
        whole_words: Whether words are masked as a whole.
    """
    may = np.flatnonzero((tokens != vocabulary.cls) & (tokens != vocabulary.sep))
    wanted = min(most, max(1, round(share * len(tokens))))
    if whole_words:
        # A piece belongs to the word before it only where it follows it at once.
        follows = vocabulary.continues[tokens[may]] & (np.diff(may, prepend=-2) == 1)
        word = np.cumsum(~follows) - 1
        sizes = np.bincount(word)
        order = random.permutation(len(sizes))
        chosen, room = np.zeros(len(sizes), bool), wanted
        for number in order.tolist():
            if sizes[number] <= room:
                chosen[number] = True
                room -= int(sizes[number])
                if not room:
                    break
        positions = may[chosen[word]]
    else:
        positions = np.sort(random.permutation(may)[:wanted])
    ids = tokens[positions]
    draw = random.random(len(positions))
    replaced = np.where(draw < _MASKED, vocabulary.mask, ids)
    free = draw >= _MASKED + _KEPT
    replaced[free] = random.integers(vocabulary.size, size=len(positions))[free]
    masked = tokens.copy()
    masked[positions] = replaced
    return Masked(masked, positions, ids)
