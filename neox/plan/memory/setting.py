"""What the memory estimate depends on besides the layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from neox.architecture import AttentionImpl
from neox.config.neox_config import NeoXConfig
from neox.config.sections.deepspeed import DeepSpeedConfig, ZeroSettings
from neox.config.sections.optimizer_kind import State
from neox.config.sections.training import RecomputedPart
from neox.plan.architecture import architecture_of
from neox.plan.batch import BatchPlan
from neox.plan.precision import BYTES, Precision
from neox.plan.topology import Topology

# DeepSpeed's default for reduce_bucket_size, in elements.
_REDUCE_BUCKET = 500_000_000
# DeepSpeed's defaults of ZeRO 3: elements gathered at once, and passed before a weight is used again.
_LIVE_PARAMETERS = 1_000_000_000
_REUSE_DISTANCE = 1_000_000_000
# Attention kernels, the one that keeps the most first.
_MOST_MEMORY_FIRST: tuple[AttentionImpl, ...] = ("eager", "fused", "flash")


@dataclass(frozen=True, kw_only=True)
class MemorySetting:
    """What the memory of a rank depends on besides the layers. Hashable, so that many can be tried.

    Attributes:
        pp_size: Pipeline stages.
        tp_size: Tensor ranks.
        dp_size: Ranks with the same weights.
        cp_size: Context ranks, which divide the tokens of each sample.
        gathers_keys: Whether context ranks get the keys and values of all tokens.
        may_compile: Whether layers are compiled on GPUs if ZeRO, tiles and recomputation allow it.
        ep_size: Data-parallel ranks that divide experts.
        pipeline_schedule: Key of `PIPELINE_SCHEDULES`.
        virtual_stages: Value of the key `virtual_stages`.
        sequence_parallel: Whether tensor ranks divide the tokens between layers that split features.
        on_cpu: Whether the rank runs on a CPU, which takes memory when it is written to.
        precision: Number format of weights and activations.
        micro_batch_size: Samples of one forward pass.
        accumulation_steps: Forward passes per optimizer step.
        sequence_length: Tokens of a sample.
        predicted_tokens: Tokens of a sample that go through the head.
        attention: The run's attention kernel that needs the most memory.
        separate_documents: Whether attention keeps the documents of a row apart.
        attention_dropout: Whether attention probabilities are dropped.
        hidden_dropout: Whether hidden states are dropped.
        recompute_chunk: Blocks that are recomputed together; 0 for no recomputation.
        recomputed_part: The part of these blocks that is recomputed.
        no_recompute_blocks: Numbers of blocks that keep their activations nevertheless.
        divides_kept_inputs: Whether tensor ranks divide the kept inputs of recomputed blocks.
        tile_tokens: Tokens of a sample on this rank that MLPs and norms compute at once; 0 for all.
        kept_inputs_on_cpu: Whether the kept inputs of recomputed blocks are in main memory.
        activation_budget: Fraction of a block's activations that the compiler keeps next to the block's input.
        zero_stage: ZeRO stage.
        fp32_gradients: Whether gradients of bf16 weights are accumulated in fp32.
        immediate_gradients: Whether each bf16 gradient is released as soon as it is accumulated.
        sums_gradients: Whether gradients of several steps are summed in fp32 on the device.
        copies_before_update: Whether some updates copy the fp32 weights first.
        communicated_bytes: Bytes of a gradient's element while the engine reduces it.
        reduce_bucket: Elements that ZeRO reduces at once.
        reduce_buffers: Number of buffers of this size.
        hpz_size: Size of the groups of data ranks that shard a second copy of the weights; 1 for no such copy.
        gathered: Elements of weights that ZeRO 3 gathers at once.
        sub_group: Elements that ZeRO 3 updates at once.
        optimizer_states: What the optimizer keeps for each parameter.
        optimizer_temporaries: Tensors of up to `PIECE` elements that the optimizer makes in a step.
        averages_weights: Whether an average of the trained weights is kept.
        averages_on_host: Whether it is in main memory.
        scores_answers: Whether the loss is computed from the log-probabilities of answers.
        teacher_logits: Number of teacher logits per token; 0 without a teacher.
        tempered_logits: Whether the loss divides all logits by a temperature.
        copies_reference: Whether a second copy of the weights is kept as the reference model.
        offloads_states: Whether optimizer states are in main memory or in files.
        offloads_weights: Whether weights are there, too.
        states_in_files: Whether offloaded optimizer states are in files.
        weights_in_files: Whether offloaded weights are in files.
        copies_weights: Whether a background save copies this rank's weights; the first data rank's are saved.
        copies_states: Whether a background save copies this rank's optimizer states.
    """

    pp_size: int
    tp_size: int
    dp_size: int
    cp_size: int = 1
    gathers_keys: bool = False
    may_compile: bool = False
    pipeline_schedule: str
    virtual_stages: int | None = None
    sequence_parallel: bool
    ep_size: int = 1
    on_cpu: bool = False
    precision: Precision
    micro_batch_size: int
    accumulation_steps: int
    sequence_length: int
    predicted_tokens: int
    attention: AttentionImpl
    separate_documents: bool
    attention_dropout: bool
    hidden_dropout: bool
    recompute_chunk: int
    recomputed_part: RecomputedPart
    no_recompute_blocks: tuple[int, ...]
    divides_kept_inputs: bool
    kept_inputs_on_cpu: bool
    tile_tokens: int = 0
    activation_budget: float
    zero_stage: int
    fp32_gradients: bool
    immediate_gradients: bool
    sums_gradients: bool
    copies_before_update: bool
    communicated_bytes: int
    reduce_bucket: int
    reduce_buffers: int
    gathered: int
    sub_group: int
    optimizer_states: tuple[State, ...]
    optimizer_temporaries: int
    offloads_states: bool
    offloads_weights: bool
    states_in_files: bool
    weights_in_files: bool
    copies_weights: bool
    copies_states: bool
    hpz_size: int = 1
    averages_weights: bool = False
    averages_on_host: bool = False
    scores_answers: bool = False
    teacher_logits: int = 0
    tempered_logits: bool = False
    copies_reference: bool = False

    @property
    def token_shares(self) -> int:
        """Parts into which tensor ranks divide the tokens between layers that split features."""
        if self.sequence_parallel:
            return self.tp_size
        return 1

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass on this rank."""
        return self.micro_batch_size * self.queries

    @property
    def queries(self) -> int:
        """Tokens of a sample on this rank."""
        return self.sequence_length // self.cp_size

    @property
    def keeps_gathered_keys(self) -> bool:
        """Whether gathered keys and values are kept for the backward pass: compiled layers do not gather them again."""
        recomputes_part = self.recompute_chunk > 0 and self.recomputed_part != "full"
        compiles = self.may_compile and self.zero_stage < 3 and not self.tile_tokens and not recomputes_part
        return self.gathers_keys and compiles and not self.on_cpu

    @property
    def in_tiles(self) -> bool:
        """Whether MLPs and norms are computed in tiles of tokens."""
        return 0 < self.tile_tokens < self.queries

    @property
    def bytes_per_number(self) -> int:
        """Bytes of a weight or an activation."""
        return BYTES[self.precision]

    @property
    def sums_in_bf16(self) -> bool:
        """Whether gradients of several micro batches are added in bf16, which rounds each sum."""
        return self.precision == "bf16" and not self.fp32_gradients and self.accumulation_steps > 1

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an accumulated gradient."""
        if self.fp32_gradients:
            return BYTES["fp32"]
        return self.bytes_per_number


def memory_setting(
    config: NeoXConfig, grid: Topology, batch: BatchPlan, precision: Precision, attention: tuple[AttentionImpl, ...]
) -> MemorySetting:
    """Return the setting of a run on GPUs."""
    model = config.model
    training = config.training
    zero = config.deepspeed.zero_optimization
    optimizer = config.optimizer.optimizer
    logging = config.logging
    sequence_length = (model.seq_length or 0) + architecture_of(config).soft_prompt_tokens
    predicted_tokens = model.predicted_tokens
    if predicted_tokens is None:
        predicted_tokens = sequence_length
    recompute_chunk = 0
    if training.checkpoint_activations:
        recompute_chunk = training.checkpoint_num_layers
    activation_budget = training.activation_memory_budget
    if activation_budget is None:
        activation_budget = 1.0
    return MemorySetting(
        pp_size=grid.pp_size,
        tp_size=grid.tp_size,
        dp_size=grid.dp_size,
        cp_size=grid.cp_size,
        gathers_keys=grid.cp_size > 1 and grid.cp_kind == "all_gather",
        may_compile=_may_compile(config),
        ep_size=grid.ep_size,
        pipeline_schedule=config.parallelism.pipeline_schedule,
        virtual_stages=config.parallelism.virtual_stages,
        sequence_parallel=config.parallelism.sequence_parallel,
        precision=precision,
        micro_batch_size=batch.train_micro_batch_size_per_gpu,
        accumulation_steps=batch.gradient_accumulation_steps,
        sequence_length=sequence_length,
        predicted_tokens=predicted_tokens,
        attention=min(attention, key=_MOST_MEMORY_FIRST.index),
        separate_documents=config.data.reset_attention_mask or config.preferences.on_preferences,
        attention_dropout=training.attention_dropout > 0,
        hidden_dropout=training.hidden_dropout > 0,
        recompute_chunk=recompute_chunk,
        recomputed_part=training.part_to_recompute,
        no_recompute_blocks=training.no_recompute_layers or (),
        divides_kept_inputs=training.partition_activations,
        kept_inputs_on_cpu=training.checkpoint_in_cpu,
        tile_tokens=training.mlp_tile_size or 0,
        activation_budget=activation_budget,
        zero_stage=zero.stage,
        fp32_gradients=_accumulates_in_fp32(config.deepspeed, precision, zero.stage),
        immediate_gradients=config.deepspeed.bf16 is None or config.deepspeed.bf16.immediate_grad_update,
        sums_gradients=logging.log_gradient_noise_scale and not logging.gradient_noise_scale_cpu_offload,
        copies_before_update=logging.log_stability_every is not None,
        communicated_bytes=_communicated_bytes(config.deepspeed, precision),
        reduce_bucket=zero.reduce_bucket_size or _REDUCE_BUCKET,
        reduce_buffers=1 + _overlaps_reduction(zero, zero.stage),
        hpz_size=zero.zero_hpz_partition_size or 1,
        gathered=_gathered_at_once(zero),
        sub_group=zero.updated_at_once,
        optimizer_states=optimizer.states,
        optimizer_temporaries=optimizer.kind.temporaries,
        offloads_states=zero.offloads_optimizer,
        offloads_weights=zero.offloads_weights,
        states_in_files=zero.states_directory is not None,
        weights_in_files=zero.weights_directory is not None,
        copies_weights=config.checkpoint.async_save,
        copies_states=config.checkpoint.async_save and not config.checkpoint.no_save_optim,
        averages_weights=config.optimizer.ema_decay is not None,
        averages_on_host=config.optimizer.ema_device == "cpu" or zero.offloads_optimizer,
        scores_answers=config.preferences.on_preferences,
        teacher_logits=config.distillation.logits_of_token,
        tempered_logits=config.distillation.tempers_all_logits,
        copies_reference=config.preferences.copies_reference,
    )


def _may_compile(config: NeoXConfig) -> bool:
    """Return whether layers are compiled on GPUs unless ZeRO, tiles or recomputation prevent it."""
    asked = config.training.compile_layers
    if isinstance(asked, bool):
        return asked
    return not config.training.deterministic and not config.model.apply_query_key_layer_scaling


def at_zero_stage(setting: MemorySetting, stage: int, deepspeed: DeepSpeedConfig) -> MemorySetting:
    """Return a run's setting at another ZeRO stage, with what the run's keys, or their defaults, mean at that stage."""
    return replace(
        setting,
        zero_stage=stage,
        fp32_gradients=_accumulates_in_fp32(deepspeed, setting.precision, stage),
        reduce_buffers=1 + _overlaps_reduction(deepspeed.zero_optimization, stage),
    )


def _accumulates_in_fp32(deepspeed: DeepSpeedConfig, precision: Precision, stage: int) -> bool:
    """Return whether bf16 gradients are accumulated in fp32, which is the default with ZeRO 1 to 3."""
    if precision != "bf16" or stage == 0:
        return False
    if deepspeed.data_types is None:
        return True
    return deepspeed.data_types.grad_accum_dtype in (None, "fp32")


def _overlaps_reduction(zero: ZeroSettings, stage: int) -> bool:
    """Return whether gradients are reduced during the backward pass, which is DeepSpeed's default of ZeRO 3."""
    if zero.overlap_comm is None:
        return stage == 3
    return zero.overlap_comm


def _gathered_at_once(zero: ZeroSettings) -> int:
    """Return the elements that ZeRO 3 gathers in advance, or keeps between two uses if they are more.

    A weight is kept until the backward pass if the layers that come before that, each once in the forward and once in
    the backward pass, have fewer elements than the distance of reuse. The limit of live weights does not release it.
    """
    live = zero.stage3_max_live_parameters
    if live is None:
        live = _LIVE_PARAMETERS
    reuse = zero.stage3_max_reuse_distance
    if reuse is None:
        reuse = _REUSE_DISTANCE
    return max(live, reuse // 2)


def _communicated_bytes(deepspeed: DeepSpeedConfig, precision: Precision) -> int:
    """Return bytes of a gradient while it is reduced; DeepSpeed's default is the precision of the weights."""
    if deepspeed.fp32_allreduce:
        return BYTES["fp32"]
    return BYTES[deepspeed.communication_data_type or precision]
