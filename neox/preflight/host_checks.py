"""Checks of hosts that have been asked: what they multiply natively, and whether the run fits in their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from neox.errors import ConfigError, LaunchError
from neox.launch.hosts.doctor import HostReport
from neox.launch.hosts.vendors import VENDORS, Vendor, can_build_kernels, present_devices, refused_backend
from neox.plan import Capabilities, RunPlan, host_device
from neox.plan.devices.device import host_problem
from neox.preflight.checks import memory_problems, nvme_problems


def capabilities_of(reports: Sequence[HostReport]) -> Capabilities:
    """Return what all hosts multiply natively."""
    return Capabilities.of_hosts([report.answer["formats"] for report in reports])


def check_memory(plan: RunPlan, reports: Sequence[HostReport], *, training: bool) -> None:
    """Compare what the ranks need with the main memory of every host, and their files with its disk.

    Args:
        plan: The plan.
        reports: Report of each host, in the order of the ranks.
        training: Whether the model is trained, not only run.

    Raises:
        LaunchError: A host has too little of either.
    """
    for problem in hosts_without_room(plan, reports, training=training).values():
        raise LaunchError(f"nothing was started: {problem}")


def check_compilers(plan: RunPlan, reports: Sequence[HostReport], environment: Mapping[str, str]) -> None:
    """Check that every host can build the kernels of DeepSpeed that the run needs.

    Args:
        plan: The plan.
        reports: Report of each host; none if all ranks are on this machine.
        environment: Variables of the ranks.

    Raises:
        LaunchError: A host has GPUs, but no nvcc.
    """
    keys = plan.config.deepspeed.zero_optimization.quantizing_keys
    if not keys:
        return
    lacking = [report.host.name for report in reports if not report.answer.get("builds_kernels", True)]
    if not reports and not can_build_kernels(environment):
        lacking = ["this machine"]
    if lacking:
        raise LaunchError(
            f"nothing was started: {keys[0]}: DeepSpeed builds its kernel with nvcc, which is missing on "
            f"{', '.join(lacking)} (PATH, CUDA_HOME): install CUDA's toolkit there, or remove the key"
        )


def check_backend(plan: RunPlan, reports: Sequence[HostReport], environment: Mapping[str, str]) -> None:
    """Check that the accelerators of every host can communicate over the backend that was asked for.

    Args:
        plan: The plan.
        reports: Report of each host; none if all ranks are on this machine, or no host was asked.
        environment: Variables of the ranks.

    Raises:
        ConfigError: They cannot.
    """
    backend = plan.config.runner.distributed_backend
    by_host: dict[str, Vendor] = {}
    for report in reports:
        for vendor in VENDORS:
            if report.answer["accelerators"] and report.answer.get("vendor") == vendor.name:
                by_host[report.host.name] = vendor
    vendor_here, _ = present_devices()
    if not reports and vendor_here is not None and not vendor_here.hides_all(environment):
        by_host["this machine"] = vendor_here
    for host, vendor in by_host.items():
        refusal = refused_backend(backend, vendor)
        if refusal is not None:
            raise ConfigError([plan.config.problem("distributed_backend", f"{refusal} ({host})")])


def hosts_without_room(plan: RunPlan, reports: Sequence[HostReport], *, training: bool) -> dict[str, str]:
    """Return the names of the hosts with too little main memory or disk for their ranks, with the reasons.

    Args:
        plan: The plan.
        reports: Report of each host, in the order of the ranks.
        training: Whether the model is trained, not only run.
    """
    reasons = {}
    first_rank = 0
    for report in reports:
        ranks = range(first_rank, first_rank + len(report.host.slots))
        first_rank = ranks.stop
        problem = _host_problem(plan, ranks, report, training=training)
        if problem is not None:
            reasons[report.host.name] = problem
    return reasons


def _host_problem(plan: RunPlan, ranks: range, report: HostReport, *, training: bool) -> str | None:
    """Return why ranks do not fit on their host; None if they do."""
    name = report.host.name
    available = report.answer["memory"]
    problems = []
    if training:
        problems = nvme_problems(plan, ranks, name, report.answer["paths"])
    if not problems and report.answer["accelerators"] == 0:
        device = host_device(plan, ranks, name, available, training=training)
        problems = memory_problems(plan, device, training=training)
    if problems:
        return str(problems[0])
    if report.answer["accelerators"] and training:
        return host_problem(plan, ranks, name, available)
    return None
