"""Time of one block's forward and backward pass on one rank: products, attention, elementwise work, collectives."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from neox.architecture import Attention
from neox.plan.layout import Workload
from neox.plan.time.gpus import Gpu
from neox.plan.time.system import (
    Recompute,
    TrainingSystem,
    active_mlp_width,
    attention_of_blocks,
    expert_parameters,
    experts_per_token,
    mlp_matrices,
)

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


def ring_seconds(gpu: Gpu, system: TrainingSystem, size: float, ranks: int, stride: int) -> float:
    """Return the time of an all-gather or a reduce-scatter of `size` bytes over ranks; an all-reduce is both.

    Args:
        gpu: The GPU, whose links it uses.
        system: The training system, which may name another network.
        size: Bytes of the whole tensor.
        ranks: Ranks of the group.
        stride: Distance of neighbouring ranks of the group in the order of all ranks.
    """
    if ranks == 1:
        return 0.0
    in_host = min(ranks, max(1, gpu.per_host // stride))
    link = gpu.link_between(in_host)
    if in_host < ranks:
        network = (system.network or gpu.network) * gpu.network_efficiency
        link = min(link, network * in_host)
    return size * (ranks - 1) / ranks / (link * 1e9) + latency_seconds(gpu, ranks)


def latency_seconds(gpu: Gpu, ranks: int) -> float:
    """Return the time of a collective of a few bytes over a ring."""
    return gpu.collective_seconds + (ranks - 1) * _HOP


def forward_seconds(run: Workload, gpu: Gpu, system: TrainingSystem) -> Seconds:
    """Return the time of a block's forward pass for one micro batch."""
    network = run.network
    layout = run.layout
    tokens = run.tokens
    heads = network.num_attention_heads / layout.tp_size
    kv_heads = max(1.0, network.num_kv_heads / layout.tp_size)
    width = active_mlp_width(network) / layout.tp_size
    up = width * (mlp_matrices(network) - 1)
    fp8 = run.config.training.fp8 is not None
    sums = 2  # of attention and of the MLP
    if network.parallel_residual and not layout.sequence_parallel:
        sums = 1  # of both together; their inputs' gradients are summed one by one

    def product(columns: float, inner: float) -> float:
        return product_seconds(gpu, tokens, columns, inner, fp8=fp8)

    products = product(up, network.hidden_size) + product(network.hidden_size, width)
    for kind in attention_of_blocks(network):
        for matrix in kind.matrices:
            outputs, inputs = matrix.shard_shape(layout.tp_size)
            products += kind.share * product(outputs, inputs)
    return Seconds(
        products=products,
        attention=attention_seconds(run, gpu, system, tokens, heads),
        elementwise=_elementwise(run, gpu, system, tokens),
        tensor=_tensor(run, gpu, system, tokens, sums),
        context=_context(run, gpu, system, tokens, kv_heads),
        experts=_experts(run, gpu, system, tokens),
    )


def attention_seconds(run: Workload, gpu: Gpu, system: TrainingSystem, tokens: float, heads: float) -> float:
    """Return the forward time of scores and weighted values, as the mean over blocks.

    Fused attention skips the keys that a causal mask and a window hide.
    """
    seconds = 0.0
    for kind in attention_of_blocks(run.network):
        seconds += kind.share * _scores(run, gpu, system, kind.attention, tokens, heads)
    return seconds


def _scores(
    run: Workload, gpu: Gpu, system: TrainingSystem, attention: Attention, tokens: float, heads: float
) -> float:
    """Return the forward time of scores and weighted values of one kind of attention."""
    network = run.network
    layout = run.layout
    sequence = run.sequence_length
    widths = network.head_dim + attention.value_width(network)
    of_key = 2 * tokens * heads * widths
    if layout.cp_size > 1 and not system.balanced_context:
        # The last of cp parts sees 2 cp - 1 half parts, cp on average.
        of_key *= (2 * layout.cp_size - 1) / layout.cp_size
    if layout.attention == "flash" or not attention.takes_softmax:
        keys = attention.keys_per_query(network, sequence)
        seen = keys - keys**2 / 2 / sequence  # the first queries have fewer keys before them
        narrow = max(1.0, 128 / network.head_dim) ** 0.5
        return of_key * seen * narrow / (gpu.peak_tflops * 1e12 * gpu.attention_efficiency) + gpu.kernel_seconds
    # Two batched products over a head's short sums; the scores go through memory for the products, softmax and dropout.
    ramp = 1 + _RAMP / 2 / network.head_dim / 2
    compute = of_key * sequence / (gpu.peak_tflops * 1e12 * gpu.product_efficiency) * ramp
    scores = tokens * sequence * heads
    passes = 2 * 6 + 1
    return compute + passes * scores / (gpu.bandwidth * 1e12 * gpu.memory_efficiency) + 4 * gpu.kernel_seconds


def _elementwise(run: Workload, gpu: Gpu, system: TrainingSystem, tokens: float) -> float:
    """Return the forward time of norms, residuals, positions and the activation, by the tensors they move."""
    network = run.network
    layout = run.layout
    hidden = tokens * network.hidden_size
    if layout.sequence_parallel:
        hidden /= layout.tp_size
    inner = tokens * active_mlp_width(network) / layout.tp_size
    rotated = tokens * (network.num_attention_heads + network.num_kv_heads) * network.head_dim / layout.tp_size
    if system.fuses(run):
        elements = 8 * hidden + mlp_matrices(network) * inner + 2 * rotated
        kernels = 8
    else:
        elements = 22 * hidden + (mlp_matrices(network) + 2) * inner + 8 * rotated
        kernels = 30
    if run.config.training.fp8 is not None:  # each factor of a product is scaled and written again
        elements += 3 * hidden + 1.5 * inner
        elements += 1.5 * expert_parameters(run) / network.num_layers / layout.tp_size / layout.ep_size
    return 2 * elements / (gpu.bandwidth * 1e12 * gpu.memory_efficiency) + kernels * gpu.kernel_seconds / 2


def _tensor(run: Workload, gpu: Gpu, system: TrainingSystem, tokens: float, sums: int) -> float:
    """Return the time of a block's all-reduces over tensor ranks in one pass, or of gathers and scatters instead."""
    layout = run.layout
    if layout.tp_size == 1:
        return 0.0
    size = 2 * tokens * run.network.hidden_size
    whole = 2 * sums * ring_seconds(gpu, system, size, layout.tp_size, 1)
    if system.overlaps_tensor:
        return whole * _EXPOSED_TENSOR
    return whole


def _context(run: Workload, gpu: Gpu, system: TrainingSystem, tokens: float, kv_heads: float) -> float:
    """Return the exposed communication time of context parallelism in a forward pass.

    A ring hides the exchange of keys and values behind attention. Each of its steps computes a partial output, which is
    merged into the accumulated output in fp32 by its logsumexp.
    """
    network = run.network
    layout = run.layout
    if layout.cp_size == 1:
        return 0.0
    heads = network.num_attention_heads / layout.tp_size
    if not system.in_ring and not run.gathers_keys:  # queries, keys and values there, outputs back
        here = 2 * tokens * (2 * heads + 2 * kv_heads) * network.head_dim
        return ring_seconds(gpu, system, here, layout.cp_size, layout.tp_size) + latency_seconds(gpu, layout.cp_size)
    size = 2 * 2 * tokens * layout.cp_size * kv_heads * network.head_dim
    sent = ring_seconds(gpu, system, size, layout.cp_size, layout.tp_size)
    if run.gathers_keys and not system.in_ring:
        return sent
    hidden = attention_seconds(run, gpu, system, tokens, heads)
    merged = _MERGE_BYTES * tokens * heads * network.head_dim * (layout.cp_size - 1)
    merging = merged / (gpu.bandwidth * 1e12 * gpu.memory_efficiency)
    return max(0.0, sent - hidden) + merging + layout.cp_size * gpu.collective_seconds


def all_to_all_seconds(gpu: Gpu, system: TrainingSystem, size: float, ranks: int, stride: int) -> float:
    """Return the time of an all-to-all in which each rank sends equal parts of `size` bytes to all ranks.

    Transfers within a host and between hosts overlap.

    Args:
        gpu: The GPU and its links.
        system: The training system, which may name another network.
        size: Bytes that a rank sends, including the part that it keeps.
        ranks: Number of ranks in the group.
        stride: Distance between neighbouring ranks of the group in the order of all ranks.
    """
    if ranks == 1:
        return 0.0
    in_host = min(ranks, max(1, gpu.per_host // stride))
    network = (system.network or gpu.network) * gpu.network_efficiency
    near = size * (in_host - 1) / ranks / (gpu.link_between(in_host) * 1e9)
    far = size * (ranks - in_host) / ranks / (network * 1e9)
    return max(near, far) + gpu.collective_seconds


def _experts(run: Workload, gpu: Gpu, system: TrainingSystem, tokens: float) -> float:
    """Return the time of a block's two all-to-alls (dispatch and combine), which are not overlapped."""
    network = run.network
    layout = run.layout
    size = 2 * tokens * experts_per_token(network) * network.hidden_size
    return 2 * all_to_all_seconds(gpu, system, size, layout.ep_size, layout.tp_size)


def backward_seconds(run: Workload, gpu: Gpu, system: TrainingSystem) -> Seconds:
    """Return the time of a block's backward pass for one micro batch, with what it recomputes.

    Each product has two gradients, with frozen weights only that of its inputs. Fused attention computes five products
    backward for two forward, less efficiently.
    """
    forward = forward_seconds(run, gpu, system)
    attention = 2.0
    if run.layout.attention == "flash":
        attention = 2.5 * 1.15
    result = Seconds(
        products=(1 + run.layers.trained_share) * forward.products,
        attention=attention * forward.attention,
        elementwise=2 * forward.elementwise,
        tensor=_tensor(run, gpu, system, run.tokens, 2),
        context=forward.context * (2 if system.in_ring else 1),
        experts=forward.experts,
    )
    return result + recomputed_seconds(forward, system.recompute(run))


def recomputed_seconds(forward: Seconds, recompute: Recompute) -> Seconds:
    """Return the part of a backward pass that repeats the forward pass."""
    if recompute == "full":
        return forward
    if recompute == "core_attn":
        return Seconds(attention=forward.attention)
    if recompute == "half_of_products":
        return Seconds(products=forward.products / 2, elementwise=forward.elementwise, tensor=forward.tensor / 2)
    return Seconds()
