"""Devices that ranks run on: a GPU, or a share of a host's main memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from neox.config.neox_config import NeoXConfig
from neox.devices import GPUS, DeviceFamily, Gpu
from neox.plan.memory import MemoryPlan, fullest_stage, stage_memory
from neox.plan.memory.inference import inference_bytes
from neox.plan.run_plan import RunPlan

MIB = 2**20
GIB = 2**30
# Reserved for the CUDA context, communication buffers and fragmentation: these bytes, and a fraction of the rest.
RESERVE_BYTES = 2 * GIB
RESERVE_PART = 0.05
# Main memory of a process of torch and DeepSpeed before it holds a model (measured: 0.25 GiB).
PROCESS_BYTES = GIB // 4
# Dense bf16 peak of one H100 SXM, assumed in 16 bits if peak_theoretical_tflops is not given.
ASSUMED_PEAK_TFLOPS = 989.0
# Size of main memory that is not known, which counts as enough.
_UNKNOWN_SIZE = 2**63
# Largest relative difference of two GPUs' memory that counts as the same.
_SAME_MEMORY = 0.05
# GPUs of a host of which no kind is named.
GPUS_OF_HOST = 8


class MainMemory(NamedTuple):
    """Main memory of its host that a rank on a GPU may take for what it offloads.

    Attributes:
        size: Bytes of an equal share, without those of its process.
        source: Text that says where the size comes from.
        ranks: Ranks that share the main memory of a host.
        assumed: Whether nobody gave or measured it.
    """

    size: int
    source: str
    ranks: int
    assumed: bool = False


@dataclass(frozen=True)
class Device:
    """What one rank runs on, as far as its memory and speed are known.

    Attributes:
        name: Name in messages, such as `a GPU of 80.0 GiB`.
        size_key: Key that sets its size.
        source: Text that says where its size comes from.
        size: Its memory in bytes.
        usable: Bytes that it leaves to a rank.
        shared: Whether the ranks of a host share its memory, so that more ranks there do not help.
        peak_tflops: Peak of its arithmetic; None if nothing is assumed.
        peak_source: Text that says where the peak comes from.
        family: Kind of device in the table of fast paths.
        assumed: Whether nobody gave or measured its size.
        main_memory: What a rank on a GPU may offload; None if it is not known, and for CPUs, which `size` is about.
    """

    name: str
    size_key: str
    source: str
    size: int
    usable: int
    shared: bool
    peak_tflops: float | None
    peak_source: str
    family: DeviceFamily
    assumed: bool = False
    main_memory: MainMemory | None = None

    def holds(self, memory: MemoryPlan) -> bool:
        """Return whether a rank fits: on the device, and with what it offloads in main memory."""
        return memory.needed(on_cpu=self.shared) <= self.usable and not self.lacks_main_memory(memory)

    def lacks_main_memory(self, memory: MemoryPlan) -> bool:
        """Return whether a rank fits on the device, but offloads more than its share of main memory.

        Copies of background saves are left out: the first data rank makes more than others (see `host_problem`).
        """
        if self.main_memory is None or memory.host == 0:
            return False
        return memory.needed(on_cpu=self.shared) <= self.usable and memory.host > self.main_memory.size


def gpu_device(
    plan: RunPlan,
    size: float | None = None,
    family: DeviceFamily | None = None,
    *,
    ranks_of_host: int | None = None,
    available: int | None = None,
) -> Device:
    """Return a GPU of a size in bytes, by default the size of `gpu_memory_gib` or of the kind in `gpu_type`.

    Args:
        plan: The plan.
        size: Its memory.
        family: Kind of device that the hosts have; None if they were not asked, so that `gpu_type` says it.
        ranks_of_host: Ranks that share the main memory of a host; by default as many as its GPUs.
        available: Bytes of main memory that each host has available, unless `host_memory_gib` says how many to count
            with. By default those of the usual host of `gpu_type`.
    """
    config = plan.config
    kind = _gpu_of_type(config)
    name = ""
    assumed = False
    if size is not None:
        source = "gpu_memory_gib: the smallest GPU of this machine"
    elif kind is not None and not _wins_over_type(config, "gpu_memory_gib"):
        size = kind.memory_gib * GIB
        source = _type_and_source(config)
        name = f" ({kind.name})"
    else:
        size = config.runner.gpu_memory_gib * GIB
        source = f"gpu_memory_gib: {config.source('gpu_memory_gib')}"
        assumed = not config.given("gpu_memory_gib")
    peak, peak_source = _gpu_peak(plan, kind)
    return Device(
        name=f"a GPU of {size / GIB:.1f} GiB{name}",
        size_key="gpu_memory_gib",
        source=source,
        size=int(size),
        usable=usable_bytes(size),
        shared=False,
        peak_tflops=peak,
        peak_source=peak_source,
        family=family or (kind.family if kind is not None else "cuda"),
        assumed=assumed,
        main_memory=_main_memory(plan, kind, ranks_of_host, available),
    )


def device_of_kind(plan: RunPlan, kind: Gpu) -> Device:
    """Return a GPU of a kind, with its share of the main memory of its usual host, whatever `gpu_type` says."""
    device = gpu_device(plan, kind.memory_gib * GIB)
    return replace(device, main_memory=_main_memory(plan, kind, None, None))


def _main_memory(plan: RunPlan, kind: Gpu | None, ranks: int | None, available: int | None) -> MainMemory | None:
    """Return what a rank on a GPU may offload: its share of its host's main memory. Arguments are `gpu_device`'s.

    Of the usual host of a kind it is the share of one GPU, however many are used: hosts are rented by the GPU.
    """
    if ranks is None:
        ranks = min(plan.grid.world_size, kind.per_host if kind is not None else GPUS_OF_HOST)
    if plan.config.runner.host_memory_gib is not None:
        size = int(plan.config.runner.host_memory_gib * GIB)
        source = f"host_memory_gib: {plan.config.source('host_memory_gib')}"
    elif available is not None:
        size = available
        source = "host_memory_gib: what is available now"
    elif kind is not None:
        share = int(kind.main_memory_gib * GIB)
        source = f"host_memory_gib: a GPU's share of the {kind.host_memory_gib:,.0f} GiB of a usual host of {kind.name}"
        return MainMemory(max(0, share - PROCESS_BYTES), source, ranks, assumed=True)
    else:
        return None
    return MainMemory(max(0, size // ranks - PROCESS_BYTES), source, ranks)


def likely_gpu(config: NeoXConfig) -> str:
    """Return `gpu_type`, or the key of the GPU that fits `gpu_memory_gib` and `peak_theoretical_tflops` best."""
    if config.runner.gpu_type is not None:
        return config.runner.gpu_type
    memory = config.runner.gpu_memory_gib
    peak = config.logging.peak_theoretical_tflops or ASSUMED_PEAK_TFLOPS

    def distance(name: str) -> tuple[float, float]:
        gpu = GPUS[name]
        of_memory = abs(gpu.memory_gib - memory) / memory
        if of_memory <= _SAME_MEMORY:
            of_memory = 0.0
        return of_memory, abs(gpu.peak_tflops - peak)

    return min(GPUS, key=distance)


def _gpu_of_type(config: NeoXConfig) -> Gpu | None:
    kind = config.runner.gpu_type
    return None if kind is None else GPUS[kind]


def _wins_over_type(config: NeoXConfig, key: str) -> bool:
    """Return whether a key with one figure of a GPU is given, and not only in a file while the kind is not."""
    if not config.given(key):
        return False
    return config.source(key).is_command_line or not config.source("gpu_type").is_command_line


def _gpu_peak(plan: RunPlan, kind: Gpu | None) -> tuple[float | None, str]:
    """Return the peak of a GPU in TFLOP/s, and the text that says where it comes from.

    Known peaks are of 16 bits; in fp32 only what the key gives is a peak.
    """
    config = plan.config
    key = "peak_theoretical_tflops"
    given = config.logging.peak_theoretical_tflops
    if plan.precision == "fp32":
        return given, f"{key}: {config.source(key)}"
    if kind is not None and not _wins_over_type(config, key):
        return kind.peak_tflops, _type_and_source(config)
    if given is None:
        return ASSUMED_PEAK_TFLOPS, f"{key}: {config.source(key)}"
    return given, f"{key}: {config.source(key)}"


def _type_and_source(config: NeoXConfig) -> str:
    return f"gpu_type {config.runner.gpu_type}: {config.source('gpu_type')}"


def usable_bytes(gpu_bytes: float) -> int:
    """Return the bytes that a GPU of this size (bytes) leaves to a run."""
    return max(0, int((gpu_bytes - RESERVE_BYTES) * (1 - RESERVE_PART)))


def host_device(plan: RunPlan, ranks: Sequence[int], host: str, available: int | None, *, training: bool) -> Device:
    """Return the share that the largest of a host's CPU ranks has of its main memory.

    Args:
        plan: The plan.
        ranks: The ranks on the host.
        host: Name of the host.
        available: Bytes that the host has available, unless `host_memory_gib` says how many to count with; None if
            they are not known, which counts as enough.
        training: Whether the model is trained, not only run.
    """
    config = plan.config
    if config.runner.host_memory_gib is not None:
        size = int(config.runner.host_memory_gib * GIB)
        source = str(config.source("host_memory_gib"))
    elif available is not None:
        size = available
        source = "what is available now"
    else:
        size = _UNKNOWN_SIZE
        source = "not known"
    needs = [rank_bytes(plan, rank, training=training) for rank in ranks]
    free = size - len(needs) * PROCESS_BYTES
    name = f"{host} with {size / GIB:.1f} GiB"
    if size == _UNKNOWN_SIZE:
        name = f"{host} with enough memory"
    if len(needs) > 1:
        name += f", which {len(needs)} ranks share"
    return Device(
        name=name,
        size_key="host_memory_gib",
        source=f"host_memory_gib: {source}",
        size=size,
        usable=max(0, free * max(needs) // sum(needs)),
        shared=True,
        peak_tflops=config.logging.peak_theoretical_tflops,
        peak_source=f"peak_theoretical_tflops: {config.source('peak_theoretical_tflops')}",
        family="cpu",
        assumed=size == _UNKNOWN_SIZE,
    )


def rank_bytes(plan: RunPlan, rank: int, *, training: bool) -> int:
    """Return the estimated bytes of one CPU rank, without its interpreter and libraries."""
    if not training:
        return inference_bytes(plan, plan.grid.pp_size, plan.grid.tp_size)
    return rank_memory(plan, rank, on_cpu=True).needed(on_cpu=True)


def rank_memory(plan: RunPlan, rank: int, *, on_cpu: bool) -> MemoryPlan:
    """Return the estimate of one rank in training."""
    stage, data_rank, _ = plan.grid.coordinates(rank)
    run = plan.workload
    if on_cpu:
        run = plan.workload_on("cpu")
    return stage_memory(run, plan.stages[stage], data_rank)


def memory_on(plan: RunPlan, device: Device) -> MemoryPlan:
    """Return the estimate of the fullest rank in training on its device."""
    return fullest_stage(plan.workload_on(device.family), plan.stages)


def hosts_hold(plan: RunPlan, share: MainMemory) -> bool:
    """Return whether the ranks of each host have room together for what they offload.

    The first and the last pipeline stage offload more than an equal share, and those between them less.
    """
    of_stage = [stage_memory(plan.workload, stage).host for stage in plan.stages]
    world = plan.grid.world_size
    for first in range(0, world, share.ranks):
        ranks = range(first, min(first + share.ranks, world))
        offloaded = sum(of_stage[plan.grid.coordinates(rank)[0]] for rank in ranks)
        if offloaded > share.size * len(ranks):
            return False
    return True


def host_problem(plan: RunPlan, ranks: Sequence[int], host: str, available: int | None) -> str | None:
    """Return a message if what GPU ranks of a host offload, or copy to save it, does not fit in its main memory.

    Args:
        plan: The plan.
        ranks: The ranks on the host.
        host: Name of the host.
        available: Bytes that the host has available, unless `host_memory_gib` says how many to count with.
    """
    if plan.config.runner.host_memory_gib is not None:
        available = int(plan.config.runner.host_memory_gib * GIB)
    memories = [rank_memory(plan, rank, on_cpu=False) for rank in ranks]
    offloaded = sum(memory.host for memory in memories)
    copied = sum(memory.copies for memory in memories)
    needed = offloaded + copied + len(ranks) * PROCESS_BYTES
    if offloaded + copied == 0 or available is None or needed <= available:
        return None
    uses = []
    ways_out = []
    if offloaded:
        uses.append(f"offload {gib(offloaded)}")
        ways_out.append("use more hosts, or offload less")
    if copied:
        uses.append(f"copy for background saves {gib(copied)}")
        ways_out.append("save without async_save")
    return (
        f"{host}: {len(ranks)} ranks {' and '.join(uses)}, {gib(needed)} with their processes, to main memory of which "
        f"{gib(available)} are available; {', or '.join(ways_out)}"
    )


def gib(count: float) -> str:
    """Return a number of bytes in GiB, small ones in MiB."""
    if count and count < GIB / 10:
        return f"{count / MIB:.1f} MiB"
    return f"{count / GIB:.1f} GiB"
