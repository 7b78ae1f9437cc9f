"""Floating-point operations of a network: two per multiply-add, matrix products only."""

from __future__ import annotations

from collections.abc import Iterable

from neox.architecture.blocks import BLOCKS
from neox.architecture.layers import BLOCK_OFFSET, LayerEntry, LayerPlan


def forward_flops_per_token(layers: LayerPlan, sequence: int, predicted: int | None = None) -> tuple[int, int]:
    """Return the operations of a forward pass for one token of a sample: (in the blocks, in the heads).

    A block takes 2 per element of its matrices (of experts, those that a token chooses), and 2 x heads x (width of a
    head's keys + width of its values) per key and query for scores and weighted values (causal attention is counted
    whole); the head takes 2 x hidden size x padded vocabulary. Megatron-LM, arXiv:2104.04473. Modules of multi-token
    prediction are one more block and one more head each, and their projection. Blocks compute a soft prompt, too.

    Args:
        layers: The network's layers.
        sequence: Tokens per sample.
        predicted: Tokens of a sample that go through the head; None for all.
    """
    architecture = layers.architecture
    length = sequence + architecture.soft_prompt_tokens
    blocks = 0
    pooled = 0
    for layer in layers:
        if layer.kind in ("block", "multi_token"):
            blocks += 2 * layer.matrix_numel
        elif layer.kind == "sentence_head":
            pooled += 2 * layer.matrix_numel  # for one token of a sample
    for kind in (*architecture.attention, *architecture.attention[-1:] * architecture.mtp_num_layers):
        blocks += BLOCKS[kind].mixing_flops(architecture, length)
    head = 2 * architecture.hidden_size * layers.padded_vocab_size
    if architecture.score_head:
        head = 2 * layers.head.matrix_numel
    if architecture.bidirectional:
        head += 2 * layers.head.matrix_numel
    if predicted is not None:
        head = head * predicted // sequence
    head *= 1 + architecture.mtp_num_layers
    return blocks * length // sequence, head + pooled // sequence


def training_flops_per_token(layers: LayerPlan, sequence: int, *, predicted: int | None = None) -> int:
    """Return the operations of forward and backward for one token; a backward pass takes twice the forward's.

    Products with frozen weights take part in the backward pass once, for the gradient of their inputs.

    Args:
        layers: The network's layers.
        sequence: Tokens per sample.
        predicted: Tokens of a sample that go through the head; None for all.
    """
    blocks, head = forward_flops_per_token(layers, sequence, predicted)
    total = 3 * (blocks + head)
    for layer in layers:
        if layer.kind in ("block", "multi_token"):
            total -= 2 * layer.frozen_matrix_numel * (sequence + layers.architecture.soft_prompt_tokens) // sequence
    if not layers.trains_head:
        total -= head
    return total


def recomputed_flops_per_token(layers: LayerPlan, sequence: int, parts: Iterable[str], chunk: int = 1) -> int:
    """Return the operations that the backward pass repeats for one token.

    torch ends the recomputation of a chunk as soon as it has all that the forward pass kept. So the product at the end
    of the chunk's last block is not repeated.

    Args:
        layers: The network's layers.
        sequence: Tokens per sample.
        parts: What is recomputed of each block: `none`, `full`, `full_attn` (attention without its output projection)
            or `core_attn` (scores and weighted values). The blocks of multi-token prediction do as the last one. What a
            recurrence repeats whatever is asked for comes on top.
        chunk: Blocks that are recomputed together (`checkpoint_num_layers`).
    """
    architecture = layers.architecture
    length = sequence + architecture.soft_prompt_tokens
    total = 0
    every = [*parts]
    last = architecture.num_layers - 1
    in_chunk = 0
    for number in (*range(architecture.num_layers), *[last] * architecture.mtp_num_layers):
        kind = BLOCKS[architecture.attention[number]]
        part = every[number]
        block = layers[BLOCK_OFFSET + number]
        total += kind.recomputed_flops(architecture, length)
        in_chunk = in_chunk + 1 if part == "full" else 0
        if part == "full":
            total += 2 * block.matrix_numel
            if in_chunk == chunk or number == last or every[number + 1] != "full":
                unkept = kind.unkept_product(architecture, architecture.mlp[number])
                total -= 2 * sum(spec.active_numel for spec in block.multiplied if spec.name == unkept)
                in_chunk = 0
        elif part == "full_attn":
            total += _projection_flops(block)
        if part == "full" or (part != "none" and kind.attention is not None):
            total += kind.mixing_flops(architecture, length)
    return total * length // sequence


def _projection_flops(block: LayerEntry) -> int:
    """Return the operations of a block's queries, keys and values for one token; 0 for blocks without them."""
    total = 0
    for spec in block.multiplied:
        if spec.name.startswith("attention.") and not spec.name.startswith("attention.dense."):
            total += 2 * spec.numel
    return total
