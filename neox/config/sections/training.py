"""Sections of a training run: length, checkpoints, logging."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith, Requires
from neox.config.sections.numbers import (
    DropRate,
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
)

RecomputedPart = Literal["none", "full", "full_attn", "core_attn"]
"""Part of a block whose activations are computed again in the backward pass."""


_WHOLE_LAYERS = Requires("recompute_granularity", ("full",), advice="it is for layers that are recomputed as a whole")


class LoraSettings(Section):
    """Low-rank adapters (arXiv:2106.09685): only they are trained."""

    r: PositiveInt = 8
    """Rank."""

    alpha: PositiveFloat = 16.0
    """The adapters' product is multiplied by alpha / r."""

    dropout: DropRate = 0.0
    """Dropout on the adapters' inputs in training."""

    target: tuple[Literal["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"], ...] = Field(
        ("query_key_value",), min_length=1
    )
    """Linear layers of a block that get an adapter: attention's input and output, the MLP's input and output."""


class TrainingConfig(Section):
    """Length, evaluation, dropout, activation recomputation, and when to stop."""

    train_iters: int | None = Field(None, ge=0, le=10**9)
    """Training iterations (optimizer steps). Required to train, unless num_train_epochs is given."""

    num_train_epochs: Annotated[
        PositiveFloat | None,
        Excludes("train_iters", reason="both set the length of the run"),
        Excludes(
            "objective",
            ("masked_lm",),
            reason="the samples of a pass are not known before they are made",
            advice="give train_iters",
        ),
    ] = None
    """Passes over the training documents, also a fraction, in place of train_iters, which follows: whole batches of the
    samples that these passes hold, at least one."""

    eval_iters: NonNegativeInt = 100
    """Batches in one evaluation."""

    eval_interval: PositiveInt = 1000
    """Iterations between evaluations on the validation set."""

    exit_interval: PositiveInt | None = None
    """Save and end after an iteration that is a multiple of this."""

    seed: int = Field(1234, ge=0, lt=2**32)
    """Seed of initial weights, dropout and the order of data."""

    attention_dropout: DropRate = 0.1
    """Dropout on attention probabilities (gpt-neox v2.0's default; later versions: 0)."""

    hidden_dropout: DropRate = 0.1
    """Dropout on what each sublayer adds to the residual (gpt-neox v2.0's default; later versions: 0)."""

    checkpoint_activations: bool = False
    """Recompute layers in the backward pass instead of keeping their activations."""

    checkpoint_num_layers: Annotated[PositiveInt, OnlyWith("checkpoint_activations"), _WHOLE_LAYERS] = 1
    """Layers recomputed together."""

    recompute_granularity: Annotated[
        Literal["full", "full_attn", "core_attn", "selective"], OnlyWith("checkpoint_activations")
    ] = "full"
    """What of a layer is recomputed: all of it; `full_attn`, its attention up to the output projection; `core_attn`
    (Megatron's name: `selective`), scores, softmax and weighted values, which flash attention never keeps anyway."""

    no_recompute_layers: Annotated[tuple[int, ...] | None, OnlyWith("checkpoint_activations")] = None
    """Numbers of layers, from 0, that keep their activations."""

    partition_activations: Annotated[bool, OnlyWith("checkpoint_activations"), _WHOLE_LAYERS] = False
    """Keep the inputs of recomputed layers divided over tensor ranks, and gather them in the backward pass."""

    checkpoint_in_cpu: Annotated[bool, OnlyWith("checkpoint_activations"), _WHOLE_LAYERS] = False
    """Keep the inputs of recomputed layers in CPU memory (`cpu_checkpointing` of DeepSpeed); nothing moves on CPUs."""

    compile_layers: bool | Literal["auto"] = "auto"
    """Compile each transformer layer with torch.compile: faster steps (more so on GPUs) after a start of up to a
    minute; losses agree up to rounding. Needs a C++ compiler on CPUs. Not with ZeRO 3. `auto` compiles on GPUs, where
    the host has a C compiler and no other key forbids it."""

    activation_memory_budget: Annotated[
        Fraction | None,
        Excludes("checkpoint_activations", reason="both choose what is recomputed"),
        Excludes("compile_layers", (False,), reason="it needs compiled layers", advice="remove the second"),
    ] = None
    """Part of the activations of compiled layers that is kept, from 0 (recompute layers from their inputs) to 1;
    torch's partitioner chooses what is recomputed in the backward pass. In place of `checkpoint_activations`."""

    fp8: Literal["tensorwise", "rowwise"] | None = None
    """Multiply in 8-bit floating point in the linear layers of blocks, with bf16 weights, activations and gradients:
    `tensorwise`, one scale for a whole tensor and e5m2 for gradients; `rowwise`, one for each row and e4m3, slower and
    closer to bf16. Scales are made from the values of each product. Needs `precision: bf16` and GPUs of compute
    capability 8.9 or more (a CPU computes the same slowly). In training only: evaluation, generation and checkpoints
    are those of bf16, and runs go on with it switched on or off."""

    lora: Annotated[
        LoraSettings | None,
        Excludes("soft_prompt_tuning.enabled", reason="each trains nothing else"),
        Excludes("objective", ("masked_lm",), reason="adapters of such a network are not implemented"),
    ] = None
    """Train low-rank adapters of linear layers, and nothing else: `{r: 8, alpha: 16, dropout: 0.0, target:
    [query_key_value]}`. With `finetune: true` they are added to the model of `load`."""

    max_nonfinite_steps: NonNegativeInt = 0
    """Consecutive steps whose loss or gradient norm is not finite that are skipped before training stops; 0 stops at
    the first. Steps that fp16's dynamic loss scale skips while it shrinks do not count."""

    hang_timeout: PositiveFloat = 1800.0
    """Seconds without progress after which the launcher prints every rank's Python stack and ends the run."""

    def recomputed_part(self, block: int) -> RecomputedPart:
        """Return what of a block is recomputed in the backward pass."""
        if not self.checkpoint_activations or block in (self.no_recompute_layers or ()):
            return "none"
        return self.part_to_recompute

    @property
    def part_to_recompute(self) -> RecomputedPart:
        """What of a block is recomputed where any is: recompute_granularity without Megatron's name."""
        return "core_attn" if self.recompute_granularity == "selective" else self.recompute_granularity


class CheckpointConfig(Section):
    """Saving and loading."""

    save: str | None = None
    """Directory that checkpoints are written to."""

    load: str | None = None
    """Directory to resume from."""

    iteration: Annotated[NonNegativeInt | None, OnlyWith("load"), OnlyWith("save")] = None
    """Checkpoint to load; the newest complete one where unset."""

    finetune: Annotated[bool, Requires("load", advice="give the checkpoint to start from")] = False
    """Load weights only and start at iteration 0."""

    checkpoint_verify: Annotated[bool, OnlyWith("load"), OnlyWith("save")] = True
    """Compare the sha256 of every file when loading; if false, only file sizes."""

    checkpoint_scale: Annotated[
        Literal["linear", "log"], Requires("checkpoint_factor", when=("log",), advice="give one, such as 2")
    ] = "linear"
    """`linear`: a checkpoint at every multiple of checkpoint_factor; `log`: at every power of it. Always at the end."""

    checkpoint_factor: PositiveInt | None = None
    """Iterations between checkpoints, or their ratio with log scale."""

    extra_save_iters: tuple[NonNegativeInt, ...] | None = None
    """Further iterations to save at; 0 saves the initial weights."""

    keep_last_n_checkpoints: Annotated[PositiveInt | None, OnlyWith("save")] = None
    """Delete older checkpoints, keeping this many."""

    async_save: Annotated[bool, OnlyWith("save")] = False
    """Copy a checkpoint to CPU memory and write it while training goes on. The plan counts that memory; a GPU's
    state can take more, since torch rounds pinned memory up to powers of two."""

    checkpoint_validation_with_forward_pass: Annotated[
        bool,
        OnlyWith("load"),
        OnlyWith("save"),
        Excludes("objective", ("masked_lm",), reason="the check is for causal networks"),
    ] = False
    """Keep the logits of a fixed input in checkpoints, and compare them after loading."""

    no_save_optim: Annotated[bool, OnlyWith("save")] = False
    """Leave the optimizer's state out of checkpoints."""

    no_save_rng: Annotated[bool, OnlyWith("save")] = False
    """Leave random states out of checkpoints."""

    no_load_optim: Annotated[bool, OnlyWith("load")] = False
    """Do not load the optimizer's state."""

    def save_iterations(self, train_iters: int | None) -> tuple[int, ...]:
        """Return after which completed steps a checkpoint is written, ascending; empty without `save` or train_iters.

        gpt-neox's rule: multiples (linear) or powers (log) of checkpoint_factor below train_iters, extra_save_iters,
        and the last step. A checkpoint_factor of 1 with log scale, which `validation` refuses, never ends.
        """
        if self.save is None or train_iters is None:
            return ()
        steps = {train_iters, *(i for i in self.extra_save_iters or () if 0 <= i <= train_iters)}
        step = factor = self.checkpoint_factor or train_iters
        while step < train_iters:
            steps.add(step)
            step = step * factor if self.checkpoint_scale == "log" else step + factor
        return tuple(sorted(steps))


class LoggingConfig(Section):
    """Reports while training: terminal, metrics file, TensorBoard, Weights & Biases."""

    log_dir: str | None = None
    """Directory of metrics.jsonl and of per-rank logs."""

    log_interval: PositiveInt = 100
    """Iterations between lines on the terminal (unset in gpt-neox v2.0; its later default)."""

    log_style: Literal["neox", "fleetx", "oneflow"] = "neox"
    """Form of these lines: gpt-neox's, FleetX's (`global step N, epoch: ...`) or OneFlow's table (throughput in
    samples/s, latency in seconds)."""

    log_grad_norm: bool = False
    """Report the gradient norm."""

    log_gradient_noise_scale: Annotated[
        bool,
        Excludes(
            "zero_optimization.stage",
            (1, 2, 3),
            reason="gradients are divided over ranks before they can be compared",
            advice="use stage 0, or remove it",
        ),
        Excludes("rampup_batch_size", reason="it compares batches of one size"),
    ] = False
    """Report the gradient noise scale (arXiv:1812.06162), the batch size in samples above which larger batches help
    little, as `train/noise_scale` in the metrics. With pipeline stages it needs fp32 or fp16."""

    gradient_noise_scale_n_batches: Annotated[int, OnlyWith("log_gradient_noise_scale")] = Field(5, ge=2)
    """Successive steps whose mean gradient is the large batch; a single step's is the small one."""

    gradient_noise_scale_cpu_offload: Annotated[bool, OnlyWith("log_gradient_noise_scale")] = False
    """Keep the sum of these gradients in CPU memory; it is as large as the gradients of a rank."""

    tensorboard_dir: str | None = None
    """Directory for TensorBoard; off where unset."""

    use_wandb: bool | None = None
    """Report to Weights & Biases; off where unset."""

    wandb_group: Annotated[str | None, OnlyWith("use_wandb")] = None
    """Group of the run."""

    wandb_team: Annotated[str | None, OnlyWith("use_wandb")] = None
    """Team (entity) of the run."""

    wandb_project: Annotated[str, OnlyWith("use_wandb")] = "neox"
    """Project of the run."""

    wandb_host: Annotated[str, OnlyWith("use_wandb")] = "https://api.wandb.ai"
    """Address of the Weights & Biases server."""

    wandb_run_name: Annotated[str | None, OnlyWith("use_wandb")] = None
    """Name of the run."""

    profile: Annotated[bool, Requires("log_dir", advice="give the directory for the files")] = False
    """Profile some steps of every rank with torch's profiler: a trace for Chrome and a table by operation, in
    `log_dir`/profile."""

    profile_backend: Annotated[Literal["pytorch"], OnlyWith("profile")] = "pytorch"
    """The profiler."""

    profile_step_start: Annotated[NonNegativeInt, OnlyWith("profile"), OnlyWith("memory_profiling")] = 10
    """First step that is profiled, counted from 0."""

    profile_step_stop: Annotated[PositiveInt, OnlyWith("profile"), OnlyWith("memory_profiling")] = 12
    """Step before which profiling ends."""

    memory_profiling: bool = False
    """Record which operations allocate memory in the profiled steps; on a GPU a snapshot for pytorch.org/memory_viz."""

    memory_profiling_path: Annotated[str | None, OnlyWith("memory_profiling")] = None
    """Directory of the memory's tables and snapshots; `log_dir`/profile where unset."""

    peak_theoretical_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of one GPU, for model FLOPs utilisation; a dry run assumes an H100's 989 (bf16, dense)."""

    expected_mfu: PositiveFraction = 0.4
    """Model FLOPs utilisation from which a dry run estimates the days a run takes."""
