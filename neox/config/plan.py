"""What follows from a configuration: the frozen result of `resolve`, read by every floor above."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from neox.config.layer_plan import LayerPlan
from neox.config.sections import NeoXConfig

Precision = Literal["fp32", "fp16", "bf16"]
AttentionImpl = Literal["eager", "fused", "flash"]


@dataclass(frozen=True)
class GridPlan:
    """Degrees. Rank order: pipe outermost, then data, then model (tensor)."""

    pp: int
    mp: int
    dp: int
    world: int


@dataclass(frozen=True)
class BatchPlan:
    """The batch triple: train_batch_size = micro batch x accumulation steps x dp, in samples."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage: layers [first, last) in the layer plan's numbering, and its parameters over all tensor ranks
    (a tied head's copy counted where it is held)."""

    first: int
    last: int
    parameters: int


@dataclass(frozen=True)
class MemoryPlan:
    """Estimated bytes on the fullest GPU."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class RunPlan:
    """Everything a run needs to know; nothing changes afterwards.

    vocab_size: ids the tokenizer can produce; padded_vocab_size: rows of the embedding.
    save_iterations: completed steps after which a checkpoint is written, ascending; with `save`, the last one included.
    deepspeed: the JSON object handed to DeepSpeed. notes: what was translated, assumed or dropped, for people.
    attention: how each transformer layer computes attention.
    """

    config: NeoXConfig
    grid: GridPlan
    batch: BatchPlan
    precision: Precision
    vocab_size: int
    padded_vocab_size: int
    layers: LayerPlan
    stages: tuple[StagePlan, ...]
    memory: MemoryPlan
    save_iterations: tuple[int, ...]
    deepspeed: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    attention: tuple[AttentionImpl, ...] = ()
