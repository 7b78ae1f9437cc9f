"""Floating-point operations of a training step."""

from __future__ import annotations

from neox.config import RunPlan


def flops_per_iteration(plan: RunPlan, *, recompute: bool) -> float:
    """Return the operations of one optimizer step over all ranks: two per multiply-add, matrix products only.

    A forward pass is 24 B S L H^2 + 4 B S^2 L H in the blocks and 2 B S H V in the head; backward takes twice that, and
    recompute=True counts the second forward pass of checkpointed blocks too, which gives equation 3 of Megatron-LM
    (arXiv:2104.04473). Causal attention is counted whole. (gpt-neox's line takes 3/4 of the head without recompute.)
    """
    model = plan.config.model
    assert model.seq_length is not None
    layers, hidden, vocab = plan.layers.num_layers, plan.layers.hidden_size, plan.padded_vocab_size
    tokens = plan.batch.train_batch_size * model.seq_length
    passes = 4 if recompute and plan.config.training.checkpoint_activations else 3
    blocks = layers * (24 * hidden**2 + 4 * model.seq_length * hidden)
    return float(tokens) * (passes * blocks + 6 * hidden * vocab)
