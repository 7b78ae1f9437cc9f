"""Random batches of masked language modelling."""

from __future__ import annotations

import torch

from neox.data.masked.masked_batch import MaskedLMBatch
from neox.plan import RunPlan

MASK_ID = 1


def masked_batch(samples: int, length: int, predicted: int, vocab: int, seed: int = 0) -> MaskedLMBatch:
    """Make padded samples of two sentences with masked tokens; ids 0 (padding) and 1 (mask) are no words.

    The second sentence follows the first where it goes on counting from it.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    lengths = draw(length // 2, length + 1, samples)
    lengths[0] = length
    positions = torch.arange(length).expand(samples, -1)
    first = lengths.unsqueeze(1) // 2
    other = draw(0, 2, samples)
    words = draw(0, vocab, samples, 1) + positions + other.unsqueeze(1) * (positions >= first) * 7
    tokens = 2 + words % (vocab - 2)
    padding = positions >= lengths.unsqueeze(1)
    tokens = tokens.masked_fill(padding, 0)
    order = torch.rand(samples, length, generator=generator).masked_fill(padding, -1.0).argsort(1, descending=True)
    masked = order[:, :predicted].sort(1).values
    weights = (torch.arange(predicted) < draw(1, predicted + 1, samples).unsqueeze(1)).float()
    weights *= masked < lengths.unsqueeze(1)
    ids = tokens.gather(1, masked)
    tokens = tokens.scatter(1, masked, torch.where(weights > 0, MASK_ID, ids))
    return MaskedLMBatch(
        tokens, ((positions >= first) & ~padding).long(), lengths, masked * weights.long(), ids, weights, other
    )


def masked_samples(plan: RunPlan, seed: int) -> dict[str, torch.Tensor]:
    """Make the samples of a whole step of a plan."""
    model = plan.config.model
    assert model.seq_length is not None
    assert model.predicted_tokens is not None
    size = plan.batch.train_batch_size
    return masked_batch(size, model.seq_length, model.predicted_tokens, plan.vocab_size, seed)._asdict()
