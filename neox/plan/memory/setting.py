"""What the memory estimate depends on, taken from a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass

from neox.config.neox_config import NeoXConfig
from neox.config.sections.deepspeed import DeepSpeedConfig, ZeroSettings
from neox.config.sections.optimizer_table import State
from neox.config.sections.training import RecomputedPart
from neox.plan.architecture import architecture_of
from neox.plan.run_plan import AttentionImpl, BatchPlan, Precision, Topology

# DeepSpeed's default for reduce_bucket_size, in elements.
_REDUCE_BUCKET = 500_000_000
# DeepSpeed's defaults of ZeRO 3: elements gathered at once, and passed before a weight is used again.
_LIVE_PARAMETERS, _REUSE_DISTANCE = 1_000_000_000, 1_000_000_000


@dataclass(frozen=True)
class MemorySetting:
    """What the estimate depends on besides the layer plan; small, so that many can be tried.

    Attributes:
        pp_size: Pipeline stages.
        pipeline_schedule: Key of `PIPELINE_SCHEDULES`.
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
        states_in_files: Whether what would be in host memory of optimizer states is in files.
        weights_in_files: Likewise of weights.
        states: What the optimizer keeps for each parameter.
        temporaries: Tensors of up to `PIECE` elements that it makes in a step.
        kept: Part of a layer's activations that is kept, beside its input.
        copies_weights: Whether a background save copies weights on this rank, the first of its data ranks.
        copies_states: Whether it copies the optimizer's states.
        divides_tokens: Whether tensor ranks divide tokens between layers that split features.
    """

    pp_size: int
    pipeline_schedule: str
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
    states_in_files: bool = False
    weights_in_files: bool = False
    temporaries: int = 0
    on_cpu: bool = False
    recomputed: RecomputedPart = "full"
    keeping: tuple[int, ...] = ()
    noise_scale: bool = False
    kept: float = 1.0
    divided_inputs: bool = False
    inputs_on_cpu: bool = False
    copies_weights: bool = False
    copies_states: bool = False
    divides_tokens: bool = False

    @property
    def token_shares(self) -> int:
        """Parts into which tensor ranks divide tokens between layers that split features."""
        return self.tp_size if self.divides_tokens else 1

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
        pipeline_schedule=config.parallelism.pipeline_schedule,
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
        temporaries=config.optimizer.optimizer.kind.temporaries,
        recomputed=training.part_to_recompute,
        keeping=training.no_recompute_layers or (),
        divided_inputs=training.partition_activations,
        inputs_on_cpu=training.checkpoint_in_cpu,
        noise_scale=config.logging.log_gradient_noise_scale and not config.logging.gradient_noise_scale_cpu_offload,
        kept=1.0 if training.activation_memory_budget is None else training.activation_memory_budget,
        buckets=2 if (zero.stage == 3 if zero.overlap_comm is None else zero.overlap_comm) else 1,
        sub_group=zero.updated_at_once,
        live=_gathered_at_once(zero),
        communicated=_communicated_bytes(config.deepspeed, precision),
        offload=zero.offloads_optimizer + zero.offloads_weights,
        states_in_files=zero.states_directory is not None,
        weights_in_files=zero.weights_directory is not None,
        copies_weights=config.checkpoint.async_save,
        copies_states=config.checkpoint.async_save and not config.checkpoint.no_save_optim,
        divides_tokens=config.parallelism.sequence_parallel,
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
