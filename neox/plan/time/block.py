"""Time of one block's forward and backward pass on one rank: products, attention, elementwise work, collectives."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from neox.plan.time.gpus import Gpu
from neox.plan.time.setting import NetworkShape, StepSetting

_HOP = 2e-6
"""Seconds from one rank of a ring to the next, whatever the size."""

_MERGE_BYTES = 48
"""Bytes that move for each element of attention's output when a ring merges one more part into it."""

_EXPOSED_TENSOR = 0.35
"""Share of the tensor ranks' collectives that async TP cannot hide behind products."""

_TILE_ROWS = 128
_TILE_COLUMNS = 256
_RAMP = 300
"""Length of a product's sum at which half of the time goes to filling and draining the pipeline of a tile."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of one pass by what they are spent on.

    Attributes:
        products: Products with weights.
        attention: Scores and weighted values.
        elementwise: Norms, activations, residuals and all that memory bandwidth limits.
        tensor: Collectives of tensor ranks that nothing hides.
        context: Collectives of context ranks that nothing hides.
        experts: All-to-alls of expert parallelism.
    """

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return self.products + self.attention + self.elementwise + self.tensor + self.context + self.experts

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.products + other.products,
            self.attention + other.attention,
            self.elementwise + other.elementwise,
            self.tensor + other.tensor,
            self.context + other.context,
            self.experts + other.experts,
        )

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(
            self.products * factor,
            self.attention * factor,
            self.elementwise * factor,
            self.tensor * factor,
            self.context * factor,
            self.experts * factor,
        )


def product_seconds(gpu: Gpu, rows: float, columns: float, inner: float, *, fp8: bool = False) -> float:
    """Return the time of a product [rows, inner] x [inner, columns].

    The output is cut into tiles, which the multiprocessors take in waves; the last wave may be partly empty. A short
    sum fills a tile's pipeline badly. A thin product is limited by memory.

    Args:
        gpu: The GPU.
        rows: Rows of the first factor.
        columns: Columns of the second factor.
        inner: Length of the sums.
        fp8: Both factors are in fp8.
    """
    peak = gpu.peak_tflops * gpu.product_efficiency
    size = 2
    if fp8:
        peak = gpu.peak_fp8_tflops * gpu.fp8_efficiency
        size = 1
    tiles = ceil(rows / _TILE_ROWS) * ceil(columns / _TILE_COLUMNS)
    waves = tiles / gpu.multiprocessors
    rounded = float(ceil(waves))
    if waves > 1:  # work of a partly empty wave is spread again (stream-K), so half of its loss remains
        rounded = (ceil(waves) + waves) / 2
    quantised = rounded / waves
    ramp = 1 + _RAMP / 2 / inner
    compute = 2 * rows * columns * inner / (peak * 1e12) * quantised * ramp
    moved = size * (rows * inner + inner * columns) + 2 * rows * columns
    return max(compute, moved / (gpu.bandwidth * 1e12 * gpu.memory_efficiency)) + gpu.kernel_seconds


def ring_seconds(gpu: Gpu, setting: StepSetting, size: float, ranks: int, stride: int) -> float:
    """Return the time of an all-gather or a reduce-scatter of `size` bytes over ranks; an all-reduce is both.

    Args:
        gpu: The GPU, whose links it uses.
        setting: Layout, which may name another network.
        size: Bytes of the whole tensor.
        ranks: Ranks of the group.
        stride: Distance of neighbouring ranks of the group in the order of all ranks.
    """
    if ranks == 1:
        return 0.0
    in_host = min(ranks, max(1, gpu.per_host // stride))
    link = gpu.link * gpu.link_efficiency
    if in_host < ranks:
        network = (setting.network or gpu.network) * gpu.network_efficiency
        link = min(link, network * in_host)
    return size * (ranks - 1) / ranks / (link * 1e9) + latency_seconds(gpu, ranks)


def latency_seconds(gpu: Gpu, ranks: int) -> float:
    """Return the time of a collective of a few bytes over a ring."""
    return gpu.collective_seconds + (ranks - 1) * _HOP


def forward_seconds(shape: NetworkShape, setting: StepSetting, gpu: Gpu) -> Seconds:
    """Return the time of a block's forward pass for one micro batch."""
    tokens = setting.micro_batch * setting.sequence / setting.cp
    heads = shape.heads / setting.tp
    kv_heads = max(1.0, shape.kv_heads / setting.tp)
    width = shape.mlp_width / setting.tp
    up = width * (shape.mlp_matrices - 1)
    fp8 = setting.fp8

    def product(columns: float, inner: float) -> float:
        return product_seconds(gpu, tokens, columns, inner, fp8=fp8)

    products = product((heads + 2 * kv_heads) * shape.head_dim, shape.hidden)
    products += product(shape.hidden, heads * shape.head_dim)
    products += product(up, shape.hidden) + product(shape.hidden, width)
    return Seconds(
        products=products,
        attention=attention_seconds(shape, setting, gpu, tokens, heads),
        elementwise=_elementwise(shape, setting, gpu, tokens),
        tensor=_tensor(shape, setting, gpu, tokens),
        context=_context(shape, setting, gpu, tokens, kv_heads),
        experts=_experts(shape, setting, gpu, tokens),
    )


def attention_seconds(shape: NetworkShape, setting: StepSetting, gpu: Gpu, tokens: float, heads: float) -> float:
    """Return the forward time of scores and weighted values.

    Fused attention skips the half of the keys that a causal mask hides.
    """
    operations = 4 * tokens * setting.sequence * heads * shape.head_dim
    if setting.cp > 1 and not setting.balanced_context:  # the last of cp parts sees 2 cp - 1 half parts, cp on average
        operations *= (2 * setting.cp - 1) / setting.cp
    if setting.flash:
        narrow = max(1.0, 128 / shape.head_dim) ** 0.5
        return operations / 2 * narrow / (gpu.peak_tflops * 1e12 * gpu.attention_efficiency) + gpu.kernel_seconds
    # Two batched products over a head's short sums; the scores go through memory for the products, softmax and dropout.
    ramp = 1 + _RAMP / 2 / shape.head_dim / 2
    compute = operations / (gpu.peak_tflops * 1e12 * gpu.product_efficiency) * ramp
    scores = tokens * setting.sequence * heads
    passes = 2 * 6 + 1
    return compute + passes * scores / (gpu.bandwidth * 1e12 * gpu.memory_efficiency) + 4 * gpu.kernel_seconds


def _elementwise(shape: NetworkShape, setting: StepSetting, gpu: Gpu, tokens: float) -> float:
    """Return the forward time of norms, residuals, positions and the activation, by the tensors they move."""
    hidden = tokens * shape.hidden
    if setting.sequence_parallel:
        hidden /= setting.tp
    inner = tokens * shape.mlp_width / setting.tp
    rotated = tokens * (shape.heads + shape.kv_heads) * shape.head_dim / setting.tp
    if setting.fused:
        elements = 8 * hidden + shape.mlp_matrices * inner + 2 * rotated
        kernels = 8
    else:
        elements = 22 * hidden + (shape.mlp_matrices + 2) * inner + 8 * rotated
        kernels = 30
    if setting.fp8:  # each factor of a product is scaled and written again
        elements += 3 * hidden + 1.5 * inner
    return 2 * elements / (gpu.bandwidth * 1e12 * gpu.memory_efficiency) + kernels * gpu.kernel_seconds / 2


def _tensor(shape: NetworkShape, setting: StepSetting, gpu: Gpu, tokens: float) -> float:
    """Return the time of a block's two all-reduces over tensor ranks, or of gathers and scatters instead."""
    if setting.tp == 1:
        return 0.0
    size = 2 * tokens * shape.hidden
    whole = 4 * ring_seconds(gpu, setting, size, setting.tp, 1)
    if setting.overlaps_tensor:
        return whole * _EXPOSED_TENSOR
    return whole


def _context(shape: NetworkShape, setting: StepSetting, gpu: Gpu, tokens: float, kv_heads: float) -> float:
    """Return the exposed communication time of context parallelism in a forward pass.

    A ring hides the exchange of keys and values behind attention. Each of its steps computes a partial output, which is
    merged into the accumulated output in fp32 by its logsumexp.
    """
    if setting.cp == 1:
        return 0.0
    heads = shape.heads / setting.tp
    if setting.context == "ulysses":  # queries, keys and values there, outputs back
        here = 2 * tokens * (2 * heads + 2 * kv_heads) * shape.head_dim
        return ring_seconds(gpu, setting, here, setting.cp, setting.tp) + latency_seconds(gpu, setting.cp)
    size = 2 * 2 * tokens * setting.cp * kv_heads * shape.head_dim
    sent = ring_seconds(gpu, setting, size, setting.cp, setting.tp)
    if setting.context == "all_gather":
        return sent
    hidden = attention_seconds(shape, setting, gpu, tokens, heads)
    merged = _MERGE_BYTES * tokens * heads * shape.head_dim * (setting.cp - 1)
    merging = merged / (gpu.bandwidth * 1e12 * gpu.memory_efficiency)
    return max(0.0, sent - hidden) + merging + setting.cp * gpu.collective_seconds


def all_to_all_seconds(gpu: Gpu, setting: StepSetting, size: float, ranks: int, stride: int) -> float:
    """Return the time of an all-to-all in which each rank sends equal parts of `size` bytes to all ranks.

    Transfers within a host and between hosts overlap.

    Args:
        gpu: The GPU and its links.
        setting: Layout, which may specify another network.
        size: Bytes that a rank sends, including the part that it keeps.
        ranks: Number of ranks in the group.
        stride: Distance between neighbouring ranks of the group in the order of all ranks.
    """
    if ranks == 1:
        return 0.0
    in_host = min(ranks, max(1, gpu.per_host // stride))
    network = (setting.network or gpu.network) * gpu.network_efficiency
    near = size * (in_host - 1) / ranks / (gpu.link * gpu.link_efficiency * 1e9)
    far = size * (ranks - in_host) / ranks / (network * 1e9)
    return max(near, far) + gpu.collective_seconds


def _experts(shape: NetworkShape, setting: StepSetting, gpu: Gpu, tokens: float) -> float:
    """Return the time of a block's two all-to-alls (dispatch and combine), which are not overlapped."""
    size = 2 * tokens * shape.experts_per_token * shape.hidden
    return 2 * all_to_all_seconds(gpu, setting, size, setting.ep, setting.tp)


def backward_seconds(shape: NetworkShape, setting: StepSetting, gpu: Gpu) -> Seconds:
    """Return the time of a block's backward pass for one micro batch, with what it recomputes.

    Each product has two gradients. Fused attention computes five products backward for two forward, less efficiently.
    """
    forward = forward_seconds(shape, setting, gpu)
    attention = 2.0
    if setting.flash:
        attention = 2.5 * 1.15
    result = Seconds(
        products=2 * forward.products,
        attention=attention * forward.attention,
        elementwise=2 * forward.elementwise,
        tensor=forward.tensor,
        context=forward.context * (2 if setting.context == "ring" else 1),
        experts=forward.experts,
    )
    return result + recomputed_seconds(forward, setting)


def recomputed_seconds(forward: Seconds, setting: StepSetting) -> Seconds:
    """Return the part of a backward pass that repeats the forward pass."""
    if setting.recompute == "full":
        return forward
    if setting.recompute == "core_attn":
        return Seconds(attention=forward.attention)
    if setting.recompute == "half_of_products":
        return Seconds(products=forward.products / 2, elementwise=forward.elementwise, tensor=forward.tensor / 2)
    return Seconds()
