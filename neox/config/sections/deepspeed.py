"""Section of DeepSpeed's settings: batch sizes, precision, ZeRO, clipping, profiling."""

from __future__ import annotations

from math import inf
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, NoEffect, OnlyWith, Refused, Requires
from neox.config.sections.numbers import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

_SHARDED = OnlyWith("zero_optimization.stage", (1, 2, 3))
_SHARDED_WEIGHTS = OnlyWith("zero_optimization.stage", (3,))
_SUB_GROUP = 1_000_000_000  # DeepSpeed's default
_SUB_GROUP_IN_FILES = 100_000_000  # with states in files, of which one sub-group at a time is in memory
_NEEDS_QUANTIZER = Requires("zero_optimization.stage", (3,), advice="or remove it")
_NO_ROUNDED_WEIGHTS = Refused(
    "rounds stored frozen weights to 8-bit integers, so checkpoints and exports would be rounded too; remove it, or "
    "use zero_quantized_weights, which only rounds gathered copies"
)
_NO_EFFECT = NoEffect()
_FORMATS = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
_NEVER = 10**15  # steps


class OffloadSettings(Section):
    """`zero_optimization.offload_optimizer` and `offload_param`."""

    device: Annotated[
        Literal["none", "cpu", "nvme"],
        Requires("zero_optimization.stage", (3,), when=("nvme",), advice="or use cpu"),
        Requires(".nvme_path", when=("nvme",), advice="give a directory on a local disk of every host"),
    ] = "none"
    """`cpu`: in host memory. `nvme`: in files under `nvme_path`."""
    nvme_path: Annotated[str | None, Requires(".device", ("nvme",))] = None
    """Directory on a local disk of every host. The kernel maps its files into memory, and deletes them with the
    process."""
    pin_memory: bool | None = None
    """Whether host memory is pinned, which makes copies to and from a GPU faster (DeepSpeed's default: true). Files are
    not pinned."""

    @property
    def directory(self) -> str | None:
        """Directory of the files that hold what is offloaded; None if host memory holds it."""
        if self.device != "nvme":
            return None
        return self.nvme_path


class ZeroSettings(Section):
    """DeepSpeed's `zero_optimization` block."""

    stage: Annotated[
        Literal[0, 1, 2, 3],
        Excludes(
            "pipe_parallel_size",
            above=1,
            when=(2, 3),
            reason="DeepSpeed's pipeline keeps gradients and weights whole",
            advice="use stage 1, or pipe_parallel_size 1 with model_parallel_size for the rest",
        ),
    ] = 0
    """What is sharded over data-parallel ranks. 0: nothing; 1: optimizer states; 2: also gradients; 3: also weights."""
    contiguous_gradients: Annotated[bool | None, _SHARDED] = None
    """Copy gradients to a contiguous buffer."""
    reduce_scatter: Annotated[bool | None, _SHARDED] = None
    """Use reduce-scatter instead of all-reduce."""
    reduce_bucket_size: Annotated[PositiveInt | None, _SHARDED] = None
    """Number of elements that are reduced at once."""
    allgather_partitions: Annotated[bool | None, _SHARDED] = None
    """Use all-gather instead of broadcasts."""
    allgather_bucket_size: Annotated[int | None, Field(ge=0, multiple_of=2), _SHARDED] = None
    """Number of elements that are gathered at once; even, because buffers begin at multiples of 4 bytes."""
    overlap_comm: Annotated[bool | None, _SHARDED] = None
    """Overlap the reduction with the backward pass. With bf16 and ZeRO 1 it is on unless it is `false`. It is left out,
    with a note, if there are pipeline stages."""
    load_from_fp32_weights: Annotated[bool | None, _NO_EFFECT] = None
    """DeepSpeed's way to load a checkpoint. It changes nothing here, with a note."""
    elastic_checkpoint: Annotated[bool | None, _NO_EFFECT] = None
    """DeepSpeed's elastic checkpoints. The key changes nothing here, with a note: every checkpoint loads at any
    degrees."""
    round_robin_gradients: Annotated[bool | None, _SHARDED] = None
    """Distribute gradients over ranks in turn (stage 2 with offload)."""
    ignore_unused_parameters: Annotated[bool | None, _SHARDED] = None
    """Accept parameters without a gradient (stage 2)."""
    cpu_offload: bool | None = None
    """Old name of `offload_optimizer: {device: cpu}`."""
    offload_optimizer: OffloadSettings | None = None
    """Where optimizer states and fp32 weights are kept and updated. `{device: cpu}`: in host memory, by the cores of
    the host, with stages 1, 2 and 3. `{device: nvme, nvme_path: DIRECTORY}`: in files, with stage 3. Without it: on the
    device."""
    offload_param: OffloadSettings | None = None
    """Where weights are kept between uses, with stage 3 and offload_optimizer. `{device: cpu}`: in host memory.
    `{device: nvme, nvme_path: DIRECTORY}`: in files."""
    sub_group_size: Annotated[PositiveInt | None, _SHARDED_WEIGHTS] = None
    """Number of elements that are updated at once (stage 3). By default 1e9, and 1e8 with states on NVMe, because the
    states of one sub-group are in host memory then."""
    stage3_max_live_parameters: Annotated[NonNegativeInt | None, _SHARDED_WEIGHTS] = None
    """Largest number of gathered parameters that are kept."""
    stage3_max_reuse_distance: Annotated[NonNegativeInt | None, _SHARDED_WEIGHTS] = None
    """Gathered parameters are kept if they are used again within this many parameters."""
    stage3_prefetch_bucket_size: Annotated[NonNegativeInt | None, _SHARDED_WEIGHTS] = None
    """Number of parameters that are fetched in advance."""
    stage3_param_persistence_threshold: Annotated[NonNegativeInt | None, _SHARDED_WEIGHTS] = None
    """Parameters with fewer elements are not sharded."""
    stage3_model_persistence_threshold: Annotated[NonNegativeInt | None, _SHARDED_WEIGHTS] = None
    """Largest number of elements that are not sharded, over all such parameters (DeepSpeed's default: any)."""
    zero_hpz_partition_size: Annotated[
        NonNegativeInt | None,
        Requires("zero_optimization.stage", (3,), advice="or remove it"),
        Excludes(
            "zero_optimization.offload_param.device",
            ("cpu", "nvme"),
            reason="the second copy stays on the device",
        ),
    ] = None
    """hpZ of ZeRO++ (arXiv:2306.10209, stage 3): size of the groups of neighbouring data ranks, usually those of one
    host, that hold a second copy of the weights, sharded over the group. The first forward pass of a step gathers
    weights from all data ranks, later passes only within a group. It takes weights / this number more memory, and must
    divide the number of data ranks."""
    zero_quantized_weights: Annotated[bool | None, _NEEDS_QUANTIZER] = None
    """qwZ of ZeRO++: weights are gathered as 8-bit integers (stage 3, on GPUs). DeepSpeed compiles a kernel for it at
    the first start, which needs a CUDA toolkit on every host."""
    zero_quantized_gradients: Annotated[
        bool | None,
        _NEEDS_QUANTIZER,
        Excludes("model_parallel_size", above=1, reason="DeepSpeed would add up gradients of different tensor ranks"),
        Excludes("zero_optimization.reduce_scatter", (False,), reason="they are reduced where they are divided"),
    ] = None
    """qgZ of ZeRO++: gradients are reduced as 4-bit integers, first within hosts and then between them (stage 3, on
    GPUs). It needs a CUDA toolkit, as zero_quantized_weights does."""
    zero_quantized_nontrainable_weights: Annotated[bool | None, _NO_ROUNDED_WEIGHTS] = None
    """Store the frozen weights of a model with adapters as 8-bit integers. Refused."""
    stage3_gather_16bit_weights_on_model_save: Annotated[bool | None, _NO_EFFECT] = None
    """DeepSpeed's way to save. It changes nothing here, with a note: layers are gathered one by one."""

    @field_validator("zero_hpz_partition_size", mode="before")
    @classmethod
    def _one_rank_has_no_copy(cls, value: Any) -> Any:
        """Read 0 and 1 as unset, which they mean to DeepSpeed with any stage."""
        return None if value in (0, 1) and not isinstance(value, bool) else value

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer states are in host memory or in files."""
        return bool(self.cpu_offload) or _is_on(self.offload_optimizer)

    @property
    def offloads_weights(self) -> bool:
        """Whether weights are in host memory or in files between uses."""
        return _is_on(self.offload_param)

    @property
    def states_directory(self) -> str | None:
        """Directory of the files that hold optimizer states; None if memory holds them."""
        if self.offload_optimizer is None:
            return None
        return self.offload_optimizer.directory

    @property
    def weights_directory(self) -> str | None:
        """Directory of the files that hold weights; None if memory holds them."""
        if self.offload_param is None:
            return None
        return self.offload_param.directory

    @property
    def quantizing_keys(self) -> tuple[str, ...]:
        """Dotted paths of the given keys that quantize communication, which needs GPUs."""
        keys = []
        for name in ("zero_quantized_weights", "zero_quantized_gradients"):
            if getattr(self, name):
                keys.append(f"zero_optimization.{name}")
        return tuple(keys)

    @property
    def updated_at_once(self) -> int:
        """Largest number of elements that ZeRO 3 updates at once; a parameter is not divided."""
        if self.sub_group_size is not None:
            return self.sub_group_size
        if self.states_directory is None:
            return _SUB_GROUP
        return _SUB_GROUP_IN_FILES


def _is_on(block: OffloadSettings | None) -> bool:
    return block is not None and block.device != "none"


class Fp16Settings(Section):
    """DeepSpeed's `fp16` block, with two keys of gpt-neox v2.0."""

    enabled: bool | None = None
    """Train in fp16 (in bf16 with v2.0's `type: bfloat16`)."""
    fp16: bool | None = None
    """Old name of `enabled`, from gpt-neox v2.0."""
    type: Literal["fp16", "bfloat16", "bf16"] | None = None
    """gpt-neox v2.0's way to ask for bf16."""
    loss_scale: NonNegativeFloat | None = None
    """Fixed loss scale; 0 makes it dynamic."""
    initial_scale_power: Annotated[int, Field(ge=-126, le=127)] | None = None
    """The first dynamic loss scale is 2 to this power, an fp32 number."""
    loss_scale_window: PositiveInt | None = None
    """Number of steps without overflow after which the scale doubles."""
    hysteresis: NonNegativeInt | None = None
    """Number of overflows after which the scale halves."""
    consecutive_hysteresis: bool | None = None
    """Restore the hysteresis after every step without overflow."""
    min_loss_scale: PositiveInt | None = None
    """Smallest loss scale."""
    auto_cast: bool | None = None
    """Cast inputs to fp16."""


class Bf16Settings(Section):
    """DeepSpeed's `bf16` block."""

    enabled: bool = False
    """Train in bf16."""
    immediate_grad_update: Annotated[bool, OnlyWith("zero_optimization.stage", (0, 1))] = True
    """Add each bf16 gradient to the accumulated ones as soon as the backward pass has computed it, and release it. This
    takes 18 instead of 20 bytes per parameter and gives the same numbers (ZeRO 1, and pipeline stages)."""
    bf16_master_weights_and_grads: Annotated[
        bool,
        Requires("zero_optimization.stage", (1, 2, 3), advice="use one of them, or remove it"),
        Requires(
            ".bf16_optimizer_states",
            advice="give both: fp32 states of bf16 weights are only in DeepSpeed's own CPUAdam, which is not used",
        ),
        Excludes(
            "zero_optimization.offload_optimizer.device",
            ("cpu", "nvme"),
            reason="DeepSpeed updates offloaded bf16 states only with its own CPUAdam, which is not used",
        ),
        Excludes("ema_decay", reason="bf16 weights and their average are too coarse for each other"),
    ] = False
    """Keep the weights that the optimizer updates, and gradients, in bf16 instead of fp32, together with
    bf16_optimizer_states: 10 instead of 18 bytes per parameter. An update smaller than 1/256 of a weight is lost, so
    the loss falls more slowly: docs/performance.md has figures. Adam only."""
    bf16_optimizer_states: Annotated[
        bool, Requires(".bf16_master_weights_and_grads", advice="give both, or remove it")
    ] = False
    """Keep the optimizer's states in bf16, together with bf16_master_weights_and_grads. With fp32 weights use
    `optimizer.type: Adam8bit` for smaller states."""

    @model_validator(mode="before")
    @classmethod
    def _off_as_a_whole(cls, block: Any) -> Any:
        """Read `enabled: false` as DeepSpeed does: the block's other keys ask for nothing then."""
        if isinstance(block, dict) and block.get("enabled") is False:
            return {"enabled": False}
        return block

    @property
    def has_bf16_states(self) -> bool:
        """Whether the optimizer's weights and states are bf16."""
        return self.bf16_master_weights_and_grads


class DataTypesSettings(Section):
    """DeepSpeed's `data_types` block."""

    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    """Format in which gradients are accumulated. By default fp32 for bf16 with ZeRO 1 or more. DeepSpeed's other names
    (`float32`, `bfloat16`, `half`, ...) mean the same."""

    @field_validator("grad_accum_dtype", mode="before")
    @classmethod
    def _other_names(cls, value: Any) -> Any:
        """Read the names that DeepSpeed takes for a format."""
        if not isinstance(value, str):
            return value
        return _FORMATS.get(value.removeprefix("torch."), value)


class FlopsProfilerSettings(Section):
    """DeepSpeed's `flops_profiler` block."""

    enabled: Annotated[
        bool,
        Excludes("pipe_parallel_size", above=1, reason="DeepSpeed's profiler times whole networks only"),
    ] = False
    """Profile one step."""
    profile_step: Annotated[int | None, OnlyWith("flops_profiler.enabled")] = None
    """Number of the step that is profiled."""
    module_depth: Annotated[int | None, OnlyWith("flops_profiler.enabled")] = None
    """Depth of the modules that are shown."""
    top_modules: Annotated[int | None, OnlyWith("flops_profiler.enabled")] = None
    """Number of modules that are shown."""
    detailed: Annotated[bool | None, OnlyWith("flops_profiler.enabled")] = None
    """Show every module."""
    output_file: Annotated[str | None, OnlyWith("flops_profiler.enabled")] = None
    """File that the profile is written to."""


class CommsLoggerSettings(Section):
    """DeepSpeed's `comms_logger` block."""

    enabled: bool = False
    """Log communication."""
    verbose: Annotated[bool | None, OnlyWith("comms_logger.enabled")] = None
    """Log each call."""
    prof_all: Annotated[bool | None, OnlyWith("comms_logger.enabled")] = None
    """Profile all calls."""
    debug: Annotated[bool | None, OnlyWith("comms_logger.enabled")] = None
    """Log which function called."""


class DeepSpeedConfig(Section):
    """DeepSpeed's settings under their own names."""

    train_batch_size: PositiveInt | None = None
    """Number of samples per optimizer step over all ranks: micro batch x accumulation steps x data-parallel size."""

    train_micro_batch_size_per_gpu: PositiveInt | None = None
    """Number of samples per forward pass on one data-parallel rank."""

    gradient_accumulation_steps: PositiveInt | None = None
    """Number of forward passes per optimizer step. It follows if the other two are given (gpt-neox v2.0 assumed 1)."""

    fp16: Fp16Settings | None = None
    """fp16 with a dynamic loss scale: `{enabled: true, ...}`."""

    bf16: Bf16Settings | None = None
    """bf16: `{enabled: true}`."""

    zero_optimization: ZeroSettings = Field(default_factory=ZeroSettings)
    """ZeRO: what is sharded over data-parallel ranks, and bucket sizes."""

    gradient_clipping: NonNegativeFloat = 0.0
    """Largest global gradient norm; 0 is off (gpt-neox v2.0's default; later versions: 1.0)."""

    data_types: DataTypesSettings | None = None
    """`{grad_accum_dtype: ...}`."""

    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    """Format in which gradients are communicated."""

    fp32_allreduce: Annotated[bool, Excludes("communication_data_type", ("fp16", "bf16"))] = False
    """Reduce gradients in fp32."""

    prescale_gradients: bool = False
    """Divide gradients by the number of data ranks before the reduction, not after it. With ZeRO 2 and 3 it needs
    `reduce_scatter: false`."""

    gradient_predivide_factor: Annotated[PositiveFloat, OnlyWith("prescale_gradients", (False,))] = 1.0
    """Divide gradients by this factor before the reduction, and by the rest of the number of data ranks after it, so
    that a sum in 16 bits is smaller. With ZeRO 2 and 3 it needs `reduce_scatter: false`."""

    zero_allow_untested_optimizer: bool = False
    """Let DeepSpeed run ZeRO with an optimizer that it does not know."""

    steps_per_print: PositiveInt = 10
    """Number of steps between DeepSpeed's own lines on the terminal; `.inf` for none."""

    wall_clock_breakdown: bool = False
    """Time forward and backward passes, the reduction of gradients (with what stages send each other) and the
    optimizer: `timers/*` in the metrics, and a line on the terminal. The device is synchronised before and after each,
    so steps take longer."""

    dump_state: bool = False
    """Let DeepSpeed print the state of its engine at the start."""

    deepspeed_extra_args: dict[str, Any] | None = None
    """Block of keys of this section that later gpt-neox passes to DeepSpeed. They are read as if they were given at the
    top level."""

    activation_checkpointing: dict[str, Any] | None = None
    """DeepSpeed's block, read as if its flat keys were given: `{partition_activations: true, cpu_checkpointing: true}`.
    checkpoint_activations switches recomputation on."""

    flops_profiler: FlopsProfilerSettings | None = None
    """DeepSpeed's FLOPs profiler."""

    comms_logger: CommsLoggerSettings | None = None
    """DeepSpeed's log of communication."""

    @field_validator("steps_per_print", mode="before")
    @classmethod
    def _infinity_never_prints(cls, value: Any) -> Any:
        """Read `.inf`, which DeepSpeed and accelerate take for no lines."""
        return _NEVER if value == inf else value

    @field_validator("gradient_clipping", mode="before")
    @classmethod
    def _infinity_clips_nothing(cls, value: Any) -> Any:
        """Read `.inf`, a norm that no gradient exceeds."""
        return 0.0 if value == inf else value
