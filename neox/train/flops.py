"""Floating-point operations of a training step, by gpt-neox's formula."""

from __future__ import annotations

from neox.config import RunPlan


def flops_per_iteration(plan: RunPlan, *, recompute: bool) -> float:
    """Return the operations of one optimizer step over all ranks.

    24 B S L H^2 (1 + S / 6H + V / 16LH) for a forward pass (Megatron-LM, arXiv:2104.04473, equation 3), times 3 for
    forward and backward; recompute=True counts the second forward pass of checkpointed activations (times 4), as in
    NeoX's log line. Causal attention is counted whole.
    """
    model = plan.config.model
    assert model.seq_length is not None
    layers, hidden, vocab = plan.layers.num_layers, plan.layers.hidden_size, plan.padded_vocab_size
    tokens = plan.batch.train_batch_size * model.seq_length
    passes = 4 if recompute and plan.config.training.checkpoint_activations else 3
    attention, head = model.seq_length / (6 * hidden), vocab / (16 * layers * hidden)
    return 24.0 * passes * tokens * layers * hidden**2 * (1 + attention + head)
