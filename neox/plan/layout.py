"""Parallel layout of a run, and its workload: the inputs of the memory and time models.

A search varies the fields of a `Layout`. A `Workload` adds what it leaves alone: configuration, layers, precision and
device. Models read a field of the layout where there is one, and the configuration's key otherwise. Each field of a
layout is the value of one key (`KEYS_OF_LAYOUT`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from neox.architecture import Architecture, AttentionImpl, LayerPlan
from neox.config.neox_config import NeoXConfig
from neox.config.sections.training import RecomputedPart
from neox.devices import DeviceFamily
from neox.plan.batches.batch import BatchPlan
from neox.plan.devices.compiled import compiles
from neox.plan.devices.precision import BYTES, Precision
from neox.plan.ranks.topology import Topology

# Attention kernels, the one that keeps the most first.
_MOST_MEMORY_FIRST: tuple[AttentionImpl, ...] = ("eager", "fused", "flash")
# DeepSpeed's default for reduce_bucket_size, in elements.
_REDUCE_BUCKET = 500_000_000


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a search varies of a run, each field with its key. Hashable, so that many can be tried.

    Attributes:
        pp_size: Pipeline stages.
        tp_size: Tensor ranks.
        cp_size: Context ranks, which divide the tokens of each sample.
        ep_size: Data-parallel ranks that divide experts.
        pipeline_schedule: Key of `PIPELINE_SCHEDULES`.
        zero_stage: ZeRO stage.
        micro_batch_size: Samples of one forward pass.
        accumulation_steps: Forward passes per optimizer step.
        virtual_stages: Ranges of layers of each stage, for schedules that leave them open.
        sequence_parallel: Whether tensor ranks divide the tokens between layers that split features.
        tile_tokens: Tokens of a sample on this rank that MLPs and norms compute at once; 0 for all.
        kept_inputs_on_cpu: Whether the kept inputs of recomputed blocks are in main memory.
        recomputes: Whether the backward pass recomputes activations.
        recomputed_part: The part of a block that is recomputed then.
        no_recompute_blocks: Numbers of blocks that keep their activations nevertheless.
        hpz_size: Size of the groups of data ranks that shard a second copy of the weights; 1 for no such copy.
        attention: The run's attention kernel that needs the most memory.
        offloads_states: Whether optimizer states are in main memory or in files.
        offloads_weights: Whether weights are there, too.
        seq_length: Tokens of a sample, without a soft prompt.
        dp_size: Ranks with the same weights. It has no key: it is the number of ranks / (pp_size x tp_size).
    """

    pp_size: int
    tp_size: int
    cp_size: int
    ep_size: int
    pipeline_schedule: str
    zero_stage: int
    micro_batch_size: int
    accumulation_steps: int
    virtual_stages: int | None
    sequence_parallel: bool
    tile_tokens: int
    kept_inputs_on_cpu: bool
    recomputes: bool
    recomputed_part: RecomputedPart
    no_recompute_blocks: tuple[int, ...]
    hpz_size: int
    attention: AttentionImpl
    offloads_states: bool
    offloads_weights: bool
    seq_length: int
    dp_size: int

    def keys_changed_from(self, before: Layout) -> tuple[tuple[str, str], ...]:
        """Return the keys in which this layout differs from another one, with their values as YAML text."""
        changes = []
        for name, (key, text_of) in KEYS_OF_LAYOUT.items():
            value = getattr(self, name)
            if value != getattr(before, name):
                changes.append((key, text_of(value)))
        return tuple(changes)


def _as_yaml(value: Any) -> str:
    return json.dumps(value).strip('"')


def _offload_text(offloads: bool) -> str:  # the value of a field
    return "cpu" if offloads else "none"


KEYS_OF_LAYOUT: Mapping[str, tuple[str, Callable[[Any], str]]] = MappingProxyType(
    {
        "pp_size": ("pipe_parallel_size", _as_yaml),
        "tp_size": ("model_parallel_size", _as_yaml),
        "cp_size": ("context_parallel_size", _as_yaml),
        "ep_size": ("expert_model_parallel_size", _as_yaml),
        "pipeline_schedule": ("pipeline_schedule", _as_yaml),
        "zero_stage": ("zero_optimization.stage", _as_yaml),
        "micro_batch_size": ("train_micro_batch_size_per_gpu", _as_yaml),
        "accumulation_steps": ("gradient_accumulation_steps", _as_yaml),
        "virtual_stages": ("virtual_stages", _as_yaml),
        "sequence_parallel": ("sequence_parallel", _as_yaml),
        "tile_tokens": ("mlp_tile_size", _as_yaml),
        "kept_inputs_on_cpu": ("checkpoint_in_cpu", _as_yaml),
        "recomputes": ("checkpoint_activations", _as_yaml),
        "recomputed_part": ("recompute_granularity", _as_yaml),
        "no_recompute_blocks": ("no_recompute_layers", lambda blocks: json.dumps(blocks) if blocks else "null"),
        "hpz_size": ("zero_optimization.zero_hpz_partition_size", lambda size: "null" if size == 1 else str(size)),
        "attention": ("attention_config", lambda kernel: f'[[["{kernel}"], "all"]]'),
        "offloads_states": (
            "zero_optimization.offload_optimizer.device",
            _offload_text,
        ),
        "offloads_weights": ("zero_optimization.offload_param.device", _offload_text),
        "seq_length": ("seq_length", _as_yaml),
    }
)
"""Field of a layout -> its key, and a function from the field's value to the key's YAML text."""


def configured_layout(
    config: NeoXConfig, grid: Topology, batch: BatchPlan, attention: tuple[AttentionImpl, ...]
) -> Layout:
    """Return the layout that a configuration asks for."""
    parallelism = config.parallelism
    training = config.training
    zero = config.deepspeed.zero_optimization
    return Layout(
        pp_size=grid.pp_size,
        tp_size=grid.tp_size,
        cp_size=grid.cp_size,
        ep_size=grid.ep_size,
        dp_size=grid.dp_size,
        pipeline_schedule=parallelism.pipeline_schedule,
        virtual_stages=parallelism.virtual_stages,
        sequence_parallel=parallelism.sequence_parallel,
        micro_batch_size=batch.train_micro_batch_size_per_gpu,
        accumulation_steps=batch.gradient_accumulation_steps,
        zero_stage=zero.stage,
        hpz_size=zero.zero_hpz_partition_size or 1,
        offloads_states=zero.offloads_optimizer,
        offloads_weights=zero.offloads_weights,
        recomputes=training.checkpoint_activations,
        recomputed_part=training.normalized_granularity,
        no_recompute_blocks=training.no_recompute_layers or (),
        kept_inputs_on_cpu=training.checkpoint_in_cpu,
        tile_tokens=training.mlp_tile_size or 0,
        attention=min(attention, key=_MOST_MEMORY_FIRST.index),
        seq_length=config.model.seq_length or 0,
    )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Inputs of the memory and time models, and the quantities that their formulas share.

    Attributes:
        config: The configuration. Whatever `layout` says counts instead of its keys.
        layers: The layers, with a vocabulary that the layout's tensor ranks divide.
        precision: Number format of weights and activations.
        layout: The layout.
        family: Kind of device of the ranks.
    """

    config: NeoXConfig
    layers: LayerPlan
    precision: Precision
    layout: Layout
    family: DeviceFamily = "cuda"

    def with_layout(self, **changes: Any) -> Workload:
        """Return the workload with other fields of its layout and the same layers."""
        return replace(self, layout=replace(self.layout, **changes))

    @property
    def network(self) -> Architecture:
        """The network."""
        return self.layers.architecture

    @property
    def on_cpu(self) -> bool:
        """Whether ranks run on CPUs, which take memory when it is written to."""
        return self.family == "cpu"

    @property
    def compiles_layers(self) -> bool:
        """Whether transformer layers are compiled."""
        return compiles(self.config, self.family, self.layout)

    # Tokens of one forward pass: rows of samples, divided over context ranks.

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample, with those of a soft prompt."""
        return self.layout.seq_length + self.network.soft_prompt_tokens

    @property
    def predicted_tokens(self) -> int:
        """Tokens of a sample that go through the head."""
        predicted = self.config.model.predicted_tokens
        if predicted is None:
            return self.sequence_length
        return predicted

    @property
    def queries(self) -> int:
        """Tokens of a sample on this rank."""
        return self.sequence_length // self.layout.cp_size

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass on this rank."""
        return self.layout.micro_batch_size * self.queries

    @property
    def token_shares(self) -> int:
        """Parts into which tensor ranks divide the tokens between layers that split features."""
        if self.layout.sequence_parallel:
            return self.layout.tp_size
        return 1

    # What is kept and what is computed again.

    @property
    def recomputes_blocks(self) -> bool:
        """Whether the backward pass recomputes whole blocks."""
        return self.layout.recomputes and self.layout.recomputed_part == "full"

    @property
    def in_tiles(self) -> bool:
        """Whether MLPs and norms are computed in tiles of tokens."""
        return 0 < self.layout.tile_tokens < self.queries

    @property
    def gathers_keys(self) -> bool:
        """Whether context ranks get the keys and values of all tokens."""
        return self.layout.cp_size > 1 and self.config.parallelism.context_parallel_kind == "all_gather"

    @property
    def keeps_gathered_keys(self) -> bool:
        """Whether gathered keys and values are kept for the backward pass: compiled layers do not gather them again."""
        return self.gathers_keys and self.compiles_layers

    @property
    def separates_documents(self) -> bool:
        """Whether attention keeps the documents of a row apart."""
        return self.config.data.reset_attention_mask or self.config.preferences.on_preferences

    # Bytes of numbers, and how gradients are reduced.

    @property
    def bytes_per_number(self) -> int:
        """Bytes of a weight or an activation."""
        return BYTES[self.precision]

    @property
    def fp32_gradients(self) -> bool:
        """Whether gradients of bf16 weights are accumulated in fp32, which is the default with ZeRO 1 to 3."""
        if self.precision != "bf16" or self.layout.zero_stage == 0:
            return False
        if self.bf16_states:
            return False
        types = self.config.deepspeed.data_types
        return types is None or types.grad_accum_dtype in (None, "fp32")

    @property
    def bf16_states(self) -> bool:
        """Whether the weights that the optimizer updates, and its states, are bf16 instead of fp32."""
        bf16 = self.config.deepspeed.bf16
        return bf16 is not None and bf16.has_bf16_states and self.precision == "bf16" and self.layout.zero_stage > 0

    @property
    def master_bytes(self) -> int:
        """Bytes of a weight that the optimizer updates, and of its gradient in the update."""
        return BYTES["bf16" if self.bf16_states else "fp32"]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an accumulated gradient."""
        if self.fp32_gradients:
            return BYTES["fp32"]
        return self.bytes_per_number

    @property
    def sums_in_bf16(self) -> bool:
        """Whether gradients of several micro batches are added in bf16, which rounds each sum."""
        return self.precision == "bf16" and not self.fp32_gradients and self.layout.accumulation_steps > 1

    @property
    def communicated_bytes(self) -> int:
        """Bytes of a gradient's element while it is reduced; DeepSpeed's default is the precision of the weights."""
        if self.config.deepspeed.fp32_allreduce:
            return BYTES["fp32"]
        return BYTES[self.config.deepspeed.communication_data_type or self.precision]

    @property
    def overlaps_reduction(self) -> bool:
        """Whether gradients are reduced during the backward pass, which is DeepSpeed's default of ZeRO 3."""
        asked = self.config.deepspeed.zero_optimization.overlap_comm
        if asked is None:
            return self.layout.zero_stage == 3
        return asked

    @property
    def reduces_layers(self) -> bool:
        """Whether ranges of layers are reduced during the backward pass: bf16 with ZeRO 1; stages reduce after it."""
        keys = self.config.deepspeed
        is_asked = keys.zero_optimization.overlap_comm is not False
        adds_at_once = keys.bf16 is None or keys.bf16.immediate_grad_update
        is_bf16_optimizer = self.fp32_gradients and self.layout.zero_stage == 1 and not self.layout.offloads_states
        return is_asked and adds_at_once and is_bf16_optimizer and self.layout.pp_size == 1

    @property
    def reduce_bucket(self) -> int:
        """Elements that ZeRO reduces at once."""
        return self.config.deepspeed.zero_optimization.reduce_bucket_size or _REDUCE_BUCKET
