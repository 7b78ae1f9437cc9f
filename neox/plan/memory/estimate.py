"""Memory estimate for one GPU in training: weights, gradients, optimizer states, activations.

States follow the wrapper that DeepSpeed (0.19) chooses for a precision and a ZeRO stage. Not counted: the CUDA context,
communication buffers and fragmentation; `fit.py` keeps a reserve for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from neox.architecture import LayerEntry, LayerPlan
from neox.config.sections.optimizer_table import PIECE, State
from neox.plan.memory.activations import activation_bytes
from neox.plan.memory.setting import MemorySetting
from neox.plan.run_plan import MemoryPlan
from neox.plan.stages import StagePlan, held_parameters

# Elements that DeepSpeed's engine reduces at once where ZeRO does not reduce.
_ENGINE_BUCKET = 500_000_000
# Bytes of an offloaded parameter that the host updates: its fp32 weight and gradient.
_UPDATED = 4 + 4


def stage_memory(layers: LayerPlan, stage: StagePlan, setting: MemorySetting) -> MemoryPlan:
    """Return bytes on one GPU of a pipeline stage."""
    here = stage.entries(layers)
    owners = {layer.index for layer in here}
    held, trained = (
        sum(
            held_parameters(layers, layer, setting.tp_size, trained=only, tied=layer.tied_to not in owners)
            for layer in here
        )
        for only in (False, True)
    )
    copies = {p for layer in here for p in layer.parameters if p.shared_with is not None}
    copied = sum(p.numel // setting.tp_size for p in copies if p.shared_with not in owners)
    held, trained = held + copied, trained + copied
    kept = _kept_per_parameter(here, setting.states)
    weights, (_, gradients, optimizer) = state_bytes(held, setting, kept)[0], state_bytes(trained, setting, kept)
    working = activation_bytes(layers, stage, setting)
    if setting.zero == 3 and (setting.dp_size > 1 or (setting.offload > 1 and not setting.on_cpu)):
        working += setting.bytes_per_number * min(held, setting.live)  # weights gathered for the layers at work
    if setting.zero == 2 and setting.accumulation > 1 and not setting.offload and not setting.fp32_gradients:
        working += setting.bytes_per_number * trained // setting.dp_size  # this rank's part, beside its earlier sum
    host, files = host_bytes(held, trained, setting, kept), file_bytes(held, trained, setting, kept)
    working = max(working, reduction_bytes(trained, setting), step_bytes(trained, setting))
    return MemoryPlan(weights, gradients, optimizer, working, host, copied_bytes(held, trained, setting, kept), files)


def fullest_stage(layers: LayerPlan, stages: Sequence[StagePlan], setting: MemorySetting) -> MemoryPlan:
    """Return bytes on the fullest GPU, or the fullest rank on a CPU."""
    memories = [stage_memory(layers, stage, setting) for stage in stages]
    return max(memories, key=lambda plan: plan.total + (plan.main_memory if setting.on_cpu else 0))


def copied_bytes(held: int, trained: int, setting: MemorySetting, kept: float) -> int:
    """Return bytes in main memory of the copies that a background save writes; arguments are those of `state_bytes`."""
    states = state_bytes(trained, replace(setting, offload=0), kept)[2] if setting.copies_states else 0
    return states + (setting.bytes_per_number * held if setting.copies_weights else 0)


def divides_states(setting: MemorySetting) -> bool:
    """Return whether each data rank has a part of the optimizer's states of its own."""
    return setting.zero >= 1 or _in_bf16_optimizer(setting)


def _kept_per_parameter(layers: Sequence[LayerEntry], states: Sequence[State]) -> float:
    """Return the mean bytes that an optimizer keeps for a trained parameter of some layers."""
    if all(state.axis is None and state.of == "all" for state in states):
        return sum(state.bytes for state in states)
    specs = [(layer, spec) for layer in layers for spec in layer.parameters if spec.trained]
    kept = sum(
        state.bytes * prod(shape)
        for layer, spec in specs
        for state in states
        if (shape := state.shape(spec.shape, hidden=layer.is_hidden(spec))) is not None
    )
    return kept / max(1, sum(spec.numel for _, spec in specs))


def state_bytes(parameters: int, setting: MemorySetting, kept: float) -> tuple[int, int, int]:
    """Return bytes of weights, gradients and optimizer states on a GPU that holds so many parameters.

    Args:
        parameters: Their number.
        setting: The run.
        kept: Bytes that the optimizer keeps for each.

    Returns:
        The last includes the fp32 copy of the weights that every wrapper but plain fp32 keeps (ZeRO one in fp32 too).
    """
    zero, dp, size = setting.zero, setting.dp_size, setting.bytes_per_number
    weights = size * parameters // (dp if zero >= 3 else 1)
    kept += 0 if setting.precision == "fp32" and zero == 0 else 4
    optimizer = int(kept * parameters) // (dp if divides_states(setting) else 1)
    accumulated = (4 if setting.fp32_gradients else size) * parameters
    if _in_bf16_optimizer(setting):
        # And the half-precision gradients of one backward pass, unless they are released in it.
        gradients = accumulated + (0 if setting.immediate else size * parameters)
    elif zero == 0:
        gradients = size * parameters
    else:
        bucket = min(parameters, setting.reduce_bucket) if setting.on_cpu else setting.reduce_bucket
        # With ZeRO 2 and 3 they are reduced in buckets, then only this rank's part is kept.
        gradients = (accumulated // dp if zero >= 2 else accumulated) + size * bucket * setting.buckets
        if setting.offload:  # reduced fp32 gradients of bf16 weights still are on the GPU with ZeRO 1 and 2, others not
            # (ZeRO 1 reduces in the backward pass only if it overlaps; else after it, see `step_bytes`)
            gradients += (setting.fp32_gradients and zero == 1 and setting.buckets > 1) * (4 * parameters // dp)
            gradients -= (zero == 3 or (zero == 2 and not setting.fp32_gradients)) * (accumulated // dp)
    if setting.noise_scale:
        gradients += 4 * parameters
    return (0 if setting.offload > 1 else weights), gradients, (0 if setting.offload else optimizer)


def reduction_bytes(parameters: int, setting: MemorySetting) -> int:
    """Return bytes that the engine's own reduction needs after the backward pass; ZeRO's needs its buckets alone.

    The engine joins accumulated gradients to buckets, and converts a bucket if another type is communicated.
    """
    if setting.dp_size == 1 or not (setting.zero == 0 or _in_bf16_optimizer(setting)):
        return 0
    accumulated = 4 if setting.fp32_gradients else setting.bytes_per_number
    converted = 0 if setting.communicated == accumulated else setting.communicated
    return (accumulated + converted) * min(parameters, _ENGINE_BUCKET)


def step_bytes(parameters: int, setting: MemorySetting) -> int:
    """Return bytes that the update needs beside the states: the gradients again, in fp32, and temporary tensors.

    Activations are gone then.
    """
    mine, size = parameters // setting.dp_size, setting.bytes_per_number
    if setting.offload:
        return 4 * mine if setting.fp32_gradients and setting.zero == 1 and setting.buckets == 1 else 0
    updated = mine if divides_states(setting) else parameters
    if setting.zero == 3:
        updated = min(updated, setting.sub_group)
    temporary = 4 * setting.temporaries * min(updated, PIECE)
    if _in_bf16_optimizer(setting) or (setting.precision == "fp32" and setting.zero == 0):
        return temporary
    if setting.zero in (0, 3):
        return 4 * updated + temporary
    # ZeRO 1 and 2 join this rank's part, and convert it. ZeRO 1 releases the other ranks' parts first.
    converted = 0 if setting.fp32_gradients or size == 4 else size * mine
    joined = 4 * mine + max(converted, temporary)
    return joined if setting.zero == 2 else max(0, joined - size * (parameters - mine))


def _in_bf16_optimizer(setting: MemorySetting) -> bool:
    """Whether DeepSpeed updates by its BF16_Optimizer, which divides its states over data ranks even with ZeRO 0."""
    accumulates = (setting.zero == 1 and setting.fp32_gradients) or (setting.zero == 0 and setting.pp_size > 1)
    return setting.precision == "bf16" and accumulates and not setting.offload


def host_bytes(held: int, trained: int, setting: MemorySetting, kept: float) -> int:
    """Return bytes in main memory of a rank's offloaded states; arguments are those of `state_bytes`."""
    if not setting.offload:
        return 0
    size, accumulates = setting.bytes_per_number, 4 if setting.fp32_gradients else setting.bytes_per_number
    each, at_once = _UPDATED + kept, 0
    if setting.states_in_files:  # but for a sub-group
        each, at_once = 0, int(each) * min(trained // setting.dp_size, setting.sub_group)
    if setting.zero == 3:
        each += accumulates
    else:  # the updated weights, and what gradients are accumulated in unless a GPU does it
        each += size + (size if setting.zero == 2 and setting.accumulation > 1 and not setting.fp32_gradients else 0)
    weights = size * held if setting.offload > 1 and not setting.weights_in_files else 0
    return int(each * trained + weights) // setting.dp_size + at_once


def file_bytes(held: int, trained: int, setting: MemorySetting, kept: float) -> int:
    """Return bytes on a local disk of what a rank offloads there; arguments are those of `state_bytes`."""
    states = (_UPDATED + kept) * trained if setting.states_in_files else 0
    weights = setting.bytes_per_number * held if setting.weights_in_files else 0
    return int(states + weights) // setting.dp_size
