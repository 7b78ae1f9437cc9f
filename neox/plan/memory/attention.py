"""Memory of attention in one block on one rank, by its kind and the kernel that computes it.

The formulas use the terms of `activations.py`. Which tensors a kernel keeps:

    flash                   the projection's result, and queries and keys as they are after norms and positions
    flash in blocks (CPU)   copies of queries, keys and values, and the weights of the pairs that each block computes
    eager, fused            copies of scaled queries, of keys and of values, and a weight for each pair
"""

from __future__ import annotations

from typing import NamedTuple

from neox.architecture import (
    MOST_BLOCKED,
    POSITIONS,
    QUERY_BLOCK,
    Architecture,
    Attention,
)
from neox.plan.layout import Workload
from neox.plan.memory.norms import fp32_of_norm

_FP32 = 4


class AttentionMemory(NamedTuple):
    """Bytes that attention keeps for one micro batch in a block, without its input and output.

    Attributes:
        operands: Queries, keys, values and masks, and what flash attention computes from them.
        scores: What the other kernels keep between these and the output.
    """

    operands: int
    scores: int


def attention_memory(run: Workload, attention: Attention) -> AttentionMemory:
    """Return what a kind of attention keeps for one micro batch in a block."""
    operands = run.tokens * _operand_bytes(run, attention)
    if _needs_dense_mask(run, attention):
        operands += _dense_mask_bytes(run, attention)
    scores = 0
    if keeps_scores(run, attention):
        scores = run.tokens * (_copy_bytes(run, attention) + _weight_bytes(run))
    biases_scores = POSITIONS[run.network.positions].biases_scores
    if (
        run.layout.attention == "eager"
        and attention.sees == "all"
        and not (_is_flash(run, attention) or biases_scores or run.network.bidirectional or run.separates_documents)
    ):
        scores += run.sequence_length * run.queries  # the causal mask
    return AttentionMemory(operands, scores)


def keeps_scores(run: Workload, attention: Attention) -> bool:
    """Return whether the kernel keeps a weight for each pair: any but flash, and no flash takes a trained bias."""
    if run.config.training.attention_backend == "math" or trains_bias(run.network):
        return True
    return not _is_flash(run, attention)


def _is_flash(run: Workload, attention: Attention) -> bool:
    """Return whether a kind of attention goes to torch's `scaled_dot_product_attention`."""
    network = run.network
    takes_others = attention.takes_softmax or network.attention_softcap or network.attention_sinks
    return run.layout.attention == "flash" or not takes_others


def _operand_bytes(run: Workload, attention: Attention) -> int:
    """Return bytes of queries, keys and values for one token, in all forms that the backward pass needs.

    (heads + 2 x stored keys) x number / split of the projection, unless the kernel has copies and no norm reads it, and
    (heads + keys) x number / split of what is rotated or normalised, unless the kernel has copies. Context ranks that
    gather keys and values keep copies of only their own, or of all of them in compiled layers.
    """
    network = run.network
    if attention.is_latent and not run.gathers_keys:
        return _latent_operand_bytes(run, attention)
    number = run.bytes_per_number
    split = run.layout.tp_size
    heads = network.num_attention_heads * network.head_dim
    keys = network.attended_heads * network.head_dim
    stored_keys = network.num_kv_heads * network.head_dim
    rotates = POSITIONS[network.positions].rotates
    normalises = network.qk_norm != "none"
    in_blocks = goes_by_blocks(run, attention)
    recomputes_core = run.layout.recomputes and run.layout.recomputed_part == "core_attn"  # from these operands
    has_copies = in_blocks or (keeps_scores(run, attention) and not run.gathers_keys and not recomputes_core)
    elements = 0
    if normalises or not has_copies:
        elements += heads + 2 * stored_keys
        if network.attention_output_gate:
            elements += heads  # its logits share memory with the values
    if normalises and keys > stored_keys:
        elements += keys  # repeated, as the norm reads them
        if not has_copies:
            elements += keys  # values
    if run.gathers_keys:
        elements += 2 * keys * (run.layout.cp_size if run.keeps_gathered_keys else 1)
        if rotates and run.keeps_gathered_keys:
            elements += heads + keys
        elif rotates:  # the copies take the place of what is not rotated
            elements += keys - 2 * stored_keys
    elif not has_copies and (rotates or normalises):
        elements += heads + keys
    if network.attention_output_gate:
        elements += 2 * heads  # its sigmoid, and gated outputs
    total = elements * number // split
    if in_blocks:
        total += _copy_bytes(run, attention) + _block_weight_bytes(run, attention)
    if _keeps_output(run, attention):
        total += heads * number // split
    if normalises:
        total += (heads + keys) * fp32_of_norm(run) // split
    if attention.is_latent:  # with context ranks
        total += _latent_vector_bytes(run, attention)
        if not run.keeps_gathered_keys:  # the copies take the place of keys, and hold values of their own width
            narrower = network.num_attention_heads * (network.head_dim - network.value_head_dim)
            total -= (keys + narrower) * number // split
    return total


def _copy_bytes(run: Workload, attention: Attention) -> int:
    """Return bytes of a kernel's copies for one token: (heads + 2 x keys) x number / split."""
    network = run.network
    heads = network.num_attention_heads * network.head_dim
    keys = network.attended_heads * network.head_dim
    if run.gathers_keys:
        keys *= run.layout.cp_size
    return (heads + 2 * keys) * run.bytes_per_number // run.layout.tp_size


def _weight_bytes(run: Workload) -> int:
    """Return bytes of what a kernel other than flash keeps of the pairs of one token, for each head and key.

    A weight, with a bound the bounded score, and with dropout the dropped weight and a mask of one byte.
    """
    number = run.bytes_per_number
    per_score = number
    if run.network.attention_softcap:
        per_score += number
    if run.config.training.attention_dropout:
        per_score += number + 1
    return per_score * run.network.num_attention_heads * run.sequence_length // run.layout.tp_size


def _keeps_output(run: Workload, attention: Attention) -> bool:
    """Return whether the kernel keeps the output in another order: that of CPUs for windows, documents and patterns."""
    if not run.on_cpu or not _is_flash(run, attention) or _needs_dense_mask(run, attention):
        return False
    return run.separates_documents or attention.sees != "all"


def _block_weight_bytes(run: Workload, attention: Attention) -> int:
    """Return bytes of the weights of all blocks of queries for one token: heads x visible pairs x number / split."""
    blocks = -(-run.sequence_length // QUERY_BLOCK)
    pairs = run.sequence_length * (blocks + 1) // (2 * blocks)
    return run.network.num_attention_heads * pairs * run.bytes_per_number // run.layout.tp_size


def _latent_operand_bytes(run: Workload, attention: Attention) -> int:
    """Return bytes of the operands of latent attention for one token.

    Queries and keys with positions, and the product of the latent vector whose second half the values are: heads x
    (2 x head size + other dims + value size) x number / split. And the latent vectors.

    torch's flash attention of CPUs takes values only as wide as keys. Its other kernel keeps queries, keys and the
    weights of all pairs, in fp32.
    """
    network = run.network
    number = run.bytes_per_number
    heads = network.num_attention_heads
    plain = network.head_dim - network.rotary_ndims
    products = heads * (2 * network.head_dim + plain + network.value_head_dim) * number // run.layout.tp_size
    total = products + _latent_vector_bytes(run, attention)
    if goes_by_blocks(run, attention):
        return total + _block_weight_bytes(run, attention)
    if keeps_latent_weights(run, attention):
        copies = 2 * network.head_dim * (_FP32 - number)
        total += heads * (run.sequence_length * _FP32 + copies) // run.layout.tp_size
    return total


def keeps_latent_weights(run: Workload, attention: Attention) -> bool:
    """Return whether a CPU keeps all weights in fp32, as values are not as wide as keys."""
    network = run.network
    is_plain = not run.separates_documents and attention.sees == "all"
    chooses = run.config.training.attention_backend == "auto"
    return run.on_cpu and attention.is_latent and is_plain and chooses and network.value_head_dim != network.head_dim


def _latent_vector_bytes(run: Workload, attention: Attention) -> int:
    """Return bytes of the latent vectors of one token, which every tensor rank has, or a share of the tokens'.

    What their norms make of them, and their inputs; on a CPU two fp32 tensors of each in place of the input, among them
    the input if it is fp32. The key that heads share stands in the same tensor as the input.
    """
    network = run.network
    number = run.bytes_per_number
    widths = network.latent_width + network.query_latent_width
    if not run.on_cpu:
        return (2 * widths + network.rotary_ndims) * number // run.token_shares
    total = widths * (number + 2 * _FP32)
    if number == _FP32:
        total += network.rotary_ndims * number
    return total // run.token_shares


def _needs_dense_mask(run: Workload, attention: Attention) -> bool:
    """Return whether which pairs see each other is a tensor of all pairs, instead of blocks of visible ones."""
    network = run.network
    if not run.separates_documents and attention.sees == "all":
        return False
    if not _is_flash(run, attention) or POSITIONS[network.positions].biases_scores:
        return True
    if run.config.training.attention_backend not in ("auto", "flex"):
        return True
    return run.config.training.attention_dropout > 0 and not run.on_cpu  # the GPU's kernel for blocks has no dropout


def _dense_mask_bytes(run: Workload, attention: Attention) -> int:
    """Return bytes of a mask of all pairs: one for each pair, and for each row and each head if theirs differ.

    Flash attention takes a bias of scores and the mask as one tensor, a number for each pair and head.
    """
    network = run.network
    heads = network.num_attention_heads // run.layout.tp_size
    pairs: int = run.sequence_length * run.queries
    if run.separates_documents:
        pairs *= run.layout.micro_batch_size
    if _is_flash(run, attention) and POSITIONS[network.positions].biases_scores:
        return pairs * heads * run.bytes_per_number
    if attention.sees == "pattern":
        pairs *= heads
    return pairs


def goes_by_blocks(run: Workload, attention: Attention) -> bool:
    """Return whether attention to all earlier keys goes by blocks of queries, which keep their weights."""
    network = run.network
    if not run.on_cpu or not _is_flash(run, attention) or run.precision == "fp16":
        return False
    if run.config.training.attention_backend != "auto":
        return False
    if run.gathers_keys:
        return False
    if network.bidirectional or run.separates_documents or attention.sees != "all":
        return False
    if POSITIONS[network.positions].biases_scores or run.config.training.attention_dropout:
        return False
    return run.sequence_length <= MOST_BLOCKED


def trains_bias(network: Architecture) -> bool:
    """Return whether positions add a bias of scores that is trained."""
    positions = POSITIONS[network.positions]
    return positions.biases_scores and bool(positions.shared(network))


def fixed_bias_bytes(run: Workload) -> int:
    """Return bytes of a bias of scores that is not trained, one for all blocks: query heads x sequence^2 x number."""
    network = run.network
    if not POSITIONS[network.positions].biases_scores or trains_bias(network):
        return 0
    if run.layout.attention != "flash" and not run.layout.recomputes:  # only added to scores
        return 0
    heads = network.num_attention_heads // run.layout.tp_size
    return heads * run.sequence_length * run.queries * run.bytes_per_number
