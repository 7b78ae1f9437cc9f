"""Table of GPUs: what each can compute, hold and send.

Peaks, bandwidths and capacities are the vendors' figures. Efficiencies are the same for every network: what large
products, kernels limited by memory, and collectives reach of these figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from neox.architecture import DeviceFamily

# The usual host of a GPU decides its way to main memory: four fifths of a PCI Express link of 16 lanes, and half of its
# share of the memory channels of the processors, which Adam on a host reaches. The sources are at each kind. Rented
# hosts have about as much main memory (Azure's ND series: 900 GiB with eight A100 of 40 GB, 1,900 with those of 80 GB
# and with H100, 1,850 with MI300X).
_PCIE_3 = 12.0
_PCIE_4 = 25.0
_PCIE_5 = 50.0


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU in its usual host.

    Attributes:
        name: What people call it.
        family: Kind of device in the table of fast paths.
        memory_gib: Memory that the driver reports, in GiB.
        peak_tflops: Dense peak in bf16 (fp16 if there is no bf16), in TFLOP/s.
        peak_fp8_tflops: Dense peak in fp8, in TFLOP/s; 0 without fp8.
        has_bf16: Whether it multiplies bf16 natively.
        has_fp8_experts: Whether one kernel multiplies all experts in fp8.
        bandwidth: Memory bandwidth in TB/s.
        link: Bandwidth between GPUs of one host in GB/s, in one direction.
        mesh: Whether each pair of GPUs of a host has a link of its own, so that n of them use n - 1 of a GPU's links.
            Otherwise a switch gives any two the whole bandwidth.
        network: Bandwidth of one GPU's share of the network cards in GB/s, in one direction.
        per_host: GPUs of one host.
        multiprocessors: Streaming multiprocessors (compute units), over which a product's tiles are spread.
        product_efficiency: Share of the peak that a large product reaches at the power limit.
        fp8_efficiency: Share of the fp8 peak that a large product reaches, quantising included.
        attention_efficiency: Share of the peak that fused attention reaches in the forward pass.
        memory_efficiency: Share of the memory bandwidth that elementwise kernels reach.
        link_efficiency: Share of the links' bandwidth that collectives in a host reach.
        network_efficiency: Share of the network's bandwidth that collectives between hosts reach.
        host_link: Bandwidth between a GPU and main memory in GB/s, in one direction.
        host_bandwidth: One GPU's share of the bandwidth of main memory in GB/s.
        host_memory_gib: Main memory of the whole host in GiB.
        kernel_seconds: Launch interval of kernels, and smallest time of a kernel, in seconds.
        collective_seconds: Fixed time of a collective in seconds, for any size and number of ranks.
    """

    name: str
    family: DeviceFamily = "cuda"
    memory_gib: float
    peak_tflops: float
    peak_fp8_tflops: float = 0.0
    has_bf16: bool = True
    has_fp8_experts: bool = False
    bandwidth: float
    link: float
    mesh: bool = False
    network: float
    per_host: int = 8
    multiprocessors: int
    product_efficiency: float
    fp8_efficiency: float = 0.0
    attention_efficiency: float
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.75
    network_efficiency: float = 0.8
    host_link: float
    host_bandwidth: float
    host_memory_gib: float
    kernel_seconds: float = 4e-6
    collective_seconds: float = 12e-6

    @property
    def main_memory_gib(self) -> float:
        """One GPU's share of its host's main memory in GiB."""
        return self.host_memory_gib / self.per_host

    def link_between(self, ranks: int) -> float:
        """Return the bandwidth in GB/s, in one direction, that a collective of some GPUs of one host reaches."""
        reached = self.link * self.link_efficiency
        if self.mesh and ranks < self.per_host:
            reached *= max(1, ranks - 1) / (self.per_host - 1)
        return reached


# 312 TFLOP/s; NVLink 3 has 300 GB/s each way; hosts of 2021 had eight cards of 200 Gb/s (DGX A100). The DGX A100 has
# PCI Express 4 throughout (NVIDIA's white paper on its architecture), two EPYC 7742 and 1 TB of memory with GPUs of
# 40 GB, 2 TB with those of 80 GB (DGX A100 user guide, DU-09821).
_A100 = Gpu(
    name="A100 SXM 80 GB",
    memory_gib=79.2,
    peak_tflops=312.0,
    bandwidth=2.039,
    link=300.0,
    network=25.0,
    host_link=_PCIE_4,
    host_bandwidth=25.0,  # 16 channels of DDR4-3200, 410 GB/s for eight
    host_memory_gib=2048.0,
    multiprocessors=108,
    product_efficiency=0.80,
    attention_efficiency=0.55,
)
# 989 TFLOP/s; NVLink 4 has 450 GB/s each way; one card of 400 Gb/s for each GPU. DGX H100 and H200 have two Xeon 8480C
# with PCI Express 5 and 2 TB (docs.nvidia.com/dgx-basepod, core components) in 32 DIMMs (MLPerf inference 4.1, NVIDIA's
# H200-SXM-141GBx8). With two in a channel that processor runs them at 4400 MT/s (Intel's page of it).
_H100 = Gpu(
    name="H100 SXM 80 GB",
    memory_gib=79.1,
    peak_tflops=989.0,
    peak_fp8_tflops=1979.0,
    has_fp8_experts=True,
    host_link=_PCIE_5,
    host_bandwidth=35.0,  # 16 channels of DDR5-4400, 563 GB/s for eight
    host_memory_gib=2048.0,
    bandwidth=3.35,
    link=450.0,
    network=50.0,
    multiprocessors=132,
    product_efficiency=0.70,
    fp8_efficiency=0.60,
    attention_efficiency=0.50,
)

GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        # DGX-1: two Xeon E5-2698 v4, 512 GB (MLPerf training 0.7, NVIDIA's dgx1) of DDR4-2133 (NVIDIA's data sheet, as
        # quoted by others), PCI Express 3, which is the GPU's own.
        "v100": Gpu(
            name="V100 SXM2 32 GB",
            memory_gib=31.7,
            peak_tflops=125.0,
            has_bf16=False,
            bandwidth=0.9,
            link=150.0,
            network=12.5,
            host_link=_PCIE_3,
            host_bandwidth=8.5,  # 8 channels of DDR4-2133, 137 GB/s for eight
            host_memory_gib=512.0,
            multiprocessors=80,
            product_efficiency=0.72,
            attention_efficiency=0.35,
        ),
        "a100-40": replace(_A100, name="A100 SXM 40 GB", memory_gib=39.4, bandwidth=1.555, host_memory_gib=1024.0),
        "a100-80": _A100,
        "h100": _H100,
        "h100-96": replace(
            _H100,
            name="H100 SXM 96 GB at 500 W",
            memory_gib=94.5,
            bandwidth=2.4,
            product_efficiency=0.49,
            fp8_efficiency=0.42,
            attention_efficiency=0.31,
        ),
        "h200": replace(
            _H100,
            name="H200 SXM 141 GB",
            memory_gib=139.8,
            bandwidth=4.8,
            product_efficiency=0.74,
            fp8_efficiency=0.62,
        ),
        "b200": Gpu(
            name="B200 SXM 180 GB",
            memory_gib=178.4,
            peak_tflops=2250.0,
            peak_fp8_tflops=4500.0,
            bandwidth=7.7,
            link=900.0,
            network=50.0,
            host_link=_PCIE_5,
            # DGX B200: two Xeon 8570 with PCI Express 5, 2 TB in 32 DIMMs, at most 4 TB (docs.nvidia.com/dgx, DGX B200
            # user guide). No source was found for its speed with two in a channel: as the H100's.
            host_bandwidth=35.0,
            host_memory_gib=2048.0,
            multiprocessors=148,
            product_efficiency=0.70,
            fp8_efficiency=0.60,
            attention_efficiency=0.45,
        ),
        # One of the two dies of a module, which are devices of their own. AMD's figures of the module (383 TFLOP/s,
        # 3.28 TB/s, 220 compute units) halved, and a node of Frontier (OLCF's user guide): four cards of 200 Gb/s for
        # eight dies, 36 GB/s to main memory, 50 to 200 GB/s between two dies. Memory as rocm-smi reports it. Nobody
        # publishes products and attention: assumed, so that 22B and 175B reach about the 38 and 36 % of the peak that
        # trainings on Frontier reached (arXiv:2312.12705). A node has 512 GB of DDR4, and 36 GB/s between the processor
        # and each die (docs.olcf.ornl.gov, Frontier user guide); no source was found there for the memory's bandwidth.
        "mi250x": Gpu(
            name="MI250X, one die of 64 GB",
            family="rocm",
            memory_gib=63.98,
            peak_tflops=191.5,
            bandwidth=1.64,
            link=100.0,
            network=12.5,
            multiprocessors=110,
            product_efficiency=0.55,
            attention_efficiency=0.30,
            host_link=36.0,
            host_bandwidth=13.0,  # 8 channels of DDR4-3200, as EPYC of this generation has: 205 GB/s for eight
            host_memory_gib=512.0,
        ),
        # Seven links of 64 GB/s each way. All-reduces of 2 and 8 GPUs reached 47.7 and 312.9 GB/s, and products 668
        # TFLOP/s (stas00/ml-engineering, network/README.md and compute/accelerator/README.md). Host of AMD's own
        # submission to MLPerf inference 4.1 (8xMI300X_2xEPYC-9374F): PCI Express 5, 24 DIMMs of 64 GB of DDR5-4800, one
        # in each channel. Azure's has 1,850 GiB (ND MI300X v5).
        "mi300x": Gpu(
            name="MI300X 192 GB",
            family="rocm",
            memory_gib=191.5,
            peak_tflops=1307.0,
            peak_fp8_tflops=2614.0,
            bandwidth=5.3,
            link=448.0,
            mesh=True,
            link_efficiency=0.7,
            network=50.0,
            host_link=_PCIE_5,
            host_bandwidth=57.0,  # 24 channels of DDR5-4800, 922 GB/s for eight
            host_memory_gib=1536.0,
            multiprocessors=304,
            product_efficiency=0.45,
            fp8_efficiency=0.40,
            attention_efficiency=0.30,
        ),
        # One of the two tiles of a card, which are devices of their own: Intel's figures of the card (128 Xe cores at
        # 1.6 GHz with 4096 bf16 operations a cycle, 3.28 TB/s, 128 GiB) halved. A node of Aurora before production
        # (argonne-lcf/user-guides, node-performance-overview): with all 12 tiles at work each multiplies bf16 at 220
        # TFLOP/s, copies at 1 TB/s, and has 27 GB/s to main memory. 15.8 GB/s to each of five other cards are the 79
        # that a collective of all reaches; the other tile of the card is nearer (196 GB/s), which is not counted. Eight
        # cards of 200 Gb/s for 12 tiles. Nobody publishes fused attention: assumed. Never compared with a training.
        # A node has 512 GB of DDR5 for each of two processors (docs.alcf.anl.gov, Aurora machine overview), the machine
        # of 10,624 nodes 5.95 PB/s to it (Intel at ISC 2023).
        "max1550": Gpu(
            name="Data Center GPU Max 1550, one tile of 64 GB",
            family="xpu",
            memory_gib=64.0,
            peak_tflops=419.4,
            bandwidth=1.64,
            memory_efficiency=0.61,
            link=105.0,
            network=16.7,
            per_host=12,
            multiprocessors=64,
            product_efficiency=0.525,
            attention_efficiency=0.25,
            host_link=27.0,
            host_bandwidth=23.0,  # 560 GB/s for twelve, without the processors' HBM
            host_memory_gib=1024.0,
        ),
        # No source was found for the memory of a usual host, or for its way there: as the A100's of 40 GB.
        "ascend910": Gpu(
            name="Ascend 910 32 GB",
            family="npu",
            memory_gib=32.0,
            peak_tflops=256.0,
            bandwidth=1.2,
            link=30.0,
            network=12.5,
            host_link=_PCIE_4,
            host_bandwidth=25.0,
            host_memory_gib=1024.0,
            multiprocessors=32,
            product_efficiency=0.60,
            attention_efficiency=0.35,
        ),
        # 910B1 in an Atlas 800T A2. Huawei publishes no data sheet. From a public `npu-smi` (arthurchiao.art, "GPU
        # advanced notes 2"): 64 GB, 24 cores at 1.8 GHz, which multiply 16 x 16 x 16 in a cycle (HPCA 2021), 354
        # TFLOP/s, and a card of 200 Gb/s each. Each pair of eight is linked by HCCS, 392 GB/s in both directions in all
        # (there, "GPU data sheets"). torch_npu reports 60.97 GiB. Measured (gameofdimension/limulidae): products 328
        # TFLOP/s where an A800 reaches 286 of 312; all-reduces of 2, 4 and 8 18, 45 and 126 GB/s on the links. Memory
        # bandwidth is that of a die of the 910C (arXiv:2506.12708). 910B2 to B4 differ in cores and clock: give
        # peak_theoretical_tflops. The host of that `npu-smi` has four Kunpeng 920 and 24 DIMMs of 64 GB of DDR4. No
        # source was found for their speed and for the link to them: as the A100's.
        "ascend910b": Gpu(
            name="Ascend 910B 64 GB",
            family="npu",
            memory_gib=60.97,
            peak_tflops=354.0,
            bandwidth=1.6,
            link=196.0,
            mesh=True,
            link_efficiency=0.62,
            network=25.0,
            host_link=_PCIE_4,
            host_bandwidth=25.0,
            host_memory_gib=1536.0,
            multiprocessors=24,
            product_efficiency=0.80,
            attention_efficiency=0.35,
        ),
    }
)
"""Value of `--gpu-type` -> the GPU."""

CPU_CORE = Gpu(
    name="CPU core",
    family="cpu",
    memory_gib=0.0,
    peak_tflops=0.1,
    bandwidth=0.01,
    link=1.0,
    network=1.0,
    host_link=10.0,  # of no use: a CPU has nowhere to offload to
    host_bandwidth=10.0,
    host_memory_gib=0.0,
    multiprocessors=1,
    product_efficiency=0.7,
    attention_efficiency=0.3,
    kernel_seconds=2e-5,
    collective_seconds=3e-4,
)
"""Rough figures of one core of a server, good enough to choose which layouts to measure. Its memory is the host's."""
