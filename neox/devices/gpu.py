"""Figures of GPUs, from one data file each (`gpus/NAME.json`), whose `sources` say what was measured and what not.

`python benchmarks/ceilings.py --gpu NAME` measures matmuls, attention and memory, and writes them into the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from neox.devices.table import DeviceFamily

GPU_FILES = Path(__file__).with_name("gpus")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in its usual host.

    Rates are those that kernels and collectives reach, but for the peaks and `network_sheet_gbs`, which are the data
    sheet's. Bandwidths of links are in one direction.

    Attributes:
        name: What people call it.
        family: Kind of device.
        formats: Number formats of 16 and 8 bits that it multiplies natively as the library does: `bf16`, `fp8`, and
            `fp8_experts` if one kernel multiplies all experts in fp8.
        memory_gib: Memory that the driver reports, in GiB.
        peak_tflops: Dense peak in bf16 (fp16 if there is no bf16), in TFLOP/s.
        peak_fp8_tflops: Dense peak in fp8, in TFLOP/s; 0 without fp8.
        matmul_tflops: Rate of a large matmul in TFLOP/s.
        fp8_matmul_tflops: Rate of a large matmul in fp8, quantising included, in TFLOP/s.
        attention_tflops: Rate of fused causal attention forward in TFLOP/s, hidden scores not counted.
        attention_backward_tflops: Rate of its backward pass, which has five matmuls for two, in TFLOP/s.
        memory_tbs: Rate of copies and elementwise kernels in TB/s, read and written.
        per_host: GPUs of one host.
        mesh: Whether each pair of GPUs of a host has a link of its own, so that n of them use n - 1 of a GPU's links.
            Otherwise a switch gives any two the full bandwidth.
        link_gbs: Rate of collectives between the GPUs of one host in GB/s.
        network_sheet_gbs: Bandwidth of one GPU's share of the network cards in GB/s.
        network_gbs: Rate of collectives between hosts in GB/s for each GPU.
        host_link_gbs: Rate between a GPU and main memory in GB/s: four fifths of a link of PCI Express.
        host_memory_gbs: One GPU's share of the rate of main memory in GB/s: half of its channels' bandwidth.
        host_memory_gib: Main memory of the whole host in GiB.
        kernel_seconds: Launch interval of kernels, and smallest time of a kernel, in seconds.
        collective_seconds: Fixed time of a collective in seconds, for any size and number of ranks.
        sources: Where the figures come from.
    """

    name: str
    family: DeviceFamily
    formats: tuple[str, ...]
    memory_gib: float
    peak_tflops: float
    peak_fp8_tflops: float
    matmul_tflops: float
    fp8_matmul_tflops: float
    attention_tflops: float
    attention_backward_tflops: float
    memory_tbs: float
    per_host: int
    mesh: bool
    link_gbs: float
    network_sheet_gbs: float
    network_gbs: float
    host_link_gbs: float
    host_memory_gbs: float
    host_memory_gib: float
    kernel_seconds: float
    collective_seconds: float
    sources: tuple[str, ...]

    @property
    def main_memory_gib(self) -> float:
        """One GPU's share of its host's main memory in GiB."""
        return self.host_memory_gib / self.per_host

    def link_between(self, ranks: int) -> float:
        """Return the rate in GB/s that a collective of some GPUs of one host reaches."""
        if self.mesh and ranks < self.per_host:
            return self.link_gbs * max(1, ranks - 1) / (self.per_host - 1)
        return self.link_gbs


def _read(file: Path) -> Gpu:
    figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    figures |= {"formats": tuple(figures["formats"]), "sources": tuple(figures["sources"])}
    return Gpu(**figures)


GPUS: Mapping[str, Gpu] = MappingProxyType({file.stem: _read(file) for file in sorted(GPU_FILES.glob("*.json"))})
"""Value of `--gpu-type` -> the GPU."""
