"""What the time of a step depends on, taken from a plan: the network's shape and the layout."""

from __future__ import annotations

from typing import NamedTuple

from neox.architecture import ACTIVATIONS, Architecture, LayerPlan, block_kinds
from neox.plan.layout import LaidOutRun
from neox.plan.pipeline_schedules import ranges_per_stage
from neox.plan.run_plan import RunPlan
from neox.plan.time.gpus import GPUS, Gpu
from neox.plan.time.setting import NetworkShape, Recompute, StepSetting
from neox.plan.time.simulation import Timeline, simulate
from neox.plan.time.step import StepTime, estimate_step, pass_seconds

_SHOWN_FOR_EACH_STAGE = 4
"""Micro batches for each stage that a picture has at most."""
_SAME_MEMORY = 0.05
"""Largest relative difference of two GPUs' memory that counts as the same."""


def network_shape(layers: LayerPlan) -> NetworkShape | None:
    """Return the shape of a decoder; None for networks whose time is not estimated.

    Those are networks with blocks without attention, encoders and reward models.
    """
    network = layers.architecture
    has_other_head = network.bidirectional or network.score_head
    if has_other_head or any(kind.attention is None for kind in block_kinds(network)):
        return None
    return NetworkShape(
        layers=network.num_layers,
        hidden=network.hidden_size,
        heads=network.num_attention_heads,
        kv_heads=network.num_kv_heads,
        head_dim=network.head_dim,
        mlp_width=_active_width(network),
        gated=ACTIVATIONS[network.activation].width_factor > 1,
        vocabulary=layers.padded_vocab_size,
        tied=network.tie_word_embeddings,
        idle_parameters=layers.numel - layers.active_numel,
        expert_parameters=sum(spec.numel for spec in layers.parameters if spec.experts),
        experts_per_token=network.experts_per_token * len(network.expert_blocks) / network.num_layers,
    )


def _active_width(network: Architecture) -> int:
    """Return the inner width of all MLPs and experts that compute a token in a block, as the mean over blocks."""
    with_experts = len(network.expert_blocks)
    of_experts = network.experts_per_token * network.expert_width + network.shared_expert_width
    total = (network.num_layers - with_experts) * network.mlp_width + with_experts * of_experts
    return total // network.num_layers


def estimate_of_plan(plan: RunPlan, gpu: Gpu) -> StepTime | None:
    """Return the estimated time of a step; None if it is not estimated: other networks, offload to files."""
    shape = network_shape(plan.layers)
    zero = plan.config.deepspeed.zero_optimization
    if shape is None or zero.states_directory is not None or zero.weights_directory is not None:
        return None
    return estimate_step(shape, step_setting(plan.laid_out), gpu)


class StepPicture(NamedTuple):
    """What each pipeline stage does in a step.

    Attributes:
        timeline: Passes of each stage.
        micro_batches: Number of micro batches that the timeline has; the step may have more.
        gradients: Time of reducing gradients after the last pass.
        unit: Unit of all times.
    """

    timeline: Timeline
    micro_batches: int
    gradients: float
    unit: str


def step_picture(plan: RunPlan) -> StepPicture:
    """Return what each pipeline stage does in a step, by simulation.

    Times are estimated if `gpu_type` and the network allow it. Otherwise a forward pass through a stage takes 1, and a
    backward pass 2.
    """
    setting = step_setting(plan.laid_out)
    shown = min(setting.micro_batches, _SHOWN_FOR_EACH_STAGE * setting.pp)
    shape = network_shape(plan.layers)
    kind = plan.config.runner.gpu_type
    if shape is None or kind is None:
        forward = [[1 / setting.chunks] * setting.chunks] * setting.pp
        backward = [[2 / setting.chunks] * setting.chunks] * setting.pp
        timeline = simulate(setting.schedule, forward, backward, shown)
        return StepPicture(timeline, shown, 0.0, "forward passes of a stage")
    passes = pass_seconds(shape, setting, GPUS[kind])
    timeline = simulate(setting.schedule, passes.forward, passes.backward, shown, passes.handoff)
    gradients = estimate_step(shape, setting, GPUS[kind]).gradients
    return StepPicture(timeline, shown, gradients, f"seconds, estimated for {kind}")


def step_setting(run: LaidOutRun) -> StepSetting:
    """Return what the time of a step depends on."""
    layout = run.layout
    compile_layers = run.config.training.compile_layers
    may_compile = layout.zero_stage < 3 and not run.recomputes_attention
    recompute: Recompute = "none"
    if run.recomputes_blocks:
        recompute = "full"
    elif layout.recomputes:
        recompute = "core_attn"
    return StepSetting(
        sequence=run.sequence_length,
        micro_batch=layout.micro_batch_size,
        micro_batches=layout.accumulation_steps,
        tp=layout.tp_size,
        pp=layout.pp_size,
        cp=layout.cp_size,
        context="all_gather" if run.gathers_keys else "ulysses",
        dp=layout.dp_size // layout.cp_size,
        ep=layout.ep_size,
        host_states=layout.offloads_states,
        host_weights=layout.offloads_weights,
        schedule=layout.pipeline_schedule,
        chunks=ranges_per_stage(layout.pipeline_schedule, layout.pp_size, layout.virtual_stages),
        zero_stage=layout.zero_stage,
        copies=layout.hpz_size,
        weight_bytes=1 if run.config.deepspeed.zero_optimization.zero_quantized_weights else 2,
        recompute=recompute,
        fp8=run.config.training.fp8 is not None,
        gradient_bytes=run.communicated_bytes,
        fused=may_compile and compile_layers is not False,
        flash=layout.attention == "flash",
        sequence_parallel=layout.sequence_parallel,
        overlaps_gradients=layout.pp_size == 1 and run.overlaps_reduction,
    )


def likely_gpu(plan: RunPlan) -> tuple[str, Gpu]:
    """Return the GPU of `gpu_type`, or else the one that fits `gpu_memory_gib` and `peak_theoretical_tflops` best.

    Returns:
        Its name in the table, and its row.
    """
    asked = plan.config.runner.gpu_type
    if asked is not None:
        return asked, GPUS[asked]
    memory = plan.config.runner.gpu_memory_gib
    peak = plan.config.logging.peak_theoretical_tflops or GPUS["h100"].peak_tflops

    def distance(name: str) -> tuple[float, float]:
        gpu = GPUS[name]
        of_memory = abs(gpu.memory_gib - memory) / memory
        if of_memory <= _SAME_MEMORY:
            of_memory = 0.0
        return of_memory, abs(gpu.peak_tflops - peak)

    name = min(GPUS, key=distance)
    return name, GPUS[name]
