"""Memory of activations on one rank, tensor by tensor of this project's layers (compare arXiv:2205.05198).

The formulas use these words:

    number  bytes of an activation: 4 in fp32, 2 in fp16 and bf16
    tokens  tokens of one micro batch: samples x sequence length
    H       hidden size
    heads   query heads x head size
    keys    heads of keys and values, as queries see them, x head size
    split   tensor ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from neox.architecture import (
    ACTIVATIONS,
    BLOCK_OFFSET,
    MASKED_SCORES,
    MOST_BLOCKED,
    NORMS,
    POSITIONS,
    QUERY_BLOCK,
    RESIDUALS,
    Architecture,
    LayerPlan,
    MicroBatch,
    block_kinds,
)
from neox.plan.memory.head import head_bytes
from neox.plan.memory.setting import MemorySetting
from neox.plan.pipeline_schedules import PIPELINE_SCHEDULES
from neox.plan.stages import StagePlan

_FP32 = 4


class AttentionMemory(NamedTuple):
    """Bytes that attention keeps for one micro batch in a block, without its input and output.

    Attributes:
        operands: Queries, keys, values and masks, and what flash attention computes from them.
        scores: What the other kernels keep between these and the output.
    """

    operands: int
    scores: int


class BlocksMemory(NamedTuple):
    """Bytes of the activations of a stage's blocks.

    Attributes:
        kept: What one micro batch keeps from its forward pass to its backward pass.
        recomputed: What the backward pass computes again at once.
    """

    kept: int
    recomputed: int


def activation_bytes(layers: LayerPlan, stage: StagePlan, setting: MemorySetting) -> int:
    """Return bytes of activations at the peak of a training step on one rank of a stage.

    For each range of layers, micro batches in flight x (what blocks keep + a shared bias of scores + what came from and
    goes to the neighbours), + the larger of the head's pass and one block's backward pass.
    """
    hidden_states = _hidden_state_bytes(layers, setting)
    boundary = hidden_states // setting.token_shares
    block = block_bytes(layers, setting)
    blocks = _blocks_memory(layers, stage, setting)

    exchanged = 0
    if setting.pp_size > 1:
        exchanged = 2 * boundary
    kept = 0
    for layer_range, micro_batches in zip(stage.ranges, _in_flight(stage, setting), strict=True):
        of_range = _blocks_memory(layers, replace(stage, ranges=(layer_range,)), setting)
        kept += micro_batches * (of_range.kept + _fixed_bias_bytes(layers, setting) + exchanged)

    # The backward pass begins with the head. Then the blocks are at work, one after the other, with their gradients.
    head_pass = 0
    if stage.holds(layers.head.index):
        head_pass = 2 * hidden_states + head_bytes(layers, setting)
    gathered = 2 * (hidden_states - boundary)  # a product's whole input, and its gradient before it is divided
    tile = _tile_bytes(layers.architecture, setting)
    at_work = max(block // 2, _gathered_pass_bytes(layers.architecture, setting))
    block_pass = blocks.recomputed + at_work + gathered + tile + tile // 2
    block_pass += _expert_gradient_bytes(layers, stage, setting)
    return kept + max(head_pass, block_pass)


def _hidden_state_bytes(layers: LayerPlan, setting: MemorySetting) -> int:
    """Return bytes of one micro batch's hidden states: tokens x H x number."""
    return setting.tokens * layers.architecture.hidden_size * setting.bytes_per_number


def _blocks_memory(layers: LayerPlan, stage: StagePlan, setting: MemorySetting) -> BlocksMemory:
    """Return what the blocks of a stage keep and recompute, by the kind of recomputation."""
    if not setting.recompute_chunk:
        return _with_budget(layers, stage, setting)
    if setting.recomputed_part == "full":
        return _recomputing_blocks(layers, stage, setting)
    return _recomputing_attention(layers, stage, setting)


def _with_budget(layers: LayerPlan, stage: StagePlan, setting: MemorySetting) -> BlocksMemory:
    """Return the memory without recomputation, or with the compiler's.

    Kept: blocks x (input + budget x the rest). Recomputed: the rest of one block.
    """
    block = block_bytes(layers, setting)
    block_input = _hidden_state_bytes(layers, setting) // setting.token_shares
    kept = block_input + int(setting.activation_budget * (block - block_input))
    return BlocksMemory(len(_blocks_of(layers, stage)) * kept, block - kept)


def _recomputing_blocks(layers: LayerPlan, stage: StagePlan, setting: MemorySetting) -> BlocksMemory:
    """Return the memory if whole blocks are recomputed, `recompute_chunk` neighbouring ones together.

    Kept: the inputs of the chunks, and the blocks that are not recomputed. Recomputed: the longest chunk.
    """
    block = block_bytes(layers, setting)
    runs = _runs_of_recomputed_blocks(layers, stage, setting)
    inputs = 0
    if not setting.kept_inputs_on_cpu or setting.on_cpu:
        inputs = _chunk_inputs(layers, stage, setting)
    whole_blocks = len(_blocks_of(layers, stage)) - sum(runs)
    longest = min(setting.recompute_chunk, max(runs, default=0))
    return BlocksMemory(whole_blocks * block + inputs, longest * block)


def _chunk_inputs(layers: LayerPlan, stage: StagePlan, setting: MemorySetting) -> int:
    """Return the bytes of the inputs of recomputed chunks for one micro batch: chunks x tokens x H x number."""
    runs = _runs_of_recomputed_blocks(layers, stage, setting)
    chunks = sum(-(-run // setting.recompute_chunk) for run in runs)
    chunk_input = _hidden_state_bytes(layers, setting) // setting.token_shares
    if setting.divides_kept_inputs:
        chunk_input //= setting.tp_size
    return chunks * chunk_input


def kept_inputs_on_host(layers: LayerPlan, stage: StagePlan, setting: MemorySetting) -> int:
    """Return the bytes of the inputs of recomputed blocks in main memory: micro batches in flight x chunks x input."""
    is_whole = setting.recompute_chunk > 0 and setting.recomputed_part == "full"
    if not is_whole or not setting.kept_inputs_on_cpu or setting.on_cpu:
        return 0
    total = 0
    for layer_range, micro_batches in zip(stage.ranges, _in_flight(stage, setting), strict=True):
        total += micro_batches * _chunk_inputs(layers, replace(stage, ranges=(layer_range,)), setting)
    return total


def _in_flight(stage: StagePlan, setting: MemorySetting) -> Sequence[int]:
    """Return the largest number of micro batches that each range of a stage holds between forward and backward pass."""
    schedule = PIPELINE_SCHEDULES[setting.pipeline_schedule]
    return schedule.most_kept(stage.index, setting.pp_size, len(stage.ranges), setting.accumulation_steps)


def _recomputing_attention(layers: LayerPlan, stage: StagePlan, setting: MemorySetting) -> BlocksMemory:
    """Return the memory if the attention of blocks is recomputed, or only its scores.

    Kept: all blocks without what is released. Recomputed: what one block released.
    """
    attention = _attention_memory(layers, setting)
    released = attention.scores
    if setting.recomputed_part == "full_attn":
        released += attention.operands
    everything = _with_budget(layers, stage, setting)
    recomputing = sum(_runs_of_recomputed_blocks(layers, stage, setting))
    return BlocksMemory(everything.kept - recomputing * released, min(recomputing, 1) * released)


def _blocks_of(layers: LayerPlan, stage: StagePlan) -> list[int]:
    """Return the numbers of a stage's blocks, counted from 0."""
    return [layer.index - BLOCK_OFFSET for layer in stage.entries(layers) if layer.kind == "block"]


def _runs_of_recomputed_blocks(layers: LayerPlan, stage: StagePlan, setting: MemorySetting) -> list[int]:
    """Return the lengths of runs of neighbouring blocks that are recomputed: 2 and 3 if block 2 of six is not."""
    runs = []
    for layer_range in stage.ranges:
        blocks = [index - BLOCK_OFFSET for index in layer_range if layers[index].kind == "block"]
        for is_kept, run in groupby(blocks, lambda block: block in setting.no_recompute_blocks):
            if not is_kept:
                runs.append(len(list(run)))
    return runs


def block_bytes(layers: LayerPlan, setting: MemorySetting) -> int:
    """Return bytes that the backward pass of one block needs, for one micro batch."""
    network = layers.architecture
    attended = setting.tokens * _token_bytes(network, setting) + sum(_attention_memory(layers, setting))
    batch = MicroBatch(setting.tokens, setting.sequence_length, setting.token_shares, setting.tp_size)
    most = 0
    for kind in block_kinds(network):
        if kind.activations is None:
            most = max(most, attended)
        else:
            most = max(most, kind.activations(network, batch) * setting.bytes_per_number)
    return most


def _token_bytes(network: Architecture, setting: MemorySetting) -> int:
    """Return bytes that a block keeps for one token, without its attention.

    Tensors of width H are on every tensor rank, for all tokens or its share. Attention's output is split: heads x
    number / split.
    """
    number = setting.bytes_per_number
    split = setting.tp_size
    hidden = network.hidden_size
    tensors = 1 + RESIDUALS[network.residual].norms.number  # the block's input, and an input or output of each norm
    if setting.in_tiles:
        tensors -= _norms_in_tiles(network)
    if not network.parallel_residual:
        tensors += 1  # the sum of the input and the attention
    whole = tensors * hidden * number
    if NORMS[network.norm].by_steps and not setting.in_tiles:
        whole += 2 * (2 * _FP32 - number) * hidden  # two norms keep two fp32 tensors instead of their input
    if setting.hidden_dropout:
        whole += 2 * hidden  # two masks of one byte
    heads = network.num_attention_heads * network.head_dim
    mlp = 0
    if len(network.expert_blocks) < network.num_layers and not setting.in_tiles:
        mlp = _mlp_bytes(network, network.mlp_width, setting)
    if network.num_experts:
        mlp = max(mlp, _expert_bytes(network, setting))
    return whole // setting.token_shares + heads * number // split + mlp


def _norms_in_tiles(network: Architecture) -> int:
    """Return the number of norms that are computed within the MLP's tiles."""
    norms, rule = RESIDUALS[network.residual]
    if rule == "post_norm":  # its norms are of sums
        return 0
    return (norms.before_mlp is not None) + (norms.after_mlp is not None)


def _tile_bytes(network: Architecture, setting: MemorySetting) -> int:
    """Return the bytes of the backward pass of one tile of an MLP with its norms; 0 without tiles."""
    if not setting.in_tiles:
        return 0
    hidden = (1 + _norms_in_tiles(network)) * network.hidden_size * setting.bytes_per_number
    if NORMS[network.norm].by_steps:
        hidden += 2 * _FP32 * network.hidden_size
    of_token = hidden + _mlp_bytes(network, network.mlp_width, setting)
    return setting.micro_batch_size * setting.tile_tokens * of_token


def _gathered_pass_bytes(network: Architecture, setting: MemorySetting) -> int:
    """Return the additional bytes of the backward pass of attention if it gathers keys and values again.

    Keys and values of all tokens and their gradients, 4 x keys x cp x number / split; gradients of queries, of the
    output and of hidden states; on a CPU also the scores of some queries. The MLP's activations are freed by then.
    """
    if not setting.gathers_keys or setting.keeps_gathered_keys:
        return 0
    heads = network.num_attention_heads * network.head_dim
    keys = network.attended_heads * network.head_dim
    split = (4 * setting.cp_size * keys + 2 * heads) // setting.tp_size
    whole = 2 * network.hidden_size // setting.token_shares
    of_token = (split + whole) * setting.bytes_per_number
    if not setting.in_tiles:
        of_token -= _mlp_bytes(network, network.mlp_width, setting)
    scores = 0
    if setting.on_cpu:  # a block's mask, weights and their gradient
        scores = 3 * MASKED_SCORES * setting.bytes_per_number
    return setting.tokens * of_token + scores


def _mlp_bytes(network: Architecture, width: int, setting: MemorySetting) -> int:
    """Return bytes that an MLP of a width keeps for one token: its first product, and what the activation makes of it.

    (width factor + 1) x width x number / split.
    """
    tensors = ACTIVATIONS[network.activation].width_factor + 1
    return tensors * width * setting.bytes_per_number // setting.tp_size


def _expert_bytes(network: Architecture, setting: MemorySetting) -> int:
    """Return bytes that a mixture of experts keeps for one token on one tensor rank, all tokens kept.

    For each of the token's experts its input and output, 2 x H x number, what an MLP keeps, and its number, row and
    place, 3 x 8. The router keeps two fp32 scores of every expert, and its input in fp32 if that is another type.
    """
    number = setting.bytes_per_number
    hidden = network.hidden_size
    of_expert = 2 * hidden * number + _mlp_bytes(network, network.expert_width, setting) + 3 * 8
    router = 2 * _FP32 * network.num_experts
    if number != _FP32:
        router += _FP32 * hidden
    shared = _mlp_bytes(network, network.shared_expert_width, setting)
    return network.experts_per_token * of_expert + router + shared


def _expert_gradient_bytes(layers: LayerPlan, stage: StagePlan, setting: MemorySetting) -> int:
    """Return the bytes of the newest gradient of an expert weight, before it is added to the accumulated gradient.

    Elements of the largest expert tensor on this rank x number, and a copy for the reduction with ZeRO 2 if the tensor
    exceeds the bucket.
    """
    largest = 0
    for layer in stage.entries(layers):
        for spec in layer.parameters:
            if spec.experts and spec.trained:
                largest = max(largest, spec.shard_numel(setting.tp_size) // setting.ep_size)
    copies = 1
    if setting.zero_stage == 2 and largest > setting.reduce_bucket:
        copies += 1
    return copies * largest * setting.bytes_per_number


def _attention_memory(layers: LayerPlan, setting: MemorySetting) -> AttentionMemory:
    """Return what attention keeps for one micro batch in a block."""
    network = layers.architecture
    number = setting.bytes_per_number
    split = setting.tp_size
    operands = setting.tokens * _operand_bytes(network, setting)
    if _needs_dense_mask(network, setting):
        operands += _dense_mask_bytes(network, setting)
    bias = 0
    if _trains_bias(network):
        bias = network.num_attention_heads * setting.sequence_length * setting.queries * number // split
    scores = 0
    if setting.attention != "flash" or bias:  # no kernel takes a trained bias, so the scores are kept
        scores = setting.tokens * _score_bytes(network, setting)
    return AttentionMemory(operands, scores + bias)


def _operand_bytes(network: Architecture, setting: MemorySetting) -> int:
    """Return bytes of queries, keys and values for one token, in all forms that the backward pass needs.

    (heads + 2 x stored keys) x number / split, and as much again as is rotated, normalised or repeated. If a CPU goes
    by blocks of queries, the weights of half of all pairs take the place of rotated queries and keys. Context ranks
    that gather keys and values keep copies of only their own, or of all of them in compiled layers.
    """
    number = setting.bytes_per_number
    split = setting.tp_size
    heads = network.num_attention_heads * network.head_dim
    keys = network.attended_heads * network.head_dim
    stored_keys = network.num_kv_heads * network.head_dim
    total = (heads + 2 * stored_keys) * number // split
    rotates = POSITIONS[network.positions].rotates
    if setting.gathers_keys:
        copies = 2 * keys * (setting.cp_size if setting.keeps_gathered_keys else 1)
        if rotates and setting.keeps_gathered_keys:
            copies += heads + keys
        elif rotates:  # the copies take the place of what is not rotated
            copies += keys - 2 * stored_keys
        total += copies * number // split
    elif _goes_by_blocks(network, setting):
        blocks = -(-setting.sequence_length // QUERY_BLOCK)
        pairs = setting.sequence_length * (blocks + 1) // (2 * blocks)
        total += network.num_attention_heads * pairs * number // split
    elif rotates:
        total += (heads + keys) * number // split
    if network.latent_width:  # latent vectors before and after their norms, on every tensor rank
        widths = network.latent_width + network.rotary_ndims + network.query_latent_width
        total += 2 * widths * number
    if network.qk_norm != "none":
        total += (heads + 3 * keys - 2 * stored_keys) * number // split
    return total


def _score_bytes(network: Architecture, setting: MemorySetting) -> int:
    """Return bytes that a kernel other than flash keeps for one token.

    Scaled queries and copies of keys and values: (heads + 2 x keys) x number / split. For each head and key the
    weight, with a bound the bounded score, and with dropout the dropped weight and a mask of one byte.
    """
    number = setting.bytes_per_number
    split = setting.tp_size
    heads = network.num_attention_heads * network.head_dim
    keys = network.attended_heads * network.head_dim
    per_score = number
    if network.attention_softcap:
        per_score += number  # the bounded score
    if setting.attention_dropout:
        per_score += number + 1
    if setting.gathers_keys:
        keys *= setting.cp_size
    copies = (heads + 2 * keys) * number // split
    return copies + per_score * network.num_attention_heads * setting.sequence_length // split


def _needs_dense_mask(network: Architecture, setting: MemorySetting) -> bool:
    """Return whether which pairs see each other is a tensor of all pairs, instead of blocks of visible ones."""
    if not setting.separate_documents and _sees_all_earlier(network):
        return False
    if setting.attention != "flash" or POSITIONS[network.positions].biases_scores:
        return True
    return setting.attention_dropout and not setting.on_cpu  # the GPU's kernel for blocks has no dropout


def _dense_mask_bytes(network: Architecture, setting: MemorySetting) -> int:
    """Return bytes of a mask of all pairs: one for each pair, and for each row and each head if theirs differ.

    Flash attention takes a bias of scores and the mask as one tensor, a number for each pair and head.
    """
    heads = network.num_attention_heads // setting.tp_size
    pairs: int = setting.sequence_length * setting.queries
    if setting.separate_documents:
        pairs *= setting.micro_batch_size
    if setting.attention == "flash" and POSITIONS[network.positions].biases_scores:
        return pairs * heads * setting.bytes_per_number
    if _seen(network) >= {"pattern"}:
        pairs *= heads
    return pairs


def _sees_all_earlier(network: Architecture) -> bool:
    """Return whether the queries of each block of a causal network see all earlier keys of the document."""
    return _seen(network) <= {"all"}


def _seen(network: Architecture) -> set[str]:
    """Return which earlier tokens the queries of the network's blocks see (`Attention.sees`)."""
    return {kind.attention.sees for kind in block_kinds(network) if kind.attention is not None}


def _goes_by_blocks(network: Architecture, setting: MemorySetting) -> bool:
    """Return whether attention to all earlier keys goes by blocks of queries, which keep their weights."""
    if not setting.on_cpu or setting.attention != "flash" or setting.precision == "fp16":
        return False
    if setting.gathers_keys:
        return False
    if network.bidirectional or setting.separate_documents or not _sees_all_earlier(network):
        return False
    if POSITIONS[network.positions].biases_scores or setting.attention_dropout:
        return False
    return setting.sequence_length <= MOST_BLOCKED


def _trains_bias(network: Architecture) -> bool:
    """Return whether positions add a bias of scores that is trained."""
    positions = POSITIONS[network.positions]
    return positions.biases_scores and bool(positions.shared(network))


def _fixed_bias_bytes(layers: LayerPlan, setting: MemorySetting) -> int:
    """Return bytes of a bias of scores that is not trained, one for all blocks: query heads x sequence^2 x number."""
    network = layers.architecture
    if not POSITIONS[network.positions].biases_scores or _trains_bias(network):
        return 0
    heads = network.num_attention_heads // setting.tp_size
    return heads * setting.sequence_length * setting.queries * setting.bytes_per_number
