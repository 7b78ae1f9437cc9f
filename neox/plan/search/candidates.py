"""Search space of layouts: parallel degrees, schedule, micro batch size, ZeRO, offload, recomputation.

`layouts` never yields a layout in which

    a parameter or head cannot be divided by the tensor ranks                        `_tensor_degrees`
    a context rank has fewer than 2,048 tokens, or a rule refuses context ranks      `_context_degrees`
    experts cannot be divided by the expert ranks                                    `_expert_degrees`
    ranks are no multiple of the degrees, or the batch no multiple of data ranks     `_layouts_of`
    a micro batch is larger than 64, or does not divide a data rank's samples        `_micro_batches`
    a stage would have a range without blocks, or the schedule too few micro         `_schedules`
      batches
    there are pipeline stages and ZeRO 2 or 3, or another stage has nothing to shard `_memory_choices`
      or to offload
    states go to a host from ZeRO 0, or weights below ZeRO 3                         `_offload_choices`

`fastest` says what else rejects a layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from neox.architecture import LayerPlan
from neox.plan.layout import Layout
from neox.plan.network.architecture import layer_plan
from neox.plan.ranks.pipeline_schedules import PIPELINE_SCHEDULES, ranges_per_stage
from neox.plan.rules.context import context_problems
from neox.plan.rules.multi_token import multi_token_problems
from neox.plan.run_plan import RunPlan
from neox.plan.search.divisible import TENSOR_DEGREES

_CONTEXT_DEGREES = (2, 4, 8, 16, 32)
_LEAST_TOKENS = 2048
"""Smallest number of tokens of a sample on each context rank."""
_EXPERT_DEGREES = (2, 4, 8, 16, 32, 64)
_LARGEST_MICRO_BATCH = 64
_SCHEDULES = (("1f1b", None), ("interleaved", 2), ("interleaved", 4), ("dualpipev", None))
"""Values of `pipeline_schedule` and `virtual_stages` to try."""
_GPUS_OF_HOST = 8


def layouts(plan: RunPlan, *, on_cpu: bool = False) -> Iterator[Layout]:
    """Yield every layout of the run's GPUs that keeps the batch size and that the engine supports.

    Layouts keep the fields of the run's own layout that are not searched.
    """
    pipe_degrees = list(_pipe_degrees(plan))
    for tp_size in _tensor_degrees(plan):
        for cp_size in _context_degrees(plan, tp_size):
            for ep_size in _expert_degrees(plan):
                for pp_size in pipe_degrees:
                    degrees = _Degrees(tp_size, cp_size, ep_size, pp_size)
                    yield from _layouts_of(degrees, plan, on_cpu=on_cpu)


class _Degrees(NamedTuple):
    tp: int
    cp: int
    ep: int
    pp: int


def _layouts_of(degrees: _Degrees, plan: RunPlan, *, on_cpu: bool) -> Iterator[Layout]:
    """Yield the layouts with given degrees; none if the degrees do not divide the ranks and the batch."""
    same_weights, rest = divmod(plan.grid.world_size, degrees.tp * degrees.pp)
    if rest or same_weights % degrees.cp or same_weights % degrees.ep:
        return
    samples, rest = divmod(plan.batch.train_batch_size, same_weights // degrees.cp)
    if rest:
        return
    layout = replace(
        plan.layout,
        tp_size=degrees.tp,
        pp_size=degrees.pp,
        dp_size=same_weights,
        cp_size=degrees.cp,
        ep_size=degrees.ep,
    )
    for batched in _micro_batches(layout, samples):
        for scheduled in _schedules(batched, plan):
            yield from _memory_choices(scheduled, plan, on_cpu=on_cpu)


def _pipe_degrees(plan: RunPlan) -> Iterator[int]:
    """Yield the pipeline degrees that divide the ranks, give each stage a block, and that no rule refuses."""
    for pp_size in range(1, plan.architecture.num_layers + 1):
        if plan.grid.world_size % pp_size:
            continue
        if not any(multi_token_problems(plan.config.updated({"pipe_parallel_size": pp_size}))):
            yield pp_size


def _context_degrees(plan: RunPlan, tp_size: int) -> Iterator[int]:
    """Yield the context degrees that leave each rank enough tokens of a sample, and the configured degree."""
    yield 1
    for cp_size in _CONTEXT_DEGREES:
        is_long = plan.workload.sequence_length >= cp_size * _LEAST_TOKENS
        if (is_long or cp_size == plan.layout.cp_size) and _allows_context(plan, cp_size, tp_size):
            yield cp_size


def _allows_context(plan: RunPlan, cp_size: int, tp_size: int) -> bool:
    keys = {"context_parallel_size": cp_size, "model_parallel_size": tp_size, "sequence_parallel": False}
    return not any(context_problems(plan.config.updated(keys)))


def _expert_degrees(plan: RunPlan) -> Iterator[int]:
    """Yield the possible expert parallel degrees."""
    yield 1
    experts = plan.architecture.num_experts
    for ep_size in _EXPERT_DEGREES:
        if ep_size <= experts and experts % ep_size == 0:
            yield ep_size


def _tensor_degrees(plan: RunPlan) -> Iterator[int]:
    """Yield the tensor degrees that divide every parameter."""
    for tp_size in TENSOR_DEGREES:
        layers: LayerPlan = layer_plan(plan.config, plan.vocab_size, tp_size)
        if all(parameter.is_divisible(tp_size) for layer in layers for parameter in layer.parameters):
            yield tp_size


def _micro_batches(layout: Layout, samples: int) -> Iterator[Layout]:
    """Yield the possible micro batch sizes for a data rank's samples."""
    for size in range(1, min(samples, _LARGEST_MICRO_BATCH) + 1):
        if samples % size == 0:
            yield replace(layout, micro_batch_size=size, accumulation_steps=samples // size)


def _schedules(layout: Layout, plan: RunPlan) -> Iterator[Layout]:
    """Yield the pipeline schedules of a layout; only the configured one without stages or with a custom partition."""
    if layout.pp_size == 1 or not _divides_blocks(plan):
        yield layout
        return
    for name, virtual_stages in _SCHEDULES:
        if plan.architecture.mtp_num_layers and name != "1f1b":  # its modules are refused with others
            continue
        schedule = PIPELINE_SCHEDULES[name]
        ranges = ranges_per_stage(name, layout.pp_size, virtual_stages)
        is_deep_enough = layout.pp_size * ranges <= plan.architecture.num_layers
        if is_deep_enough and layout.accumulation_steps >= schedule.least_micro_batches(layout.pp_size):
            yield replace(layout, pipeline_schedule=name, virtual_stages=virtual_stages)


def _divides_blocks(plan: RunPlan) -> bool:
    """Return whether layers are partitioned by transformer blocks, so that each stage has some."""
    return plan.config.parallelism.pipe_partition_method.startswith("type:transformer")


def _memory_choices(layout: Layout, plan: RunPlan, *, on_cpu: bool) -> Iterator[Layout]:
    """Yield ZeRO stages, offload, recomputation and sequence parallelism of a layout."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    if layout.pp_size > 1:
        stages = (0, 1)
    nothing_to_shard = layout.dp_size == 1 and layout.zero_stage in stages
    sequence_parallel = [False]
    if layout.tp_size > 1 and plan.workload.sequence_length % layout.tp_size == 0:
        sequence_parallel.append(True)
    for stage, recomputes, divides in product(stages, (False, True), sequence_parallel):
        chosen = replace(layout, zero_stage=stage, recomputes=recomputes, sequence_parallel=divides)
        if recomputes:
            chosen = replace(chosen, recomputed_part="full", no_recompute_blocks=())
        for offloaded in _offload_choices(chosen, plan, on_cpu=on_cpu):
            if nothing_to_shard and stage != layout.zero_stage and not offloaded.offloads_states:
                continue  # the stage decides only what leaves the device
            for hpz_size in _hpz_sizes(offloaded):
                yield replace(offloaded, hpz_size=hpz_size)


def _offload_choices(layout: Layout, plan: RunPlan, *, on_cpu: bool) -> Iterator[Layout]:
    """Yield the offload choices: nothing, optimizer states (ZeRO 1 to 3), or optimizer states and weights (ZeRO 3).

    States or weights that are offloaded to files stay there, and a CPU has nowhere to offload to.
    """
    zero = plan.config.deepspeed.zero_optimization
    if on_cpu or zero.states_directory is not None or zero.weights_directory is not None:
        yield layout
        return
    yield replace(layout, offloads_states=False, offloads_weights=False)
    if layout.zero_stage > 0:
        yield replace(layout, offloads_states=True, offloads_weights=False)
    if layout.zero_stage == 3:
        yield replace(layout, offloads_states=True, offloads_weights=True)


def _hpz_sizes(layout: Layout) -> Iterator[int]:
    """Yield the values of `zero_hpz_partition_size`: 1 for no second copy of the weights, and the ranks of one host."""
    yield 1
    in_host = _GPUS_OF_HOST // layout.tp_size
    crosses_hosts = 1 < in_host < layout.dp_size and layout.dp_size % in_host == 0
    if layout.zero_stage == 3 and not layout.offloads_weights and crosses_hosts:
        yield in_host
