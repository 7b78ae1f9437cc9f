"""The device of a rank: DeepSpeed's accelerator, and the communication library that belongs to it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import torch
from deepspeed.accelerator import get_accelerator

from neox.devices import FAST_PATHS, family_has
from neox.errors import LaunchError
from neox.launch.hosts.vendors import VENDORS, refused_backend, unused_devices
from neox.ops import device_family, has_fast_path
from neox.plan import RunPlan
from neox.plan.devices.compiled import compiles
from neox.plan.devices.fast_paths import path_choices


def choose_device(local_rank: int) -> torch.device:
    """Return this rank's device and make it the current one.

    DeepSpeed chooses the kind of accelerator (`DS_ACCELERATOR`, else what torch finds), and moves the model there. If a
    scheduler shows every rank one device of its own, that is device 0, for DeepSpeed as well (`LOCAL_RANK`).

    Raises:
        LaunchError: This host has too few accelerators, or some that torch or DeepSpeed does not use.
    """
    accelerator = get_accelerator()
    kind = device_kind()
    host = socket.gethostname()
    if kind == "cpu":
        problem = unused_devices(os.environ)
        if problem is not None:
            raise LaunchError(f"{host} has {problem}")
        return torch.device("cpu")
    if kind == "mps":
        raise LaunchError(f"DeepSpeed trains on no Apple GPU over several steps ({host}): set DS_ACCELERATOR=cpu")
    if kind == "npu" and "ASCEND_HOME_PATH" not in os.environ:
        raise LaunchError(
            f"ASCEND_HOME_PATH is not set on {host}, and DeepSpeed asks for it: before the start, "
            "`source /usr/local/Ascend/ascend-toolkit/set_env.sh`"
        )
    count = accelerator.device_count()
    variables = accelerator.visible_devices_envs()
    if count == 1 and _has_own_device(os.environ, variables[0]):
        local_rank = 0
        os.environ["LOCAL_RANK"] = "0"
    if local_rank >= count:
        raise LaunchError(
            f"rank with LOCAL_RANK {local_rank} finds {count} devices of torch.{kind} on {host}; "
            f"start fewer ranks per host (num_gpus), or look at {' and '.join(variables)} and at the driver"
        )
    accelerator.set_device(local_rank)
    return torch.device(accelerator.device_name(local_rank))


def _has_own_device(environment: Mapping[str, str], variable: str) -> bool:
    """Return whether the device that this rank sees is shown to no other rank of the host.

    Args:
        environment: Variables of this process.
        variable: Name of the one that shows devices.
    """
    devices = environment.get(variable, "")
    if "LOCAL_SIZE" in environment:  # launchers that show the same devices to all ranks; ours divides instances of MIG
        return devices.startswith("MIG-")
    is_one = bool(devices) and "," not in devices
    return is_one or "LOCAL_WORLD_SIZE" not in environment  # torchrun sets the latter, and shows all


def choose_backend(asked: str, device: torch.device) -> str:
    """Return the backend of torch.distributed: gloo on CPUs; elsewhere the one asked for, by default the accelerator's.

    Args:
        asked: Value of `distributed_backend`.
        device: Device of this rank.

    Raises:
        LaunchError: The device cannot communicate over the backend asked for.
    """
    if device.type == "cpu":
        return "gloo"
    if asked == "auto":
        backend: str = get_accelerator().communication_backend_name()
        return backend
    vendors = [vendor for vendor in VENDORS if vendor.accelerator == device.type]
    refusals = [refused_backend(asked, vendor) for vendor in vendors]
    if refusals and None not in refusals:
        raise LaunchError(f"distributed_backend: {refusals[0]}")
    return asked


def other_paths(plan: RunPlan, device: torch.device) -> list[str]:
    """Return which of the run's computations take another path on this rank's device than the launcher planned.

    Args:
        plan: The run.
        device: Device of this rank.
    """
    if plan.device_family is None:
        return []
    lines = []
    for choice in path_choices(plan, plan.device_family):
        path = FAST_PATHS[choice.name]
        planned = family_has(plan.device_family, choice.name)
        found = has_fast_path(choice.name, device)
        if choice.is_ruled_out or (choice.name == "compiled_layers" and compiles(plan.config, None)):
            continue
        if planned and not found:
            why = f"this rank computes on {device_family(device.type) or device.type}"
            if device_family(device.type) == plan.device_family:
                why = f"{path.package} is not installed" if path.package else "this rank's torch lacks it"
            lines.append(f"{choice.name} ({choice.use}) was planned, but {why}: {path.elsewhere or 'refused'} instead")
        elif found and not planned:
            lines.append(f"{choice.name} ({choice.use}) was not planned, but this rank's device has it and takes it")
    return lines


def device_kind() -> str:
    """Return the kind of device that this process computes on, as torch names it: `cpu`, `cuda`, `npu`, `xpu`."""
    return str(get_accelerator().device_name())


def synchronize() -> None:
    """Wait until the device has done everything that was queued."""
    get_accelerator().synchronize()
