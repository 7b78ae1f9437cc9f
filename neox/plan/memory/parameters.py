"""Number of parameters that one rank of a pipeline stage works with, before data ranks divide them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from neox.architecture import LayerEntry
from neox.config.sections.optimizer_kind import State
from neox.plan.devices.precision import BYTES
from neox.plan.layout import LaidOutRun
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
    """

    held: int
    trained: int
    state_bytes: float
    divided: int
    own_experts: int = 0
    whole: int = 0


def count_parameters(run: LaidOutRun, stage: StagePlan) -> ParameterCount:
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
    return ParameterCount(held, trained, state_bytes, divided, own_experts, of_all)


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
