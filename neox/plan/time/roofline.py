"""Roofline: the time of a kernel from its operations and bytes, and of a collective from its bytes.

A kernel takes the longer of computing and moving its bytes, at the rates that kernels reach on the GPU.
"""

from __future__ import annotations

from neox.devices import Gpu

SHORT_SUM = 128
"""Length of a matmul's sum at which filling and draining a tile's pipeline take as long as the sum itself. Measured on
an H100: sums of 2,048 run at 0.945 of the rate of sums of 32,768."""
_HOP = 2e-6
"""Seconds from one rank of a ring to the next, whatever the size."""


def matmul_seconds(
    gpu: Gpu, rows: float, columns: float, inner: float, *, matrices: float = 1.0, fp8: bool = False
) -> float:
    """Return the time of a matmul [rows, inner] x [inner, columns].

    Args:
        gpu: The GPU.
        rows: Rows of the first factor.
        columns: Columns of the second factor.
        inner: Length of the sums.
        matrices: Matrices that share the rows between them, as those of experts do.
        fp8: Both factors are in fp8.
    """
    rate = gpu.matmul_tflops
    size = 2  # bytes of a factor's element
    if fp8:
        rate = gpu.fp8_matmul_tflops
        size = 1
    compute = 2 * rows * columns * inner * (1 + SHORT_SUM / inner) / (rate * 1e12)
    moved = size * (rows * inner + matrices * inner * columns) + 2 * rows * columns
    return max(compute, memory_seconds(gpu, moved)) + gpu.kernel_seconds


def memory_seconds(gpu: Gpu, size: float) -> float:
    """Return the time of a kernel that reads and writes `size` bytes of the GPU's memory in all."""
    return size / (gpu.memory_tbs * 1e12)


def ring_seconds(gpu: Gpu, size: float, ranks: int, stride: int) -> float:
    """Return the time of an all-gather or a reduce-scatter of `size` bytes over ranks; an all-reduce is both.

    Args:
        gpu: The GPU, whose links it uses.
        size: Bytes of the whole tensor.
        ranks: Ranks of the group.
        stride: Distance of neighbouring ranks of the group in the order of all ranks.
    """
    if ranks == 1:
        return 0.0
    in_host = min(ranks, max(1, gpu.per_host // stride))
    link = gpu.link_between(in_host)
    if in_host < ranks:
        link = min(link, gpu.network_gbs * in_host)
    return size * (ranks - 1) / ranks / (link * 1e9) + latency_seconds(gpu, ranks)


def latency_seconds(gpu: Gpu, ranks: int) -> float:
    """Return the time of a collective of a few bytes over a ring."""
    return gpu.collective_seconds + (ranks - 1) * _HOP


def all_to_all_seconds(gpu: Gpu, size: float, ranks: int, stride: int) -> float:
    """Return the time of an all-to-all in which each rank sends equal parts of `size` bytes to all ranks.

    Transfers within a host and between hosts overlap.

    Args:
        gpu: The GPU and its links.
        size: Bytes that a rank sends, including the part for itself.
        ranks: Ranks of the group.
        stride: Distance between neighbouring ranks of the group in the order of all ranks.
    """
    if ranks == 1:
        return 0.0
    in_host = min(ranks, max(1, gpu.per_host // stride))
    near = size * (in_host - 1) / ranks / (gpu.link_between(in_host) * 1e9)
    far = size * (ranks - in_host) / ranks / (gpu.network_gbs * 1e9)
    return max(near, far) + gpu.collective_seconds
