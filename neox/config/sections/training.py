"""Sections of a training run: length, checkpoints, logging."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith, OnlyWithAny, Requires
from neox.config.sections.numbers import (
    DropRate,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
)
from neox.config.sections.preferences import OF_PREFERENCES
from neox.devices import AttentionBackend
from neox.features.best_checkpoint.keys import BestCheckpointKeys
from neox.features.char_perplexity.keys import CharPerplexityKeys
from neox.features.forward_check.keys import ForwardCheckKeys
from neox.features.hf_export.keys import HfExportKeys
from neox.features.mirror_uploads.keys import MirrorKeys
from neox.features.noise_scale.keys import NoiseScaleKeys
from neox.features.profiler.keys import ProfilerKeys
from neox.features.stability.keys import StabilityKeys
from neox.features.stragglers.keys import StragglerKeys
from neox.features.terminal.keys import TerminalKeys
from neox.features.trackers.keys import TrackerKeys
from neox.features.update_statistics.keys import UpdateStatisticsKeys
from neox.storage import CHECKPOINT_CACHE

RecomputedPart = Literal["none", "full", "full_attn", "core_attn"]
"""Part of a block whose activations are computed again in the backward pass."""


_WHOLE_LAYERS = Requires("recompute_granularity", ("full",), advice="it is for layers that are recomputed as a whole")


_GPT_NEOX_RELEASES = {"v1.0": datetime.date(2023, 3, 7), "v2.0": datetime.date(2023, 3, 9)}


def date_of_gpt_neox(version: str) -> datetime.date | None:
    """Return the date of a version of gpt-neox; None if the text is neither a date nor a release."""
    release = _GPT_NEOX_RELEASES.get(f"v{version.removeprefix('v')}")
    if release is not None:
        return release
    try:
        return datetime.date.fromisoformat(version)
    except ValueError:
        return None


class LoraSettings(Section):
    """Low-rank adapters (arXiv:2106.09685). Only they are trained."""

    r: PositiveInt = 8
    """Rank of the adapters."""

    alpha: PositiveFloat = 16.0
    """Numerator of the factor alpha / r of the adapters' product."""

    dropout: DropRate = 0.0
    """Dropout on the adapters' inputs in training."""

    target: tuple[str, ...] = Field(("query_key_value",), min_length=1)
    """Linear layers of a block that get an adapter: `query_key_value` and `dense` of attention, `dense_h_to_4h` and
    `dense_4h_to_h` of the MLP, `in_proj` and `out_proj` of a recurrent mixer, or others: those of latent attention
    (`query_down`, `query_up`, `key_value_down`, `key_value_up`) and of `rwkv` blocks."""


class TrainingConfig(CharPerplexityKeys):
    """Length, evaluation, dropout, activation recomputation, and when to stop."""

    train_iters: int | None = Field(None, ge=0, le=10**9)
    """Number of training iterations (optimizer steps). Required to train, unless num_train_epochs is given."""

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
    """Number of passes over the training documents, which may be a fraction. train_iters follows from it: whole batches
    of the samples in these passes, at least one."""

    eval_iters: Annotated[
        NonNegativeInt | Literal["all"],
        Excludes(
            "objective",
            ("masked_lm",),
            when=("all",),
            reason="which tokens are masked is drawn anew in each pass",
            advice="give a number of batches",
        ),
    ] = 100
    """Number of batches in one evaluation. `all`: one pass over the whole set, each sample once. Losses of tokens are
    means over all labels that an evaluation reads (with `loss_normalization: samples` over its samples), and scores of
    preferences over all pairs, so they depend neither on the batch nor on the layout; balancing losses of experts and
    KTO's estimate of the KL divergence are means over micro batches. Joined documents are cut into whole samples; what
    is left at their end is not read."""

    eval_order: Annotated[
        Literal["fixed", "gpt-neox"],
        Excludes("eval_iters", ("all",), when=("gpt-neox",), reason="nothing is left to go on with"),
    ] = "fixed"
    """Which samples an evaluation reads. `fixed`: the same ones each time, so that curves of one run can be compared,
    and runs with each other. `gpt-neox`: each evaluation goes on after the one before."""

    eval_interval: PositiveInt = 1000
    """Number of iterations between evaluations on the validation set."""

    eval_at_start: bool = False
    """Evaluate on the validation set before the first step, as iteration 0. A run that resumes later does not evaluate
    again."""

    exit_interval: PositiveInt | None = None
    """Save and exit after an iteration that is a multiple of this."""

    seed: int = Field(1234, ge=0, lt=2**32)
    """Seed of initial weights, of dropout and of the order of data."""

    deterministic: bool = False
    """Repeat a run bit for bit: the same configuration on the same kind and number of devices gives the same losses and
    weights, also across restarts. torch's deterministic algorithms and reductions in a fixed order are used, which may
    be slower. An operation that has no such algorithm ends the run with its name. Layers are not compiled."""

    lm_z_loss: Annotated[
        NonNegativeFloat,
        Excludes("objective", ("masked_lm",), reason="few of its tokens have logits"),
        Excludes("train_impl", OF_PREFERENCES, reason="its loss is of whole answers"),
    ] = 0.0
    """Coefficient of the z-loss (arXiv:2204.02311): its product with the square of the logarithm of the sum of the
    exponentials of a token's logits is added to the token's loss, so that logits do not drift. 1e-4 is usual. It is
    reported as `z_loss`, and is not a part of `lm_loss`; `loss` is the sum of both."""

    mtp_loss_scaling_factor: Annotated[NonNegativeFloat, OnlyWith("mtp_num_layers")] = 0.1
    """Factor of the loss of mtp_num_layers: the mean of its modules' cross entropies, `mtp_loss`, is multiplied by it
    and added to the trained loss, `total_loss`. DeepSeek-V3 began with 0.3. The name and default are Megatron-LM's."""

    attention_dropout: DropRate = 0.1
    """Dropout probability of attention weights (gpt-neox v2.0's default; later versions: 0)."""

    hidden_dropout: DropRate = 0.1
    """Dropout probability of what each sublayer adds to the residual (gpt-neox v2.0's default; later versions: 0)."""

    checkpoint_activations: bool = False
    """Recompute layers in the backward pass instead of keeping their activations."""

    checkpoint_num_layers: Annotated[PositiveInt, OnlyWith("checkpoint_activations"), _WHOLE_LAYERS] = 1
    """Number of layers that are recomputed together."""

    recompute_granularity: Annotated[
        Literal["full", "full_attn", "core_attn", "selective"], OnlyWith("checkpoint_activations")
    ] = "full"
    """Part of a layer that is recomputed. `full`: all of it. `full_attn`: its attention up to the output projection.
    `core_attn` (Megatron's name: `selective`): scores, softmax and weighted values, which flash attention never
    keeps."""

    no_recompute_layers: Annotated[tuple[int, ...] | None, OnlyWith("checkpoint_activations")] = None
    """Numbers of layers, from 0, that keep their activations."""

    partition_activations: Annotated[bool, OnlyWith("checkpoint_activations"), _WHOLE_LAYERS] = False
    """Keep the inputs of recomputed layers sharded over tensor ranks, and gather them in the backward pass."""

    checkpoint_in_cpu: Annotated[bool, OnlyWith("checkpoint_activations"), _WHOLE_LAYERS] = False
    """Keep the inputs of recomputed layers in CPU memory (DeepSpeed's `cpu_checkpointing`). On a CPU nothing is
    moved."""

    mlp_tile_size: PositiveInt | None = None
    """Number of tokens of each sample that an MLP and its norms compute at a time, as a tile (ALST, arXiv:2506.13996).
    The backward pass recomputes each tile, so memory holds the activations of only one tile. The MLP's share of a step
    takes about a third longer. Useful for samples of many thousand tokens."""

    compile_layers: bool | Literal["auto"] = "auto"
    """Compile each transformer layer with torch.compile: faster steps (especially on GPUs) after a start of up to a
    minute, and losses that agree up to rounding. On CPUs it needs a C++ compiler; it does not work with ZeRO 3. `auto`
    compiles on GPUs if the host has a C compiler and no other key forbids it."""

    attention_backend: AttentionBackend = "auto"
    """Kernel of training's attention in blocks that use torch's scaled_dot_product_attention (attention kinds `flash`,
    `sliding_window` and `latent`): `flash`, `cudnn` (NVIDIA), `flex` (FlexAttention, compiled), `memory_efficient`, or
    `math`, which keeps all scores in memory. `auto`: torch's choice, FlexAttention for windows and documents on GPUs,
    and blocks of queries on CPUs. A kernel that the device or the network does not have is refused."""

    compile_cache: bool = True
    """Keep compiled layers in the directory `compile_cache` in log_dir, or else in save, from which the next start
    takes them instead of compiling again. Without these directories, or if the environment has TORCHINDUCTOR_CACHE_DIR,
    torch chooses the place."""

    activation_memory_budget: Annotated[
        Fraction | None,
        Excludes("checkpoint_activations", reason="both choose what is recomputed"),
        Excludes("compile_layers", (False,), reason="it needs compiled layers", advice="remove compile_layers"),
    ] = None
    """Fraction of the activations of compiled layers that is kept, from 0 (recompute layers from their inputs) to 1.
    torch's partitioner chooses what is recomputed in the backward pass."""

    fp8: Literal["tensorwise", "rowwise"] | None = None
    """Multiply in 8-bit floating point in the linear layers of blocks, with bf16 weights, activations and gradients.
    `tensorwise`: one scale for each tensor, and e5m2 for gradients. `rowwise`: one scale for each row, and e4m3; slower
    and closer to bf16; the only one for experts. Scales follow from the values of each product. Embedding, head and the
    projections of multi-token prediction (`eh_proj`) stay in bf16. Needs `precision: bf16`
    and GPUs of compute capability 8.9 or more, with experts of 9.0 (a CPU computes the same slowly). Only training uses
    it: evaluation, generation and checkpoints are those of bf16, and a run may resume with it switched on or off."""

    lora: Annotated[
        LoraSettings | None,
        Excludes("soft_prompt_tuning.enabled", reason="each trains nothing else"),
        Excludes("objective", ("masked_lm",), reason="adapters of such a network are not implemented"),
    ] = None
    """Train only low-rank adapters of linear layers: `{r: 8, alpha: 16, dropout: 0.0, target: [query_key_value]}`. With
    `finetune: true` they are added to the model of `load`."""

    max_nonfinite_steps: NonNegativeInt = 0
    """Number of consecutive steps with a loss or gradient norm that is not finite that are skipped before training
    stops; 0 stops at the first. Steps that fp16's dynamic loss scale skips while it shrinks do not count."""

    hang_timeout: PositiveFloat = 1800.0
    """Seconds without progress after which the launcher prints the Python stack of every rank and ends the run."""

    def recomputed_part(self, block: int) -> RecomputedPart:
        """Return the part of a block that is recomputed in the backward pass."""
        if not self.checkpoint_activations or block in (self.no_recompute_layers or ()):
            return "none"
        return self.normalized_granularity

    @property
    def normalized_granularity(self) -> RecomputedPart:
        """`recompute_granularity`, with gpt-neox's name `core_attn` for Megatron's `selective`."""
        if self.recompute_granularity == "selective":
            return "core_attn"
        return self.recompute_granularity

    def evaluation_samples(self, train_batch_size: int) -> int | None:
        """Return the samples of an evaluation: as in NeoX, `eval_iters` training batches. None for the whole set."""
        if self.eval_iters == "all":
            return None
        return self.eval_iters * train_batch_size


class CheckpointConfig(MirrorKeys, BestCheckpointKeys, HfExportKeys, ForwardCheckKeys):
    """Saving and loading."""

    save: str | None = None
    """Directory that checkpoints are written to. All hosts must see it. An address (`s3://bucket/run`, `gs://...`)
    stands for the directory `runs/saved/s3/bucket/run` and `checkpoint_mirror` at the address."""

    load: str | None = None
    """Directory to resume from, or its address in object storage."""

    iteration: Annotated[NonNegativeInt | None, OnlyWithAny(("load", "save"))] = None
    """Iteration of the checkpoint to load, by default the newest complete one. Without load, it is one of save. Beside
    another load it counts for the first start only."""

    load_weights: Annotated[Literal["trained", "ema"], OnlyWithAny(("load", "save"))] = "trained"
    """Weights that are read from a checkpoint for text, evaluation, and fine-tuning: the trained ones, or their average
    (ema_decay)."""

    finetune: Annotated[bool, Requires("load", advice="give the checkpoint to start from")] = False
    """Load weights only and start at iteration 0."""

    gpt_neox_version: str | None = None
    """Date of the gpt-neox that this configuration and the checkpoint to read are of, such as 2024-06-30, or its
    release (v1.0, v2.0). Keys whose meaning or default has changed are read as they were then. It is asked for if files
    of several years differ in meaning and do not tell it (docs/gpt-neox-files.md)."""

    allow_other_tokenizer: Annotated[bool, OnlyWithAny(("load", "save"))] = False
    """Allow loading a checkpoint that was trained with another tokenizer. By default this is refused, because the same
    ids mean other tokens to the model. It is not needed if the tokenizer only has additional tokens."""

    overwrite: Annotated[bool, OnlyWith("save")] = False
    """Start anew in a `save` directory that holds checkpoints: they are moved to its directory `superseded`. Without
    it the checkpoints of this same run are resumed, and those of another run are refused."""

    checkpoint_verify: Annotated[bool, OnlyWithAny(("load", "save"))] = True
    """Compare the sha256 of every file when loading; if false, only file sizes."""

    checkpoint_scale: Annotated[
        Literal["linear", "log"], Requires("checkpoint_factor", when=("log",), advice="give one, such as 2")
    ] = "linear"
    """`linear`: save at every multiple of checkpoint_factor. `log`: save at every power of it. The last iteration is
    always saved."""

    checkpoint_factor: PositiveInt | None = None
    """Number of iterations between checkpoints, or their ratio with log scale."""

    extra_save_iters: tuple[NonNegativeInt, ...] | None = None
    """Further iterations after which a checkpoint is saved; 0 saves the initial weights."""

    keep_last_n_checkpoints: Annotated[PositiveInt | None, OnlyWith("save")] = None
    """Number of checkpoints that are kept; older ones are deleted."""

    checkpoint_cache_dir: str = CHECKPOINT_CACHE
    """Directory for copies of checkpoints that `load` names by an address (`s3://...`). For a training it may be on a
    disk of each host's own, otherwise all hosts must see it."""

    async_save: Annotated[bool, OnlyWith("save")] = False
    """Copy a checkpoint to CPU memory and write it while training continues. The plan counts that memory; the state of
    a GPU can take more, because torch rounds pinned memory up to powers of two."""

    no_save_optim: Annotated[bool, OnlyWith("save")] = False
    """Leave the optimizer's state out of checkpoints."""

    no_save_rng: Annotated[bool, OnlyWith("save")] = False
    """Leave random states out of checkpoints."""

    no_load_optim: Annotated[bool, OnlyWith("load")] = False
    """Do not load the optimizer's state."""

    @field_validator("gpt_neox_version", mode="before")
    @classmethod
    def _is_version(cls, value: Any) -> Any:
        """Refuse what is neither a date nor a release; YAML reads 2.0 as a number."""
        if value is None or isinstance(value, bool):
            return value
        text = str(value)
        if date_of_gpt_neox(text) is None:
            raise PydanticCustomError("gpt_neox_version", "should be a date, such as 2024-06-30, or v1.0 or v2.0")
        return text

    @property
    def export_directory(self) -> str | None:
        """Directory of a run's Hugging Face exports: `hf_export_dir`, or `save` with `-hf`; None without `save`."""
        if self.hf_export_dir is not None or self.save is None:
            return self.hf_export_dir
        return f"{self.save.rstrip('/')}-hf"

    @property
    def gpt_neox_date(self) -> datetime.date | None:
        """Date of the gpt-neox that wrote the checkpoint to read; None if it is not given."""
        if self.gpt_neox_version is None:
            return None
        return date_of_gpt_neox(self.gpt_neox_version)

    def save_iterations(self, train_iters: int | None) -> tuple[int, ...]:
        """Return the completed steps after which a checkpoint is written, in ascending order.

        As in gpt-neox, they are multiples (linear) or powers (log) of checkpoint_factor below train_iters,
        extra_save_iters, and the last step. There are none without `save` or train_iters.
        """
        if self.save is None or train_iters is None:
            return ()
        steps = {train_iters}
        for step in self.extra_save_iters or ():
            if step <= train_iters:
                steps.add(step)
        factor = self.checkpoint_factor or train_iters
        step = factor
        while step < train_iters:
            steps.add(step)
            if self.checkpoint_scale == "log":
                step *= factor  # the rules refuse a factor of 1, which would never end
            else:
                step += factor
        return tuple(sorted(steps))


class LoggingConfig(
    StragglerKeys, UpdateStatisticsKeys, NoiseScaleKeys, StabilityKeys, TrackerKeys, ProfilerKeys, TerminalKeys
):
    """Logging: terminal, metrics file, and experiment trackers."""

    log_dir: str | None = None
    """Directory of metrics.jsonl and of per-rank logs. A run that resumes from a checkpoint does not start if the
    curves there are of a run with another `save`."""

    peak_theoretical_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of one GPU, for model FLOPs utilisation; a dry run assumes an H100's 989 (bf16, dense)."""

    expected_mfu: PositiveFraction = 0.4
    """Model FLOPs utilisation with which a dry run computes how many days a run takes. If it is not given and gpu_type
    is, the time of a step is estimated instead."""
