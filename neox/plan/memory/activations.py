"""Memory estimate of activations, tensor by tensor of this project's layers (compare arXiv:2205.05198)."""

from __future__ import annotations

from itertools import groupby

from neox.architecture import (
    ACTIVATIONS,
    BLOCK_OFFSET,
    MOST_BLOCKED,
    NORMS,
    POSITIONS,
    QUERY_BLOCK,
    SPARSITY,
    Architecture,
    LayerPlan,
)
from neox.config.sections.pipeline_schedules import PIPELINE_SCHEDULES
from neox.plan.memory.setting import MemorySetting
from neox.plan.stages import StagePlan

# Logits that head and cross entropy hold at once, on a GPU and on a CPU.
_LOSS_CHUNK, _CPU_LOSS_CHUNK = 2**27, 2**21


def layer_bytes(layers: LayerPlan, setting: MemorySetting) -> int:
    """Return bytes that the backward pass of one block needs, for one micro batch."""
    network, split, size = layers.architecture, setting.tp_size, setting.bytes_per_number
    hidden, activation = network.hidden_size, ACTIVATIONS[network.activation]
    heads = network.num_attention_heads * network.head_dim
    tokens = setting.micro * setting.sequence
    # Of width H on every tensor rank, of all tokens or its share: the block's input, the norms' outputs or inputs; in
    # sequence, the MLP's input.
    whole = {"parallel": 3, "parallel_one_norm": 2}.get(network.residual, 4) * hidden * size
    if NORMS[network.norm].by_steps:
        whole += 2 * (2 * 4 - size) * hidden
    if setting.hidden_dropout:
        whole += 2 * hidden  # two masks of one byte
    # Divided over tensor ranks: attention's output; the MLP's first product, and what the activation makes of it.
    divided = heads * size // split + (activation.width_factor + 1) * network.mlp_width * size // split
    attended = tokens * (whole // setting.token_shares + divided) + sum(_attention_bytes(layers, setting))
    return max(attended, _gate_bytes(layers, setting)) if not network.has_cache else attended


def _attention_bytes(layers: LayerPlan, setting: MemorySetting) -> tuple[int, int]:
    """Return bytes that attention keeps for one micro batch in a block, without its input and output.

    Returns:
        Of queries, keys, values, masks and blocks' weights; and of what kernels other than flash keep between them and
        the output.
    """
    network, split, size = layers.architecture, setting.tp_size, setting.bytes_per_number
    heads, keys = network.num_attention_heads * network.head_dim, network.attended_heads * network.head_dim
    tokens = setting.micro * setting.sequence
    # Query-key-value, rotated queries and keys, normalised ones, repeated ones.
    divided = (heads + 2 * network.num_kv_heads * network.head_dim) * size // split
    by_blocks = _goes_by_blocks(network, setting)
    if by_blocks:  # their copies take the place of rotated ones
        blocks = -(-setting.sequence // QUERY_BLOCK)
        divided += network.num_attention_heads * (setting.sequence * (blocks + 1) // (2 * blocks)) * size // split
    elif POSITIONS[network.positions].rotates:
        divided += (heads + keys) * size // split
    if network.qk_norm != "none":
        divided += (heads + 3 * keys - 2 * network.num_kv_heads * network.head_dim) * size // split
    # A mask of a sparse kind, one byte for each pair and (at most) each head.
    sparse = not SPARSITY.keys().isdisjoint(network.attention)
    masks = network.num_attention_heads * setting.sequence**2 // split if sparse else 0
    # A trained bias of scores, which kernels take no part of: they keep the scores then.
    bias = network.num_attention_heads * setting.sequence**2 * size // split if _trains_bias(layers) else 0
    scores = 0
    if setting.attention != "flash" or bias:
        per_score = size + (size + 1 if setting.attention_dropout else 0)
        scores += (heads + 2 * keys) * size // split  # scaled queries, copies of keys and values
        scores += per_score * network.num_attention_heads * setting.sequence // split
    return tokens * divided + masks, tokens * scores + bias


def _goes_by_blocks(network: Architecture, setting: MemorySetting) -> bool:
    """Return whether attention is computed by blocks of queries, which keep their weights (`neox.ops.attention`)."""
    causal = not network.bidirectional and {*network.attention} == {"global"}
    biased = POSITIONS[network.positions].biases_scores or setting.attention_dropout
    flash = setting.on_cpu and setting.attention == "flash" and setting.precision != "fp16"
    return flash and causal and not biased and setting.sequence <= MOST_BLOCKED


def _gate_bytes(layers: LayerPlan, setting: MemorySetting) -> int:
    """Return bytes that the backward pass of a block `gmlp` or `amlp` needs."""
    hidden, size, length = layers.architecture.hidden_size, setting.bytes_per_number, setting.sequence
    # Input and norm's output; the gate joined over tensor ranks, normalised and applied (with amlp, its values and the
    # attention's result too). Divided: the wide product, its activation, and the gated half.
    whole = 2 * hidden // setting.token_shares + (6 if layers.architecture.gmlp_width else 3) * 4 * hidden
    divided = (8 + 8 + 4) * hidden // setting.tp_size
    return (setting.micro * length * (whole + divided) + length**2) * size


def _trains_bias(layers: LayerPlan) -> bool:
    positions = POSITIONS[layers.architecture.positions]
    return positions.biases_scores and bool(positions.shared(layers.architecture))


def activation_bytes(layers: LayerPlan, stage: StagePlan, setting: MemorySetting) -> int:
    """Return bytes of activations at the peak of a training step on one GPU of a stage."""
    here = stage.entries(layers)
    kinds, size = [layer.kind for layer in here], setting.bytes_per_number
    blocks = [layer.index - BLOCK_OFFSET for layer in here if layer.kind == "block"]
    joined = setting.micro * setting.sequence * layers.architecture.hidden_size * size
    boundary = joined // setting.token_shares
    schedule = PIPELINE_SCHEDULES[setting.pipeline_schedule]
    in_flight = schedule.in_flight(stage.index, setting.pp_size, setting.accumulation)
    one_layer = layer_bytes(layers, setting)
    of_layer = boundary + int(setting.kept * (one_layer - boundary))
    kept, working = len(blocks) * of_layer, one_layer - of_layer
    if setting.recompute and setting.recomputed == "full":
        runs = [len(list(run)) for keep, run in groupby(blocks, lambda block: block in setting.keeping) if not keep]
        chunks = sum(-(-run // setting.recompute) for run in runs)
        kept_input = boundary // (setting.tp_size if setting.divided_inputs else 1)
        if setting.inputs_on_cpu and not setting.on_cpu:  # on a CPU they stay
            kept_input = 0
        kept = (len(blocks) - sum(runs)) * one_layer + chunks * kept_input
        working = min(setting.recompute, max(runs, default=0)) * one_layer
    elif setting.recompute:
        parts = _attention_bytes(layers, setting)
        released = sum(parts) if setting.recomputed == "full_attn" else parts[1]
        count = sum(block not in setting.keeping for block in blocks)
        kept, working = kept - count * released, min(count, 1) * released
    total = in_flight * kept
    if POSITIONS[layers.architecture.positions].biases_scores and not _trains_bias(layers):  # one for all blocks
        heads = layers.architecture.num_attention_heads // setting.tp_size
        total += in_flight * heads * setting.sequence**2 * size
    if setting.pp_size > 1:
        total += 2 * in_flight * boundary  # what came from and goes to the neighbours
    # The backward pass begins with the head; then the blocks are at work, one after the other, with their gradients.
    at_head = 2 * joined + _head_bytes(layers, setting) if layers.head.kind in kinds else 0
    gathered = 2 * (joined - boundary)  # a product's whole input, and its gradient before it is divided
    return total + max(at_head, working + one_layer // 2 + gathered)


def _head_bytes(layers: LayerPlan, setting: MemorySetting) -> int:
    """Return bytes of head and cross entropy, which hold the logits of a chunk of tokens at once.

    Kept until the backward pass: the gradients of the hidden states, and of the head's weight in fp32. Beside them
    either a chunk's logits are held, or the weight's gradient in the weight's type.
    """
    size, hidden = setting.bytes_per_number, layers.architecture.hidden_size
    tokens, vocabulary = setting.micro * setting.predicted, layers.padded_vocab_size // setting.tp_size
    most = _CPU_LOSS_CHUNK if setting.on_cpu else _LOSS_CHUNK
    # On a CPU its gradient is not computed in place.
    chunk = min(tokens, max(1, most // vocabulary)) * vocabulary * (2 * size if setting.on_cpu else size)
    weight = vocabulary * hidden
    return tokens * hidden * size + 4 * weight + max(chunk, weight * size if size < 4 else 0)
