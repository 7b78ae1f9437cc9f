"""Floating-point operations of a network: two per multiply-add, matrix products only."""

from __future__ import annotations

from neox.architecture.choices import ATTENTION
from neox.architecture.gmlp import gate_flops
from neox.architecture.layers import LayerPlan


def forward_flops_per_token(layers: LayerPlan, sequence: int) -> tuple[int, int]:
    """Return the operations of a forward pass for one token: (in the blocks, in the head).

    A block takes 2 per element of its matrices, and 4 x heads x head size per key and query for scores and weighted
    values (causal attention is counted whole); the head takes 2 x hidden size x padded vocabulary. Megatron-LM,
    arXiv:2104.04473.

    Args:
        layers: The network's layers.
        sequence: Tokens per sample.
    """
    architecture = layers.architecture
    products = sum(2 * p.numel for layer in layers if layer.kind == "block" for p in layer.parameters if p.is_matrix)
    products += sum(gate_flops(architecture, kind, sequence) for kind in architecture.attention)
    attending = [ATTENTION[kind] for kind in architecture.attention if kind in ATTENTION]
    keys = sum(kind.keys_per_query(architecture, sequence) for kind in attending)
    scored = 4 * architecture.num_attention_heads * architecture.head_dim * keys
    return products + scored, 2 * architecture.hidden_size * layers.padded_vocab_size


def training_flops_per_token(layers: LayerPlan, sequence: int, *, recompute: bool = False) -> int:
    """Return the operations of forward and backward for one token; a backward pass takes twice the forward's.

    Products with frozen weights take part in the backward pass once, for the gradient of their inputs.

    Args:
        layers: The network's layers.
        sequence: Tokens per sample.
        recompute: Count a second forward pass of the blocks.
    """
    blocks, head = forward_flops_per_token(layers, sequence)
    frozen = [p for layer in layers for p in layer.parameters if layer.kind == "block" and not p.trained]
    saved = sum(2 * p.numel for p in frozen if len(p.shape) == 2) + (0 if _head_is_trained(layers) else head)
    return (4 if recompute else 3) * blocks + 3 * head - saved


def _head_is_trained(layers: LayerPlan) -> bool:
    """Return whether the head's weight, or the embedding's that it uses, is trained."""
    owner = layers[-1] if layers[-1].parameters else layers[0]
    return owner.parameters[0].trained
