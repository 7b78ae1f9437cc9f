"""Count of characters in evaluation data, for perplexities per character (`char_level_ppl`)."""

from __future__ import annotations

from collections.abc import Iterator

from neox.engine import Engine, Feature, RunStart, TrainedModel
from neox.objectives import Batch
from neox.tokenizer import Tokenizer, tokenizer_of


def build(model: TrainedModel, start: RunStart) -> CharacterCounter | None:
    """Return the counter; None without `char_level_ppl`."""
    if not model.plan.config.training.char_level_ppl:
        return None
    return CharacterCounter(tokenizer_of(model.plan.config))


class CharacterCounter(Feature):
    """Counts the tokens that enter the loss on this rank, and the characters of their text.

    Special tokens have no characters, as with gpt-neox's HFTokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start with no tokens.

        Args:
            tokenizer: Tokenizer of the data.
        """
        self._tokenizer = tokenizer
        self._tokens = 0
        self._characters = 0

    def evaluation_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches, counting their tokens and characters."""
        for batch in batches:
            for labels, mask in zip(batch["labels"], batch["loss_mask"], strict=True):
                ids = labels[mask > 0].tolist()
                self._tokens += len(ids)
                self._characters += len(self._tokenizer.decode_shown(ids))
            yield batch

    def tokens_per_character(self, engine: Engine) -> float:
        """Return the tokens per character of all ranks since the last call; all ranks call it together.

        Batches that several ranks read are counted several times, all equally often, so the ratio does not change.
        """
        counts = engine.gather((self._tokens, self._characters))
        self._tokens = 0
        self._characters = 0
        tokens = 0
        characters = 0
        for own_tokens, own_characters in counts:
            tokens += own_tokens
            characters += own_characters
        return tokens / max(characters, 1)
