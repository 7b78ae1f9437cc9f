"""Time of an optimizer step: blocks, head, pipeline, gradients, update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from neox.plan.time.block import backward_seconds, forward_seconds, latency_seconds, product_seconds, ring_seconds
from neox.plan.time.gpus import Gpu
from neox.plan.time.setting import NetworkShape, StepSetting
from neox.plan.time.simulation import PipelineLength, simulated_length

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
    tokens: int
    ranks: int
    model_flops: float
    peak_tflops: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        computing = self.products + self.attention + self.elementwise
        exchanging = self.tensor + self.context + self.experts + self.gradients
        return computing + exchanging + self.bubble + self.update

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


def model_flops(shape: NetworkShape, setting: StepSetting) -> float:
    """Return the operations of one step: forward, and twice that backward."""
    per_token = 6 * (shape.layers * shape.block_parameters + shape.vocabulary * shape.hidden)
    per_token += 12 * shape.layers * shape.heads * shape.head_dim * setting.sequence
    return float(per_token) * setting.tokens


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


def pass_seconds(shape: NetworkShape, setting: StepSetting, gpu: Gpu) -> PassSeconds:
    """Estimate the times of the passes of one micro batch; the last range has the head, too."""
    head = sum(_head(shape, setting, gpu))
    per_chunk = shape.layers / setting.pp / setting.chunks
    handoff = _handoff(shape, setting, gpu)
    blocked = handoff if setting.blocking_handoff else 0.0
    forward = per_chunk * forward_seconds(shape, setting, gpu).total + blocked
    backward = per_chunk * backward_seconds(shape, setting, gpu).total + blocked
    fronts = [[forward] * setting.chunks for _ in range(setting.pp)]
    backs = [[backward] * setting.chunks for _ in range(setting.pp)]
    last_stage = setting.pp - 1
    if setting.schedule == "dualpipev":  # its last range is on the first stage
        last_stage = 0
    fronts[last_stage][-1] += head / 3
    backs[last_stage][-1] += head * 2 / 3
    return PassSeconds(fronts, backs, handoff)


def estimate_step(
    shape: NetworkShape, setting: StepSetting, gpu: Gpu, pipeline_length: PipelineLength = simulated_length
) -> StepTime:
    """Estimate the time of one optimizer step.

    Args:
        shape: The network.
        setting: How it is trained.
        gpu: The GPUs.
        pipeline_length: How the length of a step follows from its passes.

    Raises:
        ConfigError: The schedule does not take this number of micro batches.
    """
    forward = forward_seconds(shape, setting, gpu)
    backward = backward_seconds(shape, setting, gpu)
    head_products, head_elementwise = _head(shape, setting, gpu)
    head = head_products + head_elementwise
    passes = pass_seconds(shape, setting, gpu)
    length = pipeline_length(setting.schedule, passes.forward, passes.backward, setting.micro_batches, passes.handoff)
    blocks = (forward + backward) * (shape.layers / setting.pp * setting.micro_batches)
    busy = blocks.total + head * setting.micro_batches
    in_blocks = shape.layers * shape.block_parameters + shape.idle_parameters - shape.expert_parameters
    held = (in_blocks / setting.pp + shape.vocabulary * shape.hidden) / setting.tp
    experts = shape.expert_parameters / setting.pp / setting.tp
    return StepTime(
        products=blocks.products + head_products * setting.micro_batches,
        attention=blocks.attention,
        elementwise=blocks.elementwise + head_elementwise * setting.micro_batches,
        tensor=blocks.tensor,
        context=blocks.context,
        experts=blocks.experts,
        bubble=max(0.0, length - busy),
        gradients=_gradients(setting, gpu, (held, experts), forward.total, backward.total, shape),
        update=_update(setting, gpu, held, experts),
        tokens=setting.tokens,
        ranks=setting.ranks,
        model_flops=model_flops(shape, setting),
        peak_tflops=gpu.peak_tflops,
    )


def _head(shape: NetworkShape, setting: StepSetting, gpu: Gpu) -> tuple[float, float]:
    """Return the time of head and loss for one micro batch, forward and backward: products, and elementwise work."""
    tokens = setting.micro_batch * setting.sequence / setting.cp
    rows = shape.vocabulary / setting.tp
    products = 3 * product_seconds(gpu, tokens, rows, shape.hidden)
    passes = 14 if setting.fused else 26  # bytes of a logit: in bf16 and in fp32, there and back
    return products, passes * tokens * rows / (gpu.bandwidth * 1e12 * gpu.memory_efficiency)


def _handoff(shape: NetworkShape, setting: StepSetting, gpu: Gpu) -> float:
    """Return the time to send a micro batch's hidden states to the next stage."""
    if setting.pp == 1:
        return 0.0
    size = 2 * setting.micro_batch * setting.sequence / setting.cp * shape.hidden
    if setting.divided_handoff:
        size /= setting.tp
    stride = setting.tp * setting.cp * setting.dp
    link = gpu.link * gpu.link_efficiency
    if stride >= gpu.per_host:
        link = (setting.network or gpu.network) * gpu.network_efficiency
    return size / (link * 1e9) + 2e-5


def _gradients(
    setting: StepSetting, gpu: Gpu, sizes: tuple[float, float], forward: float, backward: float, shape: NetworkShape
) -> float:
    """Return the exposed time of reducing gradients and gathering weights.

    `sizes` are the elements on a tensor rank and stage: without experts, and of all experts.
    """
    ranks = setting.dp * setting.cp
    stride = setting.tp
    if ranks == 1:
        return 0.0
    held, experts = sizes

    def exchange(element: float) -> float:
        if setting.ep == 1:
            return ring_seconds(gpu, setting, element * (held + experts), ranks, stride)
        expert_bytes = element * experts / setting.ep
        seconds = ring_seconds(gpu, setting, element * held, ranks, stride)
        return seconds + ring_seconds(gpu, setting, expert_bytes, ranks // setting.ep, stride * setting.ep)

    reduce = exchange(setting.gradient_bytes)
    gather = exchange(setting.weight_bytes)
    if setting.host_weights:
        gather += 2 * (held + experts) / ranks / (gpu.host_link * 1e9)
    layers = shape.layers / setting.pp
    if setting.zero_stage < 3:
        hidden = _HIDDEN_SHARE * layers * backward if setting.overlaps_gradients else 0.0
        times = setting.micro_batches if setting.zero_stage == 2 else 1  # ZeRO 2 keeps no whole gradients to add to
        return times * max(0.0, reduce - hidden) + gather
    of_layers = (layers - 1) * latency_seconds(gpu, ranks)  # each layer has collectives of its own
    gather += of_layers
    reduce += of_layers
    if setting.keeps_gathered:
        exposed = max(0.0, gather - _HIDDEN_SHARE * layers * forward)
        return exposed + max(0.0, reduce - _HIDDEN_SHARE * layers * backward)
    again = gather  # once more, from the second copy of the weights if there is one
    if setting.copies > 1:
        again = ring_seconds(gpu, setting, setting.weight_bytes * (held + experts), setting.copies, stride) + of_layers

    def of_micro_batch(gather_forward: float) -> float:
        exposed = max(0.0, gather_forward - _HIDDEN_SHARE * layers * forward)
        exposed += max(0.0, again + reduce - _HIDDEN_SHARE * layers * backward)
        ends = (gather_forward + again + reduce) / max(1.0, layers)  # of the first and last block, which nothing hides
        return exposed + ends

    return of_micro_batch(gather) + (setting.micro_batches - 1) * of_micro_batch(again)


def _update(setting: StepSetting, gpu: Gpu, held: float, experts: float) -> float:
    """Return the time of Adam: it reads and writes weight and two moments in fp32, reads a gradient, writes 2 bytes.

    If the host updates, gradients are copied to it and new weights are copied back.
    """
    updated = held + experts / setting.ep
    if setting.zero_stage:
        updated = (held + experts) / (setting.dp * setting.cp)
    moved = 2 * 12 + 4 + 2
    if setting.host_states:
        copied = setting.gradient_bytes + 2
        return updated * (moved / gpu.host_memory + copied / gpu.host_link) / 1e9
    return moved * updated / (gpu.bandwidth * 1e12 * gpu.memory_efficiency)
