"""Memory estimate for one GPU in training: weights, gradients, optimizer states, activations.

States follow the wrapper that DeepSpeed (0.19) chooses for a precision and a ZeRO stage; activations follow this
project's layers, tensor by tensor (compare Korthikanti et al. 2022, arXiv:2205.05198). Not counted: the CUDA context,
communication buffers and fragmentation; `fit.py` keeps a reserve for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from neox.architecture import ACTIVATIONS, BLOCK_OFFSET, NORMS, POSITIONS, SPARSITY, LayerEntry, LayerPlan
from neox.config.architecture import architecture_of
from neox.config.neox_config import NeoXConfig
from neox.config.plan import AttentionImpl, BatchPlan, MemoryPlan, Precision, Topology
from neox.config.sections.deepspeed import DeepSpeedConfig, ZeroSettings
from neox.config.sections.optimizer_table import State
from neox.config.sections.training import RecomputedPart
from neox.config.stages import held_parameters

# DeepSpeed's default for reduce_bucket_size, in elements.
_REDUCE_BUCKET = 500_000_000
# Logits that head and cross entropy hold at once, on a GPU and on a CPU.
_LOSS_CHUNK, _CPU_LOSS_CHUNK = 2**27, 2**21
# DeepSpeed's defaults of ZeRO 3: elements updated at once, gathered at once, and passed before a weight is used again.
_SUB_GROUP, _LIVE_PARAMETERS, _REUSE_DISTANCE = 1_000_000_000, 1_000_000_000, 1_000_000_000
# Elements that DeepSpeed's engine reduces at once where ZeRO does not reduce.
_ENGINE_BUCKET = 500_000_000


@dataclass(frozen=True)
class MemorySetting:
    """What the estimate depends on besides the layer plan; small, so that many can be tried.

    Attributes:
        pp_size: Pipeline stages.
        tp_size: Tensor ranks.
        dp_size: Data-parallel ranks.
        zero: ZeRO stage.
        micro: Samples of one forward pass.
        accumulation: Forward passes per optimizer step.
        recompute: Layers recomputed together; 0 for none.
        recomputed: What of them is recomputed.
        keeping: Numbers of blocks that keep their activations all the same.
        divided_inputs: Whether kept inputs of recomputed blocks are divided over tensor ranks.
        inputs_on_cpu: Whether they are in CPU memory.
        noise_scale: Whether gradients of several steps are summed in fp32 on the device.
        precision: Number format of weights and activations.
        fp32_gradients: Whether gradients of half-precision weights are accumulated in fp32.
        immediate: Whether a bf16 gradient is released as soon as it is accumulated.
        sequence: Tokens of one sample.
        attention: Attention kernel that needs the most memory.
        attention_dropout: Whether attention probabilities are dropped.
        hidden_dropout: Whether hidden states are dropped.
        reduce_bucket: Elements that ZeRO reduces at once.
        predicted: Tokens of a sample that go through the head.
        buckets: Buffers of so many elements.
        sub_group: Elements that ZeRO 3 updates at once.
        live: Elements of gathered weights that ZeRO 3 holds at once.
        communicated: Bytes of a gradient in the engine's reduction.
        on_cpu: Whether the rank runs on a CPU, which takes memory when it is written to.
        offload: What is in host memory: 0 nothing, 1 optimizer states, 2 weights too.
        states: What the optimizer keeps for each parameter.
        kept: Part of a layer's activations that is kept, beside its input.
    """

    pp_size: int
    tp_size: int
    dp_size: int
    zero: int
    micro: int
    accumulation: int
    recompute: int
    precision: Precision
    fp32_gradients: bool
    immediate: bool
    sequence: int
    attention: AttentionImpl
    attention_dropout: bool
    hidden_dropout: bool
    reduce_bucket: int
    predicted: int
    states: tuple[State, ...]
    buckets: int
    sub_group: int
    live: int
    communicated: int
    offload: int
    on_cpu: bool = False
    recomputed: RecomputedPart = "full"
    keeping: tuple[int, ...] = ()
    noise_scale: bool = False
    kept: float = 1.0
    divided_inputs: bool = False
    inputs_on_cpu: bool = False

    @property
    def bytes_per_number(self) -> int:
        """Bytes of a weight or an activation."""
        return 4 if self.precision == "fp32" else 2


def memory_setting(
    config: NeoXConfig, grid: Topology, batch: BatchPlan, precision: Precision, attention: tuple[AttentionImpl, ...]
) -> MemorySetting:
    """Return the setting of a run."""
    model, training, zero = config.model, config.training, config.deepspeed.zero_optimization
    asked = config.deepspeed.data_types.grad_accum_dtype if config.deepspeed.data_types else None
    sequence = (model.seq_length or 0) + architecture_of(config).soft_prompt_tokens
    return MemorySetting(
        pp_size=grid.pp_size,
        tp_size=grid.tp_size,
        dp_size=grid.dp_size,
        zero=zero.stage,
        micro=batch.train_micro_batch_size_per_gpu,
        accumulation=batch.gradient_accumulation_steps,
        recompute=training.checkpoint_num_layers if training.checkpoint_activations else 0,
        precision=precision,
        fp32_gradients=precision == "bf16" and zero.stage >= 1 and asked in (None, "fp32"),
        immediate=config.deepspeed.bf16.immediate_grad_update if config.deepspeed.bf16 else True,
        sequence=sequence,
        predicted=sequence if model.predicted_tokens is None else model.predicted_tokens,
        attention=min(attention, key=("eager", "fused", "flash").index),
        attention_dropout=training.attention_dropout > 0,
        hidden_dropout=training.hidden_dropout > 0,
        reduce_bucket=zero.reduce_bucket_size or _REDUCE_BUCKET,
        states=config.optimizer.optimizer.states,
        recomputed=training.part_to_recompute,
        keeping=training.no_recompute_layers or (),
        divided_inputs=training.partition_activations,
        inputs_on_cpu=training.checkpoint_in_cpu,
        noise_scale=config.logging.log_gradient_noise_scale and not config.logging.gradient_noise_scale_cpu_offload,
        kept=1.0 if training.activation_memory_budget is None else training.activation_memory_budget,
        buckets=2 if (zero.stage == 3 if zero.overlap_comm is None else zero.overlap_comm) else 1,
        sub_group=zero.sub_group_size or _SUB_GROUP,
        live=_gathered_at_once(zero),
        communicated=_communicated_bytes(config.deepspeed, precision),
        offload=zero.offloads_optimizer + zero.offloads_weights,
    )


def _gathered_at_once(zero: ZeroSettings) -> int:
    """Return the elements that ZeRO 3 gathers in advance, or keeps between two uses if they are more.

    A weight is kept until the backward pass if the layers that come before that, each once in the forward and once in
    the backward pass, have fewer elements than the distance of reuse. The limit of live weights does not release it.
    """
    live = _LIVE_PARAMETERS if zero.stage3_max_live_parameters is None else zero.stage3_max_live_parameters
    reuse = _REUSE_DISTANCE if zero.stage3_max_reuse_distance is None else zero.stage3_max_reuse_distance
    return max(live, reuse // 2)


def _communicated_bytes(deepspeed: DeepSpeedConfig, precision: Precision) -> int:
    """Return bytes of a gradient while it is reduced; DeepSpeed's default is the precision of the weights."""
    chosen = "fp32" if deepspeed.fp32_allreduce else deepspeed.communication_data_type or precision
    return 4 if chosen == "fp32" else 2


def stage_memory(layers: LayerPlan, bounds: list[int], stage: int, setting: MemorySetting) -> MemoryPlan:
    """Return bytes on one GPU of a pipeline stage that holds layers [bounds[stage], bounds[stage + 1])."""
    here = layers.layers[bounds[stage] : bounds[stage + 1]]
    owners = {layer.index for layer in here}
    held, trained = (
        sum(
            held_parameters(layers, layer, setting.tp_size, trained=only, tied=layer.tied_to not in owners)
            for layer in here
        )
        for only in (False, True)
    )
    copies = {p for layer in here for p in layer.parameters if p.shared_with is not None}
    copied = sum(p.numel // setting.tp_size for p in copies if p.shared_with not in owners)
    held, trained = held + copied, trained + copied
    kept = _kept_per_parameter(here, setting.states)
    weights, (_, gradients, optimizer) = state_bytes(held, setting, kept)[0], state_bytes(trained, setting, kept)
    working = activation_bytes(layers, bounds, stage, setting)
    if setting.zero == 3 and setting.dp_size > 1:
        working += setting.bytes_per_number * min(held, setting.live)  # weights gathered for the layers at work
    if setting.zero == 2 and setting.accumulation > 1 and not setting.offload and not setting.fp32_gradients:
        working += setting.bytes_per_number * trained // setting.dp_size  # this rank's part, beside its earlier sum
    host = host_bytes(held, trained, setting, kept)
    working = max(working, reduction_bytes(trained, setting), step_bytes(trained, setting))
    return MemoryPlan(weights, gradients, optimizer, working, host)


def fullest_stage(layers: LayerPlan, bounds: list[int], setting: MemorySetting) -> MemoryPlan:
    """Return bytes on the fullest GPU."""
    return max((stage_memory(layers, bounds, i, setting) for i in range(len(bounds) - 1)), key=lambda plan: plan.total)


def _kept_per_parameter(layers: Sequence[LayerEntry], states: Sequence[State]) -> float:
    """Return the mean bytes that an optimizer keeps for a trained parameter of some layers."""
    if all(state.axis is None and state.of == "all" for state in states):
        return sum(state.bytes for state in states)
    specs = [(layer, spec) for layer in layers for spec in layer.parameters if spec.trained]
    kept = sum(
        state.bytes * prod(shape)
        for layer, spec in specs
        for state in states
        if (shape := state.shape(spec.shape, hidden=layer.is_hidden(spec))) is not None
    )
    return kept / max(1, sum(spec.numel for _, spec in specs))


def state_bytes(parameters: int, setting: MemorySetting, kept: float) -> tuple[int, int, int]:
    """Return bytes of weights, gradients and optimizer states on a GPU that holds so many parameters.

    Args:
        parameters: Their number.
        setting: The run.
        kept: Bytes that the optimizer keeps for each.

    Returns:
        The last includes the fp32 copy of the weights that every wrapper but plain fp32 keeps (ZeRO one in fp32 too).
    """
    zero, dp, size = setting.zero, setting.dp_size, setting.bytes_per_number
    weights = size * parameters // (dp if zero >= 3 else 1)
    kept += 0 if setting.precision == "fp32" and zero == 0 else 4
    optimizer = int(kept * parameters) // (dp if zero >= 1 or _in_bf16_optimizer(setting) else 1)
    accumulated = (4 if setting.fp32_gradients else size) * parameters
    if _in_bf16_optimizer(setting):
        # And the half-precision gradients of one backward pass, unless they are released in it.
        gradients = accumulated + (0 if setting.immediate else size * parameters)
    elif zero == 0:
        gradients = size * parameters
    else:
        bucket = min(parameters, setting.reduce_bucket) if setting.on_cpu else setting.reduce_bucket
        # With ZeRO 2 and 3 they are reduced in buckets, then only this rank's part is kept.
        gradients = (accumulated // dp if zero >= 2 else accumulated) + size * bucket * setting.buckets
        if setting.offload:  # reduced fp32 gradients of bf16 weights still are on the GPU with ZeRO 1 and 2, others not
            # (ZeRO 1 reduces in the backward pass only if it overlaps; else after it, see `step_bytes`)
            gradients += (setting.fp32_gradients and zero == 1 and setting.buckets > 1) * (4 * parameters // dp)
            gradients -= (zero == 3 or (zero == 2 and not setting.fp32_gradients)) * (accumulated // dp)
    if setting.noise_scale:
        gradients += 4 * parameters
    return (0 if setting.offload > 1 else weights), gradients, (0 if setting.offload else optimizer)


def reduction_bytes(parameters: int, setting: MemorySetting) -> int:
    """Return bytes that the engine's own reduction needs after the backward pass; ZeRO's needs its buckets alone.

    The engine joins accumulated gradients to buckets, and converts a bucket if another type is communicated.
    """
    if setting.dp_size == 1 or not (setting.zero == 0 or _in_bf16_optimizer(setting)):
        return 0
    accumulated = 4 if setting.fp32_gradients else setting.bytes_per_number
    converted = 0 if setting.communicated == accumulated else setting.communicated
    return (accumulated + converted) * min(parameters, _ENGINE_BUCKET)


def step_bytes(parameters: int, setting: MemorySetting) -> int:
    """Return bytes that the update needs beside the states: the gradients again, in fp32; activations are gone then."""
    mine, size = parameters // setting.dp_size, setting.bytes_per_number
    if setting.offload:
        return 4 * mine if setting.fp32_gradients and setting.zero == 1 and setting.buckets == 1 else 0
    if _in_bf16_optimizer(setting) or (setting.precision == "fp32" and setting.zero == 0):
        return 0
    if setting.zero == 0:
        return 4 * parameters
    if setting.zero == 3:
        return 4 * min(mine, setting.sub_group)
    # ZeRO 1 and 2 join this rank's part, and convert it. ZeRO 1 releases the other ranks' parts first.
    joined = 4 * mine if setting.fp32_gradients or size == 4 else (size + 4) * mine
    return joined if setting.zero == 2 else max(0, joined - size * (parameters - mine))


def _in_bf16_optimizer(setting: MemorySetting) -> bool:
    """Whether DeepSpeed updates by its BF16_Optimizer, which divides its states over data ranks even with ZeRO 0."""
    accumulates = (setting.zero == 1 and setting.fp32_gradients) or (setting.zero == 0 and setting.pp_size > 1)
    return setting.precision == "bf16" and accumulates and not setting.offload


def host_bytes(held: int, trained: int, setting: MemorySetting, kept: float) -> int:
    """Return bytes in main memory of a rank's offloaded states; arguments are those of `state_bytes`."""
    if not setting.offload:
        return 0
    size, accumulates = setting.bytes_per_number, 4 if setting.fp32_gradients else setting.bytes_per_number
    each = 4 + 4 + kept  # fp32 weights and gradients
    if setting.zero == 3:
        each += accumulates
    else:  # the updated weights, and what gradients are accumulated in unless a GPU does it
        each += size + (size if setting.zero == 2 and setting.accumulation > 1 and not setting.fp32_gradients else 0)
    weights = size * held if setting.offload > 1 else 0
    return int(each * trained + weights) // setting.dp_size


def layer_bytes(layers: LayerPlan, setting: MemorySetting) -> int:
    """Return bytes that the backward pass of one block needs, for one micro batch."""
    network, split, size = layers.architecture, setting.tp_size, setting.bytes_per_number
    hidden, activation = network.hidden_size, ACTIVATIONS[network.activation]
    heads = network.num_attention_heads * network.head_dim
    tokens = setting.micro * setting.sequence
    # Of width H on every tensor rank: the block's input, the norms' outputs or inputs; in sequence, the MLP's input.
    whole = {"parallel": 3, "parallel_one_norm": 2}.get(network.residual, 4) * hidden * size
    if NORMS[network.norm].by_steps:
        whole += 2 * (2 * 4 - size) * hidden
    if setting.hidden_dropout:
        whole += 2 * hidden  # two masks of one byte
    # Divided over tensor ranks: attention's output; the MLP's first product, and what the activation makes of it.
    divided = heads * size // split + (activation.width_factor + 1) * network.mlp_width * size // split
    attended = tokens * (whole + divided) + sum(_attention_bytes(layers, setting))
    return max(attended, _gate_bytes(layers, setting)) if not network.has_cache else attended


def _attention_bytes(layers: LayerPlan, setting: MemorySetting) -> tuple[int, int]:
    """Return bytes that attention keeps for one micro batch in a block, without its input and output.

    Returns:
        Of queries, keys, values and masks; and of what kernels other than flash keep between them and the output.
    """
    network, split, size = layers.architecture, setting.tp_size, setting.bytes_per_number
    heads, keys = network.num_attention_heads * network.head_dim, network.attended_heads * network.head_dim
    tokens = setting.micro * setting.sequence
    # Query-key-value, rotated queries and keys, normalised ones, repeated ones.
    divided = (heads + 2 * network.num_kv_heads * network.head_dim) * size // split
    if POSITIONS[network.positions].rotates:
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


def _gate_bytes(layers: LayerPlan, setting: MemorySetting) -> int:
    """Return bytes that the backward pass of a block `gmlp` or `amlp` needs."""
    hidden, size, length = layers.architecture.hidden_size, setting.bytes_per_number, setting.sequence
    # Input and norm's output; the gate joined over tensor ranks, normalised and applied (with amlp, its values and the
    # attention's result too). Divided: the wide product, its activation, and the gated half.
    whole = 2 * hidden + (6 if layers.architecture.gmlp_width else 3) * 4 * hidden
    divided = (8 + 8 + 4) * hidden // setting.tp_size
    return (setting.micro * length * (whole + divided) + length**2) * size


def _trains_bias(layers: LayerPlan) -> bool:
    positions = POSITIONS[layers.architecture.positions]
    return positions.biases_scores and bool(positions.shared(layers.architecture))


def activation_bytes(layers: LayerPlan, bounds: list[int], stage: int, setting: MemorySetting) -> int:
    """Return bytes of activations at the peak of a training step on one GPU of a stage.

    Under 1F1B, stage i of p keeps up to p - i micro batches (DeepSpeed allocates at least 2 buffers).
    """
    here = layers.layers[bounds[stage] : bounds[stage + 1]]
    kinds, size = [layer.kind for layer in here], setting.bytes_per_number
    blocks = [layer.index - BLOCK_OFFSET for layer in here if layer.kind == "block"]
    boundary = setting.micro * setting.sequence * layers.architecture.hidden_size * size
    in_flight = 1 if setting.pp_size == 1 else min(max(2, setting.pp_size - stage), setting.accumulation)
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
    at_head = 2 * boundary + _head_bytes(layers, setting) if layers.head.kind in kinds else 0
    return total + max(at_head, working + one_layer // 2)


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
