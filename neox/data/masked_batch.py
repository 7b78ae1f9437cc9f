"""`MaskedLMBatch`: what a batch of masked language modelling holds, for the data that make it and for the loss."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MaskedLMBatch(NamedTuple):
    """One micro batch of a data rank; batches are dictionaries with these names (`_asdict`).

    Shapes are static: B samples, S `seq_length`, P `predicted_tokens` of the configuration. Samples of pairs are
    `[CLS] first [SEP] second [SEP]`, padded on the right. Unused entries of a sample's predictions have weight 0,
    position 0 and any valid id.

    Attributes:
        tokens: Ids with masked ones replaced, int64 [B, S].
        token_types: 0 for the first sentence, 1 for the second; padding 0. int64 [B, S].
        lengths: Tokens of each sample that are no padding, at least 1. int64 [B].
        masked_positions: Positions in the sample whose tokens are predicted, int64 [B, P].
        masked_ids: Their original ids, int64 [B, P].
        masked_weights: 1 for a prediction, 0 for an unused entry. float32 [B, P].
        next_sentence: 0 where the second sentence follows the first, 1 where it is another one (or the two are
            swapped, for sentence order). Read where the network has a sentence head. int64 [B].
    """

    tokens: Tensor
    token_types: Tensor
    lengths: Tensor
    masked_positions: Tensor
    masked_ids: Tensor
    masked_weights: Tensor
    next_sentence: Tensor
