"""Floating-point operations of a network: two per multiply-add, matrix products only."""

from __future__ import annotations

from collections.abc import Iterable

from neox.architecture.choices import ATTENTION
from neox.architecture.gmlp import gate_flops
from neox.architecture.layers import BLOCK_OFFSET, LayerEntry, LayerPlan


def forward_flops_per_token(layers: LayerPlan, sequence: int, predicted: int | None = None) -> tuple[int, int]:
    """Return the operations of a forward pass for one token: (in the blocks, in the heads).

    A block takes 2 per element of its matrices, and 4 x heads x head size per key and query for scores and weighted
    values (causal attention is counted whole); the head takes 2 x hidden size x padded vocabulary. Megatron-LM,
    arXiv:2104.04473.

    Args:
        layers: The network's layers.
        sequence: Tokens per sample.
        predicted: Tokens of a sample that go through the head; None for all.
    """
    architecture = layers.architecture
    products = sum(_matrix_flops(layer) for layer in layers if layer.kind == "block")
    products += sum(gate_flops(architecture, kind, sequence) for kind in architecture.attention)
    attending = [ATTENTION[kind] for kind in architecture.attention if kind in ATTENTION]
    keys = sum(kind.keys_per_query(architecture, sequence) for kind in attending)
    scored = 4 * architecture.num_attention_heads * architecture.head_dim * keys
    head = 2 * architecture.hidden_size * layers.padded_vocab_size
    if architecture.bidirectional:
        head += _matrix_flops(layers.head)
    head = head if predicted is None else head * predicted // sequence
    pooled = sum(_matrix_flops(layer) for layer in layers if layer.kind == "sentence_head")  # one token of a sample
    return products + scored, head + pooled // sequence


def _matrix_flops(layer: LayerEntry) -> int:
    return sum(2 * p.numel for p in layer.parameters if p.is_matrix)


def training_flops_per_token(layers: LayerPlan, sequence: int, *, predicted: int | None = None) -> int:
    """Return the operations of forward and backward for one token; a backward pass takes twice the forward's.

    Products with frozen weights take part in the backward pass once, for the gradient of their inputs.

    Args:
        layers: The network's layers.
        sequence: Tokens per sample.
        predicted: Tokens of a sample that go through the head; None for all.
    """
    blocks, head = forward_flops_per_token(layers, sequence, predicted)
    frozen = [p for layer in layers for p in layer.parameters if layer.kind == "block" and not p.trained]
    saved = sum(2 * p.numel for p in frozen if len(p.shape) == 2) + (0 if _head_is_trained(layers) else head)
    return 3 * blocks + 3 * head - saved


def recomputed_flops_per_token(layers: LayerPlan, sequence: int, parts: Iterable[str]) -> int:
    """Return the operations that the backward pass repeats for one token.

    Args:
        layers: The network's layers.
        sequence: Tokens per sample.
        parts: What is recomputed of each block: `none`, `full`, `full_attn` (attention without its output projection)
            or `core_attn` (scores and weighted values).
    """
    architecture, total = layers.architecture, 0
    for number, (kind, part) in enumerate(zip(architecture.attention, parts, strict=True)):
        block = layers[BLOCK_OFFSET + number]
        if part == "full":
            total += _matrix_flops(block) + gate_flops(architecture, kind, sequence)
        elif part == "full_attn":
            total += sum(2 * p.numel for p in block.parameters if p.name == "attention.query_key_value.weight")
        if part != "none" and kind in ATTENTION:
            keys = ATTENTION[kind].keys_per_query(architecture, sequence)
            total += 4 * architecture.num_attention_heads * architecture.head_dim * keys
    return total


def _head_is_trained(layers: LayerPlan) -> bool:
    """Return whether the head's weight, or the embedding's that it uses, is trained."""
    owner = layers.head if layers.head.parameters else layers[0]
    return owner.parameters[0].trained
