"""Time of an optimizer step: blocks, head, pipeline, gradients, update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from neox.architecture import Architecture, training_flops_per_token
from neox.config.sections.optimizer_table import MuonParams
from neox.plan.layout import Workload
from neox.plan.time.block import backward_seconds, forward_seconds, latency_seconds, product_seconds, ring_seconds
from neox.plan.time.gpus import Gpu
from neox.plan.time.simulation import PipelineLength, simulated_length
from neox.plan.time.system import (
    OURS,
    TrainingSystem,
    expert_parameters,
    held_parameters,
    muon_work,
    ranges_of_stage,
    tokens_of_step,
)

COMPUTE_OPTIMAL_RATIO = 20.0
"""Tokens for each parameter with which a given compute reaches the lowest loss (arXiv:2203.15556)."""
_HIDDEN_SHARE = 0.85
"""Share of the backward pass behind which the reduction of gradients or the gathering of weights can hide."""


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of one optimizer step on the rank that holds the most work, by what they are spent on.

    Attributes:
        products: Products of blocks and head.
        attention: Scores and weighted values.
        elementwise: Work limited by memory bandwidth.
        tensor: Collectives of tensor ranks.
        context: Collectives of context ranks.
        experts: All-to-alls of expert parallelism.
        bubble: Waiting for other pipeline stages, hand-offs included.
        gradients: Reduction of gradients and gathering of weights that nothing hides.
        update: The optimizer's step, including copies to and from main memory.
        reference: Forward passes of a reference model, before those of the trained one.
        tokens: Tokens of the step over all ranks.
        ranks: Number of GPUs.
        model_flops: Operations of the network for the step, without recomputation, causal attention counted whole.
        peak_tflops: Peak of one GPU.
    """

    products: float
    attention: float
    elementwise: float
    tensor: float
    context: float
    experts: float
    bubble: float
    gradients: float
    update: float
    reference: float
    tokens: int
    ranks: int
    model_flops: float
    peak_tflops: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        computing = self.products + self.attention + self.elementwise
        exchanging = self.tensor + self.context + self.experts + self.gradients
        return computing + exchanging + self.bubble + self.update + self.reference

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / self.ranks

    @property
    def tflops(self) -> float:
        """Operations of the network per second and GPU, in TFLOP/s."""
        return self.model_flops / self.seconds / self.ranks / 1e12

    @property
    def mfu(self) -> float:
        """Fraction of the GPUs' peak that the network's operations use."""
        return self.tflops / self.peak_tflops


def model_flops(run: Workload) -> float:
    """Return the operations of one step, forward and backward, as a run reports them without recomputation."""
    length = run.layout.seq_length
    per_token = training_flops_per_token(run.layers, length, predicted=run.config.model.predicted_tokens)
    return float(per_token) * tokens_of_step(run) * length / run.sequence_length


def _projection(network: Architecture) -> int:
    """Return the elements of the projection in a module of multi-token prediction."""
    return 2 * network.hidden_size**2


class PassSeconds(NamedTuple):
    """Estimated times of the passes of one micro batch.

    Attributes:
        forward: Seconds of a forward pass, for each stage and range of layers.
        backward: Seconds of a backward pass, for each stage and range of layers.
        handoff: Seconds from the end of a pass until its result has arrived on another stage.
    """

    forward: list[list[float]]
    backward: list[list[float]]
    handoff: float


def pass_seconds(run: Workload, gpu: Gpu, system: TrainingSystem) -> PassSeconds:
    """Estimate the times of the passes of one micro batch; the last range has the head, too."""
    layout = run.layout
    ranges = ranges_of_stage(run)
    modules = run.network.mtp_num_layers
    head = sum(_head(run, gpu, system))
    per_chunk = run.network.num_layers / layout.pp_size / ranges
    handoff = _handoff(run, gpu, system)
    blocked = handoff if system.blocking_handoff else 0.0
    block_forward = forward_seconds(run, gpu, system).total
    block_backward = backward_seconds(run, gpu, system).total
    forward = per_chunk * block_forward + blocked
    backward = per_chunk * block_backward + blocked
    fronts = [[forward] * ranges for _ in range(layout.pp_size)]
    backs = [[backward] * ranges for _ in range(layout.pp_size)]
    last_stage = layout.pp_size - 1
    if layout.pipeline_schedule == "dualpipev":  # its last range is on the first stage
        last_stage = 0
    fronts[last_stage][-1] += head / 3 + modules * block_forward
    backs[last_stage][-1] += head * 2 / 3 + modules * block_backward
    return PassSeconds(fronts, backs, handoff)


def estimate_step(
    run: Workload, gpu: Gpu, system: TrainingSystem = OURS, pipeline_length: PipelineLength = simulated_length
) -> StepTime:
    """Estimate the time of one optimizer step.

    Args:
        run: The run in its layout.
        gpu: The GPUs.
        system: The training system.
        pipeline_length: How the length of a step follows from its passes.

    Raises:
        ConfigError: The schedule does not take this number of micro batches.
    """
    network = run.network
    layout = run.layout
    forward = forward_seconds(run, gpu, system)
    backward = backward_seconds(run, gpu, system)
    head_products, head_elementwise = _head(run, gpu, system)
    head = head_products + head_elementwise
    passes = pass_seconds(run, gpu, system)
    length = pipeline_length(
        layout.pipeline_schedule, passes.forward, passes.backward, layout.accumulation_steps, passes.handoff
    )
    modules = network.mtp_num_layers  # on the last stage
    blocks = (forward + backward) * ((network.num_layers / layout.pp_size + modules) * layout.accumulation_steps)
    busy = blocks.total + head * layout.accumulation_steps
    of_experts = expert_parameters(run)
    in_blocks = held_parameters(run) - of_experts
    of_modules = modules * (in_blocks / network.num_layers + _projection(network))
    table = run.layers.padded_vocab_size * network.hidden_size
    held = (in_blocks / layout.pp_size + of_modules + table) / layout.tp_size
    experts_in_modules = modules * of_experts / max(1, len(network.expert_blocks))
    experts = (of_experts / layout.pp_size + experts_in_modules) / layout.tp_size
    return StepTime(
        products=blocks.products + head_products * layout.accumulation_steps,
        attention=blocks.attention,
        elementwise=blocks.elementwise + head_elementwise * layout.accumulation_steps,
        tensor=blocks.tensor,
        context=blocks.context,
        experts=blocks.experts,
        bubble=max(0.0, length - busy),
        gradients=_gradients(run, gpu, system, (held, experts), forward.total, backward.total),
        update=_update(run, gpu, held, experts) + _muon(run, gpu, system),
        reference=_reference(run, passes),
        tokens=tokens_of_step(run),
        ranks=layout.tp_size * layout.pp_size * layout.dp_size,
        model_flops=model_flops(run),
        peak_tflops=gpu.peak_tflops,
    )


def _reference(run: Workload, passes: PassSeconds) -> float:
    """Return the time in which a copy of the first weights computes all micro batches; 0 without one."""
    if not run.config.preferences.copies_reference:
        return 0.0
    slowest = max(map(sum, passes.forward)) + passes.handoff
    return slowest * (run.layout.accumulation_steps + run.layout.pp_size - 1)


def _head(run: Workload, gpu: Gpu, system: TrainingSystem) -> tuple[float, float]:
    """Return the time of head and loss for one micro batch, forward and backward: products, and elementwise work.

    Modules of multi-token prediction use the head once more each.
    """
    tokens = run.tokens * (1 + run.network.mtp_num_layers)
    rows = run.layers.padded_vocab_size / run.layout.tp_size
    one = product_seconds(gpu, tokens, rows, run.network.hidden_size)
    products = (3 if run.layers.trains_head else 2) * one
    passes = 14 if system.fuses(run) else 26  # bytes of a logit: in bf16 and in fp32, there and back
    return products, passes * tokens * rows / (gpu.bandwidth * 1e12 * gpu.memory_efficiency)


def _handoff(run: Workload, gpu: Gpu, system: TrainingSystem) -> float:
    """Return the time to send a micro batch's hidden states to the next stage."""
    layout = run.layout
    if layout.pp_size == 1:
        return 0.0
    size: float = 2 * run.tokens * run.network.hidden_size
    if system.divided_handoff:
        size /= layout.tp_size
    stride = layout.tp_size * layout.dp_size
    link = gpu.link_between(2)
    if stride >= gpu.per_host:
        link = (system.network or gpu.network) * gpu.network_efficiency
    return size / (link * 1e9) + 2e-5


def _gradients(
    run: Workload,
    gpu: Gpu,
    system: TrainingSystem,
    sizes: tuple[float, float],
    forward: float,
    backward: float,
) -> float:
    """Return the exposed time of reducing gradients and gathering weights.

    `sizes` are the elements on a tensor rank and stage: without experts, and of all experts.
    """
    layout = run.layout
    ranks = layout.dp_size
    stride = layout.tp_size
    if ranks == 1:
        return 0.0
    held, experts = sizes

    def exchange(element: float) -> float:
        if layout.ep_size == 1:
            return ring_seconds(gpu, system, element * (held + experts), ranks, stride)
        expert_bytes = element * experts / layout.ep_size
        seconds = ring_seconds(gpu, system, element * held, ranks, stride)
        same_experts = ranks // layout.ep_size
        return seconds + ring_seconds(gpu, system, expert_bytes, same_experts, stride * layout.ep_size)

    weight_bytes = 1 if run.config.deepspeed.zero_optimization.zero_quantized_weights else 2
    trained = run.layers.trained_share
    reduce = exchange(run.communicated_bytes * trained)
    gather = exchange(weight_bytes)
    if layout.zero_stage < 3:  # weights that were updated, not those of every pass
        gather = exchange(weight_bytes * trained)
    if layout.offloads_weights:
        gather += 2 * (held + experts) / ranks / (gpu.host_link * 1e9)
    layers = run.network.num_layers / layout.pp_size
    if layout.zero_stage < 3:
        hidden = _HIDDEN_SHARE * layers * backward if system.overlaps(run) else 0.0
        times = 1
        if layout.zero_stage == 2:  # it keeps no whole gradients to add to
            times = layout.accumulation_steps
        return times * max(0.0, reduce - hidden) + gather
    of_layers = (layers - 1) * latency_seconds(gpu, ranks)  # each layer has collectives of its own
    gather += of_layers
    reduce += of_layers
    if system.keeps_gathered:
        exposed = max(0.0, gather - _HIDDEN_SHARE * layers * forward)
        return exposed + max(0.0, reduce - _HIDDEN_SHARE * layers * backward)
    again = gather  # once more, from the second copy of the weights if there is one
    if layout.hpz_size > 1:
        again = ring_seconds(gpu, system, weight_bytes * (held + experts), layout.hpz_size, stride) + of_layers

    def of_micro_batch(gather_forward: float) -> float:
        exposed = max(0.0, gather_forward - _HIDDEN_SHARE * layers * forward)
        exposed += max(0.0, again + reduce - _HIDDEN_SHARE * layers * backward)
        ends = (gather_forward + again + reduce) / max(1.0, layers)  # of the first and last block, which nothing hides
        return exposed + ends

    return of_micro_batch(gather) + (layout.accumulation_steps - 1) * of_micro_batch(again)


def _update(run: Workload, gpu: Gpu, held: float, experts: float) -> float:
    """Return the time of Adam: it reads and writes weight and two moments in fp32, reads a gradient, writes 2 bytes.

    If the host updates, gradients are copied to it and new weights are copied back.
    """
    layout = run.layout
    updated = held + experts / layout.ep_size
    if layout.zero_stage:
        updated = (held + experts) / layout.dp_size
    updated *= run.layers.trained_share
    moved = 2 * 12 + 4 + 2
    if layout.offloads_states:
        copied = run.communicated_bytes + 2
        return updated * (moved / gpu.host_bandwidth + copied / gpu.host_link) / 1e9
    return moved * updated / (gpu.bandwidth * 1e12 * gpu.memory_efficiency)


def _muon(run: Workload, gpu: Gpu, system: TrainingSystem) -> float:
    """Return the time in which Muon turns momentum into steps, beyond that of an Adam; 0 for other optimizers.

    Tensor ranks gather their matrices, and each computes the whole step. Data ranks divide the matrices between them
    with ZeRO 1 and 2. ZeRO 3 divides each matrix, so that all data ranks gather and compute all of them.
    """
    params = run.config.optimizer.optimizer.params
    if not isinstance(params, MuonParams):
        return 0.0
    layout = run.layout
    work = muon_work(run, params)
    operations = work.operations / layout.pp_size
    elements = work.elements / layout.pp_size
    gathered = 0.0
    if layout.zero_stage in (1, 2):
        operations = max(operations / layout.dp_size, work.largest)
        elements /= layout.dp_size
    elif layout.zero_stage == 3:
        gathered = 2 * ring_seconds(gpu, system, 4 * elements, layout.dp_size, layout.tp_size)  # an all-reduce in fp32
    gathered += ring_seconds(gpu, system, 4 * elements, layout.tp_size, 1)
    return operations / (gpu.peak_tflops * 1e12 * gpu.product_efficiency) + gathered
