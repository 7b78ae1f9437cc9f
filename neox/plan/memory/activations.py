"""Memory of activations on one rank, tensor by tensor of this project's layers (compare arXiv:2205.05198).

The sum is in `activation_bytes`. What a key changes:

    seq_length, train_micro_batch_size_per_gpu   tokens of everything below, and scores by the square of seq_length
    context_parallel_size, _kind                 tokens of a rank, and gathered keys and values
    model_parallel_size, sequence_parallel       what is split over heads and widths; hidden states and norms
    pipe_parallel_size, pipeline_schedule,       micro batches in flight of each range, hidden states that stages
        virtual_stages                           exchange (`activation_bytes`, `_in_flight`)
    checkpoint_activations, checkpoint_in_cpu,   what blocks keep and recompute (`_blocks_memory`, `_chunk_inputs`,
        checkpoint_num_layers,                   `kept_inputs_on_host`)
        recompute_granularity, partition_activations,
        no_recompute_layers, activation_memory_budget
    attention_config, attention_dropout,         operands, scores and masks of attention (`attention.py`)
        reset_attention_mask, attention_softcap, pos_emb
    hidden_dropout, norm, norm_placement,        what a block keeps for each token (`_token_bytes`)
        gpt_j_residual, activation, mlp_width
    mlp_tile_size                                one tile of the MLP instead of all tokens (`_tile_bytes`)
    moe_*, expert_model_parallel_size            rows of experts (`_expert_bytes`), a new gradient
                                                 (`_expert_gradient_bytes`)
    fp8                                          rounded operands of experts (`_expert_fp8_bytes`)
    precision                                    bytes of a number
    vocabulary, teacher_logits, train_impl       logits of a chunk (`head.py`)
    mtp_num_layers                               what its modules keep, and a head for each (`_multi_token_bytes`)
    num_layers, hidden_size, heads, qk_norm,     sizes of all of these, from the architecture
        logit_softcap, soft_prompt_tuning
    gradient_accumulation_steps                  micro batches that a schedule can have in flight
    zero_optimization.stage, reduce_bucket_size  new gradients of experts
    compile_layers, deterministic                temporaries that a compiler removes, kernels of attention

The number that the plan reports is the largest of the phases of a step (`neox.plan.memory.estimate.stage_memory`):
this sum, the reduction after the passes, and the update. So ZeRO's and the optimizer's keys can decide it, too.

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
    ADAPTER,
    BLOCK_OFFSET,
    BLOCKS,
    FP8_MULTIPLE,
    FP8_QUOTIENTS,
    MASKED_QUERY_BLOCK,
    MASKED_SCORES,
    NORMS,
    RESIDUALS,
    Architecture,
    Attention,
    BlockKind,
    MicroBatch,
    block_kinds,
)
from neox.plan.layout import Workload
from neox.plan.memory.attention import (
    attention_memory,
    fixed_bias_bytes,
    keeps_latent_weights,
    keeps_scores,
)
from neox.plan.memory.head import head_bytes
from neox.plan.memory.norms import fp32_of_norm
from neox.plan.ranks.pipeline_schedules import PIPELINE_SCHEDULES
from neox.plan.ranks.stages import StagePlan

_FP32 = 4


class BlocksMemory(NamedTuple):
    """Bytes of the activations of a stage's blocks.

    Attributes:
        kept: What one micro batch keeps from its forward pass to its backward pass.
        recomputed: What the backward pass computes again at once.
    """

    kept: int
    recomputed: int


class ActivationMemory(NamedTuple):
    """Bytes of the activations of a stage.

    Attributes:
        kept: What all micro batches in flight keep.
        head_pass: What the head's forward and backward pass take on top; 0 on stages without it.
        block_pass: What the backward pass of one block takes on top.
        embedding_pass: What the end of a backward pass takes in all, when the micro batch's activations are freed; 0 on
            stages without the embedding.
    """

    kept: int
    head_pass: int
    block_pass: int
    embedding_pass: int = 0

    @property
    def peak(self) -> int:
        """Bytes at the peak of a training step."""
        return max(self.kept + max(self.head_pass, self.block_pass), self.embedding_pass)


def activation_bytes(run: Workload, stage: StagePlan) -> ActivationMemory:
    """Return bytes of activations in a training step on one rank of a stage.

    They are what all micro batches in flight keep, and on top the head's pass, then one block's backward pass, then the
    gradient of the embedding:

        bytes
          |            _  head, or the backward pass of one block
          |       ____| |__
          |   ___|         |___   _  embedding
          |__|                 |_| |   kept by micro batches in flight; the backward pass frees it
          +--------------------------> time
             forward     backward
    """
    hidden_states = run.tokens * run.network.hidden_size * run.bytes_per_number
    boundary = hidden_states // run.token_shares

    # What each micro batch keeps: tensors of blocks, a shared bias of scores, hidden states of neighbouring stages.
    exchanged = 0
    if run.layout.pp_size > 1:
        exchanged = 2 * boundary
    kept = 0
    kept_by_others = 0  # when the backward pass of a micro batch has come to the embedding
    for layer_range, micro_batches in zip(stage.ranges, _in_flight(run, stage), strict=True):
        of_range = _blocks_memory(run, replace(stage, ranges=(layer_range,)))
        of_micro_batch = of_range.kept + fixed_bias_bytes(run) + exchanged
        kept += micro_batches * of_micro_batch
        kept_by_others += (micro_batches - (layer_range.start == 0)) * of_micro_batch

    # The backward pass begins with the head. Then the blocks are at work, one after the other, with their gradients.
    head_pass = 0
    if stage.holds(run.layers.head.index):
        head_pass = 2 * hidden_states + head_bytes(run)
        kept += run.tokens * run.network.hidden_size * fp32_of_norm(run) // run.token_shares  # the final norm's
        kept += run.network.mtp_num_layers * _multi_token_bytes(run)
    gathered = 2 * (hidden_states - boundary)  # a product's whole input, and its gradient before it is divided
    tile = _tile_bytes(run)
    at_work = max(_block_gradient_bytes(run), _gathered_pass_bytes(run))
    at_work = max(at_work + tile + tile // 2, _recurrence_pass_bytes(run, stage))
    of_experts = _expert_gradient_bytes(run, stage) + _expert_fp8_bytes(run, stage)
    block_pass = _blocks_memory(run, stage).recomputed + at_work + gathered + of_experts

    # The gradient of a weight that the head shares waits for the embedding's, and their sum is a third tensor.
    embedding_pass = 0
    if stage.holds(0) and run.layers.word_embeddings.trained:
        gradient = run.layers.word_embeddings.shard_numel(run.layout.tp_size) * run.bytes_per_number
        embedding_pass = kept_by_others + gradient
        if stage.holds(run.layers.head.index) and run.layers.head.tied_to == 0:
            block_pass += gradient
            embedding_pass += 2 * gradient
    return ActivationMemory(kept, head_pass, block_pass, embedding_pass)


def _blocks_memory(run: Workload, stage: StagePlan) -> BlocksMemory:
    """Return what the blocks of a stage keep and recompute.

    recomputation      kept                                          recomputed at once
    none               blocks x block                                -
    by the compiler    blocks x (input + budget x the rest)          the rest of one block
    core_attn          all blocks without scores                     scores of one block
    full_attn          all blocks without scores and operands        scores and operands of one block
    full               inputs of chunks, and blocks that keep all    the longest chunk of blocks
    """
    training = run.config.training
    pairs = zip(run.network.attention, run.network.mlp, strict=True)
    size_of_kind = {pair: _kind_bytes(run, BLOCKS[pair[0]], pair[1]) for pair in set(pairs)}
    sizes = {}
    for layer in stage.entries(run.layers):
        if layer.kind == "block":
            number = layer.index - BLOCK_OFFSET
            sizes[number] = size_of_kind[run.network.attention[number], run.network.mlp[number]]
    largest = max(sizes.values(), default=0)
    recomputed_runs = _runs_of_recomputed_blocks(run, stage)
    if run.recomputes_blocks:
        inputs = 0
        if not run.layout.kept_inputs_on_cpu or run.on_cpu:
            inputs = _chunk_inputs(run, stage)
        whole_blocks = sum(size for number, size in sizes.items() if number in run.layout.no_recompute_blocks)
        longest_chunk = min(training.checkpoint_num_layers, max(recomputed_runs, default=0))
        recomputed = longest_chunk * largest
        if recomputed and inputs and not training.partition_activations:  # the first block's input is among these
            recomputed -= _chunk_input_bytes(run)
        return BlocksMemory(whole_blocks + inputs, recomputed)

    budget = 1.0
    if training.activation_memory_budget is not None:
        budget = training.activation_memory_budget
    block_input = run.tokens * run.network.hidden_size * run.bytes_per_number // run.token_shares
    kept = sum(block_input + int(budget * (size - block_input)) for size in sizes.values())
    if not run.layout.recomputes:
        return BlocksMemory(kept, largest - block_input - int(budget * (largest - block_input)))

    released = []
    for number in sizes:
        if number not in run.layout.no_recompute_blocks:
            released.append(_released_by_attention(run, BLOCKS[run.network.attention[number]]))
    return BlocksMemory(kept - sum(released), max(released, default=0))


def _released_by_attention(run: Workload, kind: BlockKind) -> int:
    """Return the bytes of what attention computes again in a block if only it is recomputed, or a part of it."""
    if kind.attention is None:
        return 0
    attention = attention_memory(run, kind.attention)
    if run.layout.recomputed_part == "full_attn":
        return attention.scores + attention.operands
    return attention.scores


def _multi_token_bytes(run: Workload) -> int:
    """Return the bytes that a module of multi-token prediction keeps for one micro batch, without its head.

    The vectors of later tokens, both halves of the projection's input, the output of the block, and what its norm makes
    of it: (1 + 2 + 1) x tokens x H x number / token shares + tokens x H x number. And what the block keeps.
    """
    network = run.network
    last = network.num_layers - 1
    hidden_states = run.tokens * network.hidden_size * run.bytes_per_number
    share = hidden_states // run.token_shares
    of_block = _kind_bytes(run, BLOCKS[network.attention[last]], network.mlp[last])
    if run.layout.recomputes and last not in run.layout.no_recompute_blocks:
        if run.recomputes_blocks:
            of_block = _one_chunk_input(run)
        else:
            of_block -= _released_by_attention(run, BLOCKS[network.attention[last]])
    elif run.config.training.activation_memory_budget is not None:
        of_block = share + int(run.config.training.activation_memory_budget * (of_block - share))
    norms = 3 * run.tokens * network.hidden_size * fp32_of_norm(run) // run.token_shares
    kept = 4 * share + hidden_states + norms + of_block
    lora = run.layers.lora
    if lora is not None:
        if fp32_of_norm(run):  # none of the norm of later tokens, which nothing trains
            kept -= (2 + 2) * run.tokens * network.hidden_size * _FP32 // run.token_shares
        if "eh_proj" not in lora.targets:
            kept -= 2 * share
    return kept


def _one_chunk_input(run: Workload) -> int:
    """Return the bytes on the device of the input of one recomputed chunk: tokens x H x number; 0 if on the host."""
    if run.layout.kept_inputs_on_cpu and not run.on_cpu:
        return 0
    return _chunk_input_bytes(run)


def _chunk_input_bytes(run: Workload) -> int:
    """Return the bytes of the input of one recomputed chunk for one micro batch: tokens x H x number."""
    chunk_input = run.tokens * run.network.hidden_size * run.bytes_per_number // run.token_shares
    if run.config.training.partition_activations:
        chunk_input //= run.layout.tp_size
    return chunk_input


def _chunk_inputs(run: Workload, stage: StagePlan) -> int:
    """Return the bytes of the inputs of recomputed chunks for one micro batch: chunks x tokens x H x number."""
    training = run.config.training
    chunks = 0
    for blocks in _runs_of_recomputed_blocks(run, stage):
        chunks += -(-blocks // training.checkpoint_num_layers)
    return chunks * _chunk_input_bytes(run)


def kept_inputs_on_host(run: Workload, stage: StagePlan) -> int:
    """Return the bytes of the inputs of recomputed blocks in main memory: micro batches in flight x chunks x input."""
    if not run.recomputes_blocks or not run.layout.kept_inputs_on_cpu or run.on_cpu:
        return 0
    total = 0
    for layer_range, micro_batches in zip(stage.ranges, _in_flight(run, stage), strict=True):
        total += micro_batches * _chunk_inputs(run, replace(stage, ranges=(layer_range,)))
    last = run.network.num_layers - 1
    if stage.holds(run.layers.head.index) and last not in run.layout.no_recompute_blocks:
        total += run.network.mtp_num_layers * _chunk_input_bytes(run)
    return total


def _in_flight(run: Workload, stage: StagePlan) -> Sequence[int]:
    """Return the largest number of micro batches that each range of a stage holds between forward and backward pass."""
    schedule = PIPELINE_SCHEDULES[run.layout.pipeline_schedule]
    return schedule.most_kept(stage.index, run.layout.pp_size, len(stage.ranges), run.layout.accumulation_steps)


def _runs_of_recomputed_blocks(run: Workload, stage: StagePlan) -> list[int]:
    """Return the lengths of runs of neighbouring blocks that are recomputed: 2 and 3 if block 2 of six is not."""
    lengths = []
    for layer_range in stage.ranges:
        blocks = [index - BLOCK_OFFSET for index in layer_range if run.layers[index].kind == "block"]
        for is_kept, neighbours in groupby(blocks, lambda block: block in run.layout.no_recompute_blocks):
            if not is_kept:
                lengths.append(len(list(neighbours)))
    return lengths


def block_bytes(run: Workload) -> int:
    """Return bytes that the backward pass of one block needs, for one micro batch."""
    network = run.network
    kinds = set(zip(network.attention, network.mlp, strict=True))
    return max(_kind_bytes(run, BLOCKS[kind], mlp) for kind, mlp in kinds)


def _block_gradient_bytes(run: Workload) -> int:
    """Return the bytes of gradients in the backward pass of one block, on top of what the block keeps.

    Of an MLP: of its output, and of the activation's input, whose output is freed by then, and the newest gradient of a
    weight. Of attention, while the MLP's activations are freed: of its output and operands, or of all weights of pairs
    before and after the softmax. The residual stream has another gradient than the output if this is scaled, dropped
    or normalised, and in compiled layers (measured on an H100). Blocks with experts or without attention take half of
    what they keep.
    """
    network = run.network
    kinds = block_kinds(network)
    if any(kind.activations is not None for kind in kinds) or network.num_experts or run.in_tiles:
        return block_bytes(run) // 2
    streams = 1
    norms = RESIDUALS[network.residual].norms
    changes_output = run.config.training.hidden_dropout or network.residual_multiplier != 1 or norms.after_mlp
    if changes_output or run.compiles_layers:
        streams += 1
    hidden_states = streams * run.tokens * network.hidden_size * run.bytes_per_number // run.token_shares
    product = ACTIVATIONS[network.activation].width_factor * network.mlp_width * run.bytes_per_number
    of_mlp = run.tokens * product // run.layout.tp_size
    of_attention = 0
    for kind in kinds:
        if kind.attention is not None:
            of_attention = max(of_attention, _attention_gradient_bytes(run, kind.attention))
    of_attention -= run.tokens * _mlp_bytes(run, network.mlp_width)
    largest = 0
    for layer in run.layers:
        if layer.kind == "block":
            for spec in layer.parameters:
                if spec.trained:
                    largest = max(largest, spec.shard_numel(run.layout.tp_size))
    return hidden_states + max(of_mlp, of_attention) + largest * run.bytes_per_number


def _attention_gradient_bytes(run: Workload, attention: Attention) -> int:
    """Return the bytes of gradients in the backward pass of attention: of its operands, or twice of all weights."""
    if keeps_latent_weights(run, attention) and not run.gathers_keys:
        return 2 * run.tokens * run.network.num_attention_heads * run.sequence_length * _FP32 // run.layout.tp_size
    if keeps_scores(run, attention):
        gradients = 3 if run.network.attention_sinks else 2  # one more with the sinks' scores
        pairs = run.network.num_attention_heads * run.sequence_length // run.layout.tp_size
        return gradients * run.tokens * pairs * run.bytes_per_number
    return attention_memory(run, attention).operands


def _unkept_bytes(run: Workload) -> int:
    """Return the bytes for one token that a block of frozen weights does not keep, unlike a trained one.

    They are the inputs of linear layers without an adapter, and of norms by steps the normalised input in fp32, which
    only the gradient of their scale needs.
    """
    network = run.network
    lora = run.layers.lora
    if lora is None and not network.soft_prompt_tokens:
        return 0
    adapted = frozenset(lora.targets if lora is not None else ())
    number = run.bytes_per_number
    norms = RESIDUALS[network.residual].norms
    hidden = 0
    if fp32_of_norm(run):
        hidden += norms.number * _FP32 * network.hidden_size
    unkept = hidden // run.token_shares
    if network.latent_width and run.on_cpu:
        unkept += (network.latent_width + network.query_latent_width) * _FP32 // run.token_shares
    if run.layout.zero_stage == 3:  # DeepSpeed's product keeps its input in any case
        return unkept

    hidden = 0
    inputs_of_attention = {"query_key_value", "query", "query_down", "key_value_down"}
    if norms.before_attention is not None and adapted.isdisjoint(inputs_of_attention):
        hidden += network.hidden_size * number
    if norms.before_mlp is not None and "dense_h_to_4h" not in adapted:
        hidden += network.hidden_size * number
    if network.latent_width and "key_value_up" not in adapted:
        hidden += network.latent_width * number
    if network.latent_width and "query_up" not in adapted:
        hidden += network.query_latent_width * number
    unkept += hidden // run.token_shares
    if "dense_4h_to_h" not in adapted:
        unkept += network.mlp_width * number // run.layout.tp_size
    return unkept


def _kind_bytes(run: Workload, kind: BlockKind, mlp: str) -> int:
    """Return bytes that a block with a kind of MLP keeps for its backward pass, for one micro batch."""
    network = run.network
    if kind.activations is None:
        values = network.num_attention_heads * (network.value_head_dim or network.head_dim)
        of_output = values * run.bytes_per_number // run.layout.tp_size  # attention's output is split
        of_token = _token_bytes(run, mlp) + of_output
        if not network.num_experts and not run.in_tiles:
            of_token -= _unkept_bytes(run)
        assert kind.attention is not None
        return run.tokens * of_token + sum(attention_memory(run, kind.attention))
    of_mixer = kind.activations(network, _micro_batch(run))
    if kind.two_sublayers:
        return of_mixer + run.tokens * _token_bytes(run, mlp)
    return of_mixer


def _micro_batch(run: Workload) -> MicroBatch:
    """Return a micro batch on one rank as the rows of kinds take it."""
    return MicroBatch(
        run.tokens,
        run.sequence_length,
        run.token_shares,
        run.layout.tp_size,
        run.bytes_per_number,
        run.separates_documents,
        fp32_of_norm(run),
    )


def _recurrence_pass_bytes(run: Workload, stage: StagePlan) -> int:
    """Return the bytes of the backward pass of a recurrence, the most of all blocks of a stage; 0 without any.

    On top of what is kept come all tensors that it computes again, and the gradients of two hidden states; the gradient
    of its output takes the place of the output. What the block keeps behind the recurrence has been freed, and what
    later blocks keep.
    """
    most = 0
    of_later_blocks = 0
    batch = _micro_batch(run)
    hidden_states = 2 * run.tokens * run.network.hidden_size * run.bytes_per_number // run.token_shares
    for layer in reversed(stage.entries(run.layers)):
        if layer.kind != "block":
            continue
        number = layer.index - BLOCK_OFFSET
        kind = BLOCKS[run.network.attention[number]]
        mlp = run.network.mlp[number]
        recomputed = kind.recomputed(run.network, batch)
        if recomputed:
            freed = of_later_blocks + kind.behind(run.network, batch)
            if kind.two_sublayers:
                freed += run.tokens * _second_sublayer_bytes(run, mlp)
            most = max(most, recomputed + hidden_states - freed)
        if not run.layout.recomputes:
            of_later_blocks += _kind_bytes(run, kind, mlp)
    return most


def _token_bytes(run: Workload, mlp: str) -> int:
    """Return bytes that a block of two sublayers keeps for one token, without its attention or mixer.

    Tensors of width H are on every tensor rank, for all tokens or its share.
    """
    network = run.network
    number = run.bytes_per_number
    hidden = network.hidden_size
    tensors = 1 + RESIDUALS[network.residual].norms.number  # the block's input, and an input or output of each norm
    if run.in_tiles:
        tensors -= _norms_in_tiles(network)
    if not network.parallel_residual:
        tensors += 1  # the sum of the input and the attention
    whole = tensors * hidden * number
    norms = RESIDUALS[network.residual].norms.number
    if run.in_tiles:
        norms = 0 if NORMS[network.norm].by_steps else norms - _norms_in_tiles(network)
    whole += norms * fp32_of_norm(run) * hidden
    if run.config.training.hidden_dropout:
        whole += 2 * hidden  # two masks of one byte
    return whole // run.token_shares + _second_sublayer_bytes(run, mlp)


def _second_sublayer_bytes(run: Workload, mlp: str) -> int:
    """Return bytes that an MLP or a mixture of experts keeps for one token; 0 in tiles."""
    if mlp == "experts":
        return _expert_bytes(run)
    return 0 if run.in_tiles else _mlp_bytes(run, run.network.mlp_width)


def _norms_in_tiles(network: Architecture) -> int:
    """Return the number of norms that are computed within the MLP's tiles."""
    norms, rule = RESIDUALS[network.residual]
    if rule == "post_norm":  # its norms are of sums
        return 0
    return (norms.before_mlp is not None) + (norms.after_mlp is not None)


def _tile_bytes(run: Workload) -> int:
    """Return the bytes of the backward pass of one tile of an MLP with its norms; 0 without tiles."""
    network = run.network
    if not run.in_tiles:
        return 0
    hidden = (1 + _norms_in_tiles(network)) * network.hidden_size * run.bytes_per_number
    if fp32_of_norm(run):
        hidden += 2 * _FP32 * network.hidden_size
    of_token = hidden + _mlp_bytes(run, network.mlp_width)
    return run.layout.micro_batch_size * run.layout.tile_tokens * of_token


def _gathered_pass_bytes(run: Workload) -> int:
    """Return the additional bytes of the backward pass of attention if it gathers keys and values again.

    Keys and values of all tokens and their gradients, 4 x keys x cp x number / split; gradients of queries, of the
    output and of hidden states. The MLP's activations are freed by then. On a CPU the gradients of keys and values are
    fp32, and there are the scores of some queries.
    """
    network = run.network
    if not run.gathers_keys or run.keeps_gathered_keys:
        return 0
    heads = network.num_attention_heads * network.head_dim
    keys = network.attended_heads * network.head_dim
    split = (4 * run.layout.cp_size * keys + 2 * heads) // run.layout.tp_size
    whole = 2 * network.hidden_size // run.token_shares
    of_token = (split + whole) * run.bytes_per_number
    if not run.in_tiles:
        of_token -= _mlp_bytes(run, network.mlp_width)
    scores = 0
    if run.on_cpu:
        of_token += 2 * run.layout.cp_size * keys * (_FP32 - run.bytes_per_number) // run.layout.tp_size
        scores = 3 * _block_scores(run) * run.bytes_per_number  # a block's mask, weights and their gradient
    return run.tokens * of_token + scores


def _block_scores(run: Workload) -> int:
    """Return the scores that a CPU has at once, of some heads of one block of queries with all keys."""
    network = run.network
    key_heads = network.attended_heads // run.layout.tp_size
    if not run.separates_documents:
        key_heads *= run.layout.micro_batch_size
    groups = network.num_attention_heads // network.attended_heads
    of_head = groups * min(MASKED_QUERY_BLOCK, run.queries) * run.sequence_length
    return of_head * min(key_heads, max(1, MASKED_SCORES // of_head))


def _mlp_bytes(run: Workload, width: int) -> int:
    """Return bytes that an MLP of a width keeps for one token: its first product, and what the activation makes of it.

    `Activation.kept` x width x number / split, or compiled (width factor + 1) x width x number / split.
    """
    activation = ACTIVATIONS[run.network.activation]
    tensors = activation.width_factor + 1 if run.compiles_layers else activation.kept
    return tensors * width * run.bytes_per_number // run.layout.tp_size


def _expert_bytes(run: Workload) -> int:
    """Return bytes that a mixture of experts keeps for one token on one tensor rank, all tokens kept.

    For each of the token's experts its input and output, 2 x H x number, what an MLP keeps, and its number, row and
    place, 3 x 8. The router keeps two fp32 scores of every expert, and its input in fp32 if that is another type.
    """
    network = run.network
    number = run.bytes_per_number
    hidden = network.hidden_size
    of_expert = 2 * hidden * number + _mlp_bytes(run, network.expert_width) + 3 * 8
    router = 2 * _FP32 * network.num_experts
    if number != _FP32:
        router += _FP32 * hidden
    shared = _mlp_bytes(run, network.shared_expert_width)
    return network.experts_per_token * of_expert + router + shared


def _expert_gradient_bytes(run: Workload, stage: StagePlan) -> int:
    """Return the bytes of the newest gradient of an expert weight, before it is added to the accumulated gradient.

    Elements of the largest expert tensor on this rank x number, and a copy for the reduction with ZeRO 2 if the tensor
    exceeds the bucket.
    """
    largest = 0
    for layer in stage.entries(run.layers):
        for spec in layer.parameters:
            if spec.experts and spec.trained:
                largest = max(largest, spec.shard_numel(run.layout.tp_size) // run.layout.ep_size)
    copies = 1
    if run.layout.zero_stage == 2 and largest > run.reduce_bucket:
        copies += 1
    return copies * largest * run.bytes_per_number


def _expert_fp8_bytes(run: Workload, stage: StagePlan) -> int:
    """Return the bytes of rounded operands of a product of experts in fp8, one product at a time; 0 without fp8.

    Of the gradient of rows: all weights of a matrix on this rank and the rows, 1 byte each. Of the gradient of weights:
    both kinds of rows, and the wider one copied in bf16, with zeros after each expert's. And the fp32 quotients of a
    part of these. A CPU multiplies one expert at a time, in fp32.
    """
    network = run.network
    if run.config.training.fp8 is None or not network.num_experts:
        return 0
    held = network.num_experts // run.layout.ep_size
    matrix = 0
    for layer in stage.entries(run.layers):
        for spec in layer.parameters:
            if spec.experts and spec.is_matrix and ADAPTER not in spec.name:
                matrix = max(matrix, spec.shard_numel(run.layout.tp_size) // run.layout.ep_size)
    rows = run.tokens * network.experts_per_token
    width = ACTIVATIONS[network.activation].width_factor * network.expert_width // run.layout.tp_size
    if run.on_cpu:
        return _FP32 * (matrix + rows * (network.hidden_size + width)) // held
    filled = rows + held * (FP8_MULTIPLE - 1)
    of_rows = matrix + rows * max(network.hidden_size, width)
    of_weights = filled * (network.hidden_size + width + 2 * max(network.hidden_size, width))
    return max(of_rows, of_weights) + _FP32 * min(FP8_QUOTIENTS, max(matrix, filled * width))
