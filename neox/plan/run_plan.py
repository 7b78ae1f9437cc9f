"""`RunPlan`, the frozen result of `resolve`, and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from neox.architecture import Architecture, LayerPlan
from neox.config.neox_config import NeoXConfig
from neox.config.sections.training import RecomputedPart
from neox.plan.batch import BatchPlan as BatchPlan  # also read from here
from neox.plan.batch import BatchSchedule
from neox.plan.stages import StagePlan

Precision = Literal["fp32", "fp16", "bf16"]
AttentionImpl = Literal["eager", "fused", "flash"]
Axis = Literal["pp", "dp", "tp"]
_AXES: tuple[Axis, ...] = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Topology:
    """Degrees of parallelism, in ranks along each axis.

    Ranks are numbered pipe outermost, then data, then tensor, as in NeoX and DeepSpeed's
    `PipeModelDataParallelTopology`, so that neighbouring ranks (one machine) form the tensor groups.

    Attributes:
        pp_size: Pipeline stages.
        dp_size: Data-parallel ranks.
        tp_size: Tensor ranks.
        sequence_parallel: Whether tensor ranks divide the tokens where they do not divide features.
    """

    pp_size: int = 1
    dp_size: int = 1
    tp_size: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if min(self.pp_size, self.dp_size, self.tp_size) < 1:
            raise ValueError(f"every degree must be at least 1, got {self}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp_size * self.dp_size * self.tp_size

    def rank_of(self, pp_rank: int, dp_rank: int, tp_rank: int) -> int:
        """Return the global rank at these coordinates."""
        return (pp_rank * self.dp_size + dp_rank) * self.tp_size + tp_rank

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Return (pp_rank, dp_rank, tp_rank) of a global rank.

        Raises:
            ValueError: The rank is outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        rest, tp_rank = divmod(rank, self.tp_size)
        pp_rank, dp_rank = divmod(rest, self.dp_size)
        return pp_rank, dp_rank, tp_rank

    def groups(self, *axes: Axis) -> list[list[int]]:
        """List the groups of ranks that differ only in their coordinates along `axes`.

        `tp`: ranks that share one copy of the same layers. `dp`: ranks with the same weights and different samples.
        `pp`: the stages of one pipeline, first stage first. `pp` and `tp`: ranks that together hold one whole model.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            fixed = (at for axis, at in zip(_AXES, self.coordinates(rank), strict=True) if axis not in axes)
            groups.setdefault(tuple(fixed), []).append(rank)
        return list(groups.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Estimated bytes on the fullest GPU.

    Attributes:
        weights: Of this rank.
        gradients: With the buffers of their reduction.
        optimizer: Its states, and fp32 copies of weights.
        activations: The most of what is held for a time: activations and logits, or what the update needs.
        host: In main memory of the GPU's host: states and weights that are offloaded.
        copies: In main memory, too: the copies that background saves write, on the first data rank.
        files: On a local disk: states and weights that are offloaded there.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    host: int = 0
    copies: int = 0
    files: int = 0

    @property
    def main_memory(self) -> int:
        """Bytes in main memory of a rank that computes on a GPU."""
        return self.host + self.copies

    @property
    def total(self) -> int:
        """Sum of all parts on the GPU."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class RunPlan:
    """Everything a run needs to know; nothing changes afterwards.

    Attributes:
        config: What the user asked for.
        grid: Degrees of parallelism.
        batch: Batch sizes, after a ramp-up.
        precision: Number format of the forward and backward pass.
        vocab_size: Number of ids the tokenizer can produce.
        padded_vocab_size: Rows of the embedding over all tensor ranks.
        layers: Layers with the names, full shapes and split dimensions of their parameters.
        stages: Pipeline stages, first to last.
        memory: Estimate for the fullest GPU.
        save_iterations: Completed steps after which a checkpoint is written, ascending; with `save`, the last step too.
        deepspeed: JSON object for DeepSpeed.
        notes: Messages on what was translated, assumed or dropped.
        attention: Attention kernel of each block.
    """

    config: NeoXConfig
    grid: Topology
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

    @cached_property
    def batch_schedule(self) -> BatchSchedule:
        """What each step takes of samples and tokens."""
        return BatchSchedule.of(self.config, self.batch)

    @property
    def architecture(self) -> Architecture:
        """The network."""
        return self.layers.architecture

    @property
    def recomputed_parts(self) -> tuple[RecomputedPart, ...]:
        """What of each block the backward pass computes again; flash attention keeps nothing that `core_attn` frees."""
        parts = map(self.config.training.recomputed_part, range(self.architecture.num_layers))
        kernels = zip(parts, self.attention, strict=True)
        return tuple("none" if part == "core_attn" and kernel == "flash" else part for part, kernel in kernels)
