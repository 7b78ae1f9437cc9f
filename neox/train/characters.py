"""Characters in the tokens of an evaluation, for perplexities by character (`char_level_ppl`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from neox.data.batches import Batch
from neox.tokenizer import Tokenizer

Gather = Callable[[tuple[int, int]], Sequence[tuple[int, int]]]
"""Function that all ranks call together; it returns the value of each rank."""


class CharacterCounter:
    """Counts the tokens in the loss of the batches that this rank reads, and the characters that they stand for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start with no tokens.

        Args:
            tokenizer: Tokenizer of the data.
        """
        self._tokenizer = tokenizer
        self._tokens = 0
        self._characters = 0

    def counted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches, and count them."""
        for batch in batches:
            for labels, mask in zip(batch["labels"], batch["loss_mask"], strict=True):
                ids = labels[mask > 0].tolist()
                self._tokens += len(ids)
                self._characters += len(self._tokenizer.decode(ids))
            yield batch

    def take_tokens_per_character(self, gather: Gather) -> float:
        """Return the tokens per character since the last call, over all ranks, which call it together.

        Ranks that read the same batches count them equally often, which leaves the ratio as it is.
        """
        counts = gather((self._tokens, self._characters))
        self._tokens = 0
        self._characters = 0
        tokens = 0
        characters = 0
        for own_tokens, own_characters in counts:
            tokens += own_tokens
            characters += own_characters
        return tokens / max(characters, 1)
