"""Fields of a batch of masked language modelling."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MaskedLMBatch(NamedTuple):
    """One micro batch of a data-parallel rank. Batches are dictionaries with these names (`_asdict`).

    B is the number of samples, S `seq_length`, and P `predicted_tokens` of the configuration. A sample of a pair is
    `[CLS] first [SEP] second [SEP]`, padded on the right. A sample with less than P predictions has unused entries with
    weight 0, position 0 and any valid id.

    Attributes:
        tokens: Token ids, with masked ones replaced, int64 [B, S].
        token_types: 0 for the first sentence and padding, 1 for the second sentence, int64 [B, S].
        lengths: Number of tokens of each sample without padding, at least 1, int64 [B].
        masked_positions: Positions of the predicted tokens in the sample, int64 [B, P].
        masked_ids: Original ids of the predicted tokens, int64 [B, P].
        masked_weights: 1 for a prediction, 0 for an unused entry, float32 [B, P].
        next_sentence: 0 if the second sentence follows the first. 1 if it does not, or for sentence order, if the two
            are swapped. Only a network with a sentence head uses it. int64 [B].
    """

    tokens: Tensor
    token_types: Tensor
    lengths: Tensor
    masked_positions: Tensor
    masked_ids: Tensor
    masked_weights: Tensor
    next_sentence: Tensor
