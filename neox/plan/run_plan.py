"""`RunPlan`, the frozen result of `resolve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from neox.architecture import Architecture, AttentionImpl, LayerPlan
from neox.config.decision import Decision
from neox.config.neox_config import NeoXConfig
from neox.config.sections.training import RecomputedPart
from neox.devices import DeviceFamily
from neox.plan.batches.batch import BatchPlan
from neox.plan.batches.batch_schedule import BatchSchedule
from neox.plan.devices.precision import Precision
from neox.plan.layout import Layout, Workload, configured_layout
from neox.plan.memory import MemoryPlan, fullest_stage
from neox.plan.ranks.stages import StagePlan
from neox.plan.ranks.topology import Topology
from neox.plan.run_start import ChosenStart


@dataclass(frozen=True)
class DataAmounts:
    """Amounts of training and validation data, as far as they could be read and anything needs them.

    Attributes:
        epoch_samples: Samples of one epoch of the training data; 0 if no log needs them, so that nobody counted.
        dataset_tokens: Tokens of each training dataset; empty if they are not known. Ranks do not need them.
        pass_tokens: Tokens of the samples of one epoch of each, padding included; empty if they are not known.
        pair_rows: Rows of one epoch of pairs of answers; 0 if they are not known, or texts are learned.
        validation_tokens: Tokens of each validation set after its name, None for one without, as far as known.
    """

    epoch_samples: int = 0
    dataset_tokens: tuple[int, ...] = ()
    pass_tokens: tuple[int, ...] = ()
    pair_rows: int = 0
    validation_tokens: tuple[tuple[str | None, int], ...] = ()


UNKNOWN_AMOUNTS = DataAmounts()


@dataclass(frozen=True)
class RunPlan:
    """Everything a run needs to know; nothing changes afterwards.

    Attributes:
        config: What the user asked for, with what the start decided.
        grid: Degrees of parallelism.
        batch: Batch sizes, after a ramp-up.
        precision: Number format of the forward and backward pass.
        vocab_size: Number of ids that text may have: the tokenizer's, as far as they have rows.
        padded_vocab_size: Rows of the embedding over all tensor ranks.
        layers: Layers with the names, full shapes and split dimensions of their parameters.
        stages: Pipeline stages, first to last.
        deepspeed: JSON object for DeepSpeed.
        attention: Attention kernel of each block.
        notes: Messages on what was translated, assumed or dropped. Ranks have none.
        decisions: Settings that the start decided. They are in `config`.
        device_family: Kind of device that the launcher has planned kernels for; None if it has not.
        amounts: Amounts of data.
        start: How the run starts, as the launcher has decided; None for a script that does not train.
    """

    config: NeoXConfig
    grid: Topology
    batch: BatchPlan
    precision: Precision
    vocab_size: int
    padded_vocab_size: int
    layers: LayerPlan
    stages: tuple[StagePlan, ...]
    deepspeed: Mapping[str, Any]
    attention: tuple[AttentionImpl, ...]
    notes: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    device_family: DeviceFamily | None = None
    amounts: DataAmounts = UNKNOWN_AMOUNTS
    start: ChosenStart | None = None

    @cached_property
    def layout(self) -> Layout:
        """Parallel sizes, micro batch, ZeRO stage and all else that a search for layouts varies."""
        return configured_layout(self.config, self.grid, self.batch, self.attention)

    @cached_property
    def memory(self) -> MemoryPlan:
        """Memory estimate for the fullest GPU."""
        return fullest_stage(self.workload, self.stages)

    @property
    def save_iterations(self) -> tuple[int, ...]:
        """Completed steps after which a checkpoint is written, ascending; with `save`, the last step too."""
        return self.config.checkpoint.save_iterations(self.config.training.train_iters)

    @cached_property
    def batch_schedule(self) -> BatchSchedule:
        """Samples and tokens of each step."""
        return BatchSchedule.of(self.config, self.batch)

    @property
    def workload(self) -> Workload:
        """Inputs of the memory and time models, on GPUs."""
        return self.workload_on("cuda")

    def workload_on(self, family: DeviceFamily) -> Workload:
        """Return the inputs of the memory and time models on a kind of device."""
        return Workload(
            config=self.config, layers=self.layers, precision=self.precision, layout=self.layout, family=family
        )

    @property
    def architecture(self) -> Architecture:
        """The network."""
        return self.layers.architecture

    @property
    def loss_normalization(self) -> str:
        """What losses are divided by: `loss_normalization` with `auto` decided.

        Labels of conversations are found by preflight, which reads the data's sidecars and decides `auto` then.
        """
        data = self.config.data
        if data.loss_normalization != "auto":
            return data.loss_normalization
        if self.config.preferences.on_preferences:
            return "tokens"  # labels are pairs then
        return "micro_batch" if data.pack_impl == "packed" else "tokens"

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether no token attends to another document of its row."""
        return self.config.data.reset_attention_mask or self.config.preferences.on_preferences

    @property
    def marks_padding(self) -> bool:
        """Whether batches say where padding begins, because experts must not count it."""
        is_padded = self.config.data.pack_impl != "packed" or self.config.preferences.on_preferences
        return self.architecture.num_experts > 0 and is_padded and not self.architecture.bidirectional

    @property
    def recomputed_parts(self) -> tuple[RecomputedPart, ...]:
        """The part of each block that the backward pass computes again."""
        parts = []
        for block, kernel in enumerate(self.attention):
            part = self.config.training.recomputed_part(block)
            if part == "core_attn" and kernel == "flash":
                part = "none"  # flash attention keeps nothing that would be released
            parts.append(part)
        return tuple(parts)
