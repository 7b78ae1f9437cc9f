"""Number of parameters that one rank of a pipeline stage works with, before data ranks divide them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from neox.architecture import BLOCK_OFFSET, BLOCKS, LayerEntry, ParameterSpec
from neox.architecture.recurrence import selective_fp32
from neox.config.sections.optimizer_kind import State
from neox.plan.devices.precision import BYTES
from neox.plan.layout import Workload
from neox.plan.ranks.stages import StagePlan


@dataclass(frozen=True)
class ParameterCount:
    """Elements on one tensor rank of a stage.

    Attributes:
        held: Elements of all weights, with copies of weights that another stage owns.
        trained: Elements of the weights that have gradients.
        state_bytes: Mean bytes of optimizer states per trained element, without fp32 copies of weights.
        divided: Elements whose states all data ranks divide: the trained ones, with the experts of all expert ranks.
        own_experts: Trained elements of experts with expert parallelism; 0 if each data rank has all experts.
        whole: Elements of a model's weights, with the experts of all expert ranks.
        used_up: Elements of the weights that the backward pass has used when it is in the last block: the head's, and
            if that block computes a recurrence again, those behind the recurrence.
        of_decays: Elements of the decays and steps of its mixers (`mamba_selective_fp32_params`).
    """

    held: int
    trained: int
    state_bytes: float
    divided: int
    own_experts: int = 0
    whole: int = 0
    used_up: int = 0
    of_decays: int = 0


def count_parameters(run: Workload, stage: StagePlan) -> ParameterCount:
    """Count the elements that one tensor rank of a stage holds and trains."""
    held = 0
    trained = 0
    divided = 0
    own_experts = 0
    of_all = 0
    for spec in stage.parameter_specs(run.layers):
        whole = spec.shard_numel(run.layout.tp_size)
        elements = whole // run.layout.ep_size if spec.experts else whole
        held += elements
        of_all += whole
        if spec.trained:
            trained += elements
            divided += whole
            if elements != whole:
                own_experts += elements
    state_bytes = _state_bytes(stage.entries(run.layers), run.config.optimizer.optimizer.states)
    if run.bf16_states:
        state_bytes *= BYTES["bf16"] / BYTES["fp32"]
    of_decays = 0
    for layer in stage.entries(run.layers):
        of_decays += sum(spec.shard_numel(run.layout.tp_size) for spec in selective_fp32(layer.parameters))
    return ParameterCount(
        held, trained, state_bytes, divided, own_experts, of_all, used_up=_used_up(run, stage), of_decays=of_decays
    )


def _used_up(run: Workload, stage: StagePlan) -> int:
    """Return the elements of `ParameterCount.used_up`."""
    specs: list[ParameterSpec] = []
    last = BLOCK_OFFSET + run.network.num_layers - 1
    for layer in stage.entries(run.layers):
        if layer.index == run.layers.head.index:
            specs += layer.parameters
        if layer.index == last:
            is_behind = BLOCKS[run.network.attention[-1]].behind_recomputed
            specs += [spec for spec in layer.parameters if is_behind(spec.name)]
    elements = 0
    for spec in specs:
        whole = spec.shard_numel(run.layout.tp_size)
        elements += whole // run.layout.ep_size if spec.experts else whole
    return elements


def _state_bytes(layers: Sequence[LayerEntry], states: Sequence[State]) -> float:
    """Return the mean bytes of states per trained element: all states of all parameters over all trained elements."""
    if all(state.axis is None and state.of == "all" for state in states):
        return sum(state.bytes for state in states)
    total: float = 0
    elements = 0
    for layer in layers:
        for spec in layer.parameters:
            if not spec.trained:
                continue
            elements += spec.numel
            hidden = layer.is_hidden(spec)
            shapes = [(state, state.shape(spec.shape, hidden=hidden)) for state in states]
            total += sum(state.bytes * prod(shape) for state, shape in shapes if shape is not None)
    return total / max(1, elements)
