"""Placement of ranks on hosts: by a hostfile, by counts, or by the accelerators of this machine."""

from __future__ import annotations

import argparse
import os
import subprocess
from dataclasses import dataclass

from neox.config import NeoXConfig
from neox.config.sections.runner import RunnerConfig
from neox.errors import ConfigError, LaunchError
from neox.launch.hosts import check_host_name, is_this_machine, read_hostfile, select_hosts
from neox.launch.machine import visible_accelerators
from neox.launch.spec import Host, SlotId
from neox.plan import static_problems
from neox.problems import DEFAULT, Source

_RANKS_PER_CORE = 4
_MAX_PLANNED_RANKS = 2**20
ONE_CPU_RANK = "one CPU rank: no accelerator here, and neither num_gpus nor a hostfile is given"


@dataclass(frozen=True)
class Placement:
    """Hosts and slots of a run.

    Attributes:
        hosts: The chosen hosts, in rank order.
        why: What decided the choice, for messages.
        accelerators: Number of GPUs of this machine.
        assumed: Whether a dry run only imagines the hosts.
    """

    hosts: tuple[Host, ...]
    why: str
    accelerators: int
    assumed: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(host.slots) for host in self.hosts)

    @property
    def is_local(self) -> bool:
        """Whether every rank runs on this machine."""
        return len(self.hosts) == 1 and is_this_machine(self.hosts[0].name)


def choose_hosts(config: NeoXConfig, arguments: argparse.Namespace) -> tuple[Placement, list[str]]:
    """Choose the hosts of a run from the configuration and the command line.

    Args:
        config: The configuration.
        arguments: The command line. `hosts` and `gpus` make a dry run imagine so many hosts, with so many GPUs each.

    Returns:
        The placement, and warnings. In a dry run without a hostfile, a problem becomes a warning, and a number of ranks
        is assumed.

    Raises:
        ConfigError: Ranks cannot be placed; with the configuration's other problems.
        LaunchError: Slurm does not answer.
    """
    if arguments.hosts or arguments.gpus:
        return _imagine_hosts(arguments.hosts or 1, arguments.gpus or config.runner.num_gpus or 8), []
    try:
        placement = place_ranks(config.runner, config.source("hostfile"))
        if not arguments.dry_run:
            check_local_devices(placement)
        elif placement.why == ONE_CPU_RANK and _model_copy_size(config) > 1:
            return _assume_ranks(config, "hosts, num_gpus and global_num_gpus are not given, and there is no GPU here")
        return placement, _overruled_counts(config, placement)
    except (ConfigError, LaunchError) as error:
        if arguments.dry_run and _hostfile(config.runner, config.source("hostfile")) is None:
            return _assume_ranks(config, str(error))
        if isinstance(error, LaunchError):
            raise
        raise ConfigError([*static_problems(config), *error.problems]) from None


def _imagine_hosts(count: int, gpus: int) -> Placement:
    """Return the placement on hosts that need not exist."""
    if count * gpus > _MAX_PLANNED_RANKS:
        raise ConfigError(f"--hosts and --gpus: at most {_MAX_PLANNED_RANKS:,} ranks can be planned")
    slots = tuple(range(gpus))
    hosts = tuple(Host(f"host{number}", slots) for number in range(count))
    return Placement(hosts, "--hosts and --gpus", 0, assumed=True)


def place_ranks(runner: RunnerConfig, source: Source = DEFAULT) -> Placement:
    """Choose hosts and slots.

    The first of these that is given decides: the hostfile (of `-H`, else of `DLTS_HOSTFILE`, else of `hostfile` in a
    file); the slurm allocation under `launcher: slurm`; `include`; `global_num_gpus`; `num_gpus`; this machine's GPUs;
    else one CPU rank.

    Args:
        runner: The configuration's keys about hosts.
        source: Source of `hostfile`.

    Returns:
        The placement.

    Raises:
        ConfigError: More is asked for than there is, or the hostfile cannot be read.
        LaunchError: Slurm does not answer.
    """
    visible = visible_accelerators()
    if (named := _hostfile(runner, source)) is not None:
        path, what = named
        hosts = select_hosts(
            read_hostfile(path),
            include=runner.include,
            exclude=runner.exclude,
            num_nodes=runner.num_nodes,
            num_gpus=runner.num_gpus,
        )
        placement = Placement(_with_local_devices(hosts, visible), f"hostfile {path} of {what}", len(visible))
        if runner.global_num_gpus and runner.global_num_gpus != placement.world_size:
            raise ConfigError(
                f"global_num_gpus is {runner.global_num_gpus}, but the chosen hosts of {path} have "
                f"{placement.world_size} slots: remove global_num_gpus, or change the hostfile"
            )
        return placement
    if runner.launcher == "slurm" and "SLURM_JOB_NODELIST" in os.environ:
        hosts = select_hosts(_slurm_hosts(runner.num_gpus), num_nodes=runner.num_nodes)
        return Placement(hosts, "the slurm allocation", len(visible))
    if runner.num_nodes > 1:
        raise ConfigError(f"num_nodes is {runner.num_nodes}, which needs a hostfile (hostfile: PATH, or -H PATH)")
    if runner.exclude or (runner.include and "@" in runner.include):
        raise ConfigError("include/exclude of hosts need a hostfile (hostfile: PATH, or -H PATH)")
    if runner.include:
        every_slot = tuple(range(len(visible) or 1024))
        hosts = select_hosts([Host("localhost", every_slot)], include=runner.include)
        return Placement(_with_local_devices(hosts, visible), "include", len(visible))
    ranks, why = _count_ranks(runner, len(visible))
    return Placement(_with_local_devices((Host("localhost", tuple(range(ranks))),), visible), why, len(visible))


def _hostfile(runner: RunnerConfig, source: Source) -> tuple[str, str] | None:
    """Return the hostfile and what names it; None without one."""
    variable = os.environ.get("DLTS_HOSTFILE")
    if variable and not source.is_command_line:
        return variable, "DLTS_HOSTFILE"
    if runner.hostfile is None:
        return None
    return runner.hostfile, "-H" if source.is_command_line else str(source)


def _slurm_hosts(num_gpus: int | None) -> tuple[Host, ...]:
    """Return the hosts of the slurm allocation that this process runs in.

    Args:
        num_gpus: Number of slots on each host; None for the number of allocated GPUs.
    """
    allocated = os.environ.get("SLURM_GPUS_ON_NODE") or os.environ.get("SLURM_GPUS_PER_NODE") or 0
    count = num_gpus or int(allocated)
    if not count:
        raise ConfigError("slurm allocated no GPUs (SLURM_GPUS_ON_NODE): set num_gpus to the ranks on each host")
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"`{' '.join(command)}` failed ({error}): name the hosts in a hostfile") from None
    hosts = []
    for name in done.stdout.split():
        hosts.append(Host(check_host_name(name, "SLURM_JOB_NODELIST"), tuple(range(count))))
    return tuple(hosts)


def _count_ranks(runner: RunnerConfig, accelerators: int) -> tuple[int, str]:
    """Return the number of ranks on this machine, and what decided it."""
    if runner.global_num_gpus:
        return runner.global_num_gpus, "global_num_gpus"
    if runner.num_gpus:
        return runner.num_gpus, "num_gpus"
    if accelerators:
        return accelerators, "the accelerators of this machine"
    return 1, ONE_CPU_RANK


def _with_local_devices(hosts: tuple[Host, ...], visible: tuple[SlotId, ...]) -> tuple[Host, ...]:
    """Replace slots of this machine by devices. A slot is a position among the visible devices.

    Args:
        hosts: Hosts of the run.
        visible: Devices in `CUDA_VISIBLE_DEVICES`. Slots beyond them stay as they are.
    """
    result = []
    for host in hosts:
        slots = host.slots
        if is_this_machine(host.name):
            devices: dict[SlotId, SlotId] = dict(enumerate(visible))
            slots = tuple(devices.get(slot, slot) for slot in slots)
        result.append(Host(host.name, slots))
    return tuple(result)


def check_local_devices(placement: Placement) -> None:
    """Check that this machine has accelerators, or enough cores, for its ranks.

    Raises:
        ConfigError: There are fewer accelerators, or far fewer cores, than ranks.
    """
    cores = os.cpu_count() or 1
    for host in placement.hosts:
        ranks = len(host.slots)
        if not is_this_machine(host.name):
            continue
        if 0 < placement.accelerators < ranks:
            raise ConfigError(
                f"{ranks} ranks on {host.name} ({placement.why}), which has {placement.accelerators} "
                "accelerators: lower num_gpus, or hide the accelerators with CUDA_VISIBLE_DEVICES= for CPU ranks"
            )
        if not placement.accelerators and ranks > max(8, _RANKS_PER_CORE * cores):
            raise ConfigError(
                f"{ranks} CPU ranks on {host.name} ({placement.why}), which has {cores} cores and no accelerator: "
                "name the hosts in a hostfile (-H PATH), or add --dry-run to see the plan"
            )


def _overruled_counts(config: NeoXConfig, placement: Placement) -> list[str]:
    """Return a warning if `global_num_gpus` overrules another `num_gpus`."""
    if placement.why != "global_num_gpus" or config.runner.num_gpus in (None, config.runner.global_num_gpus):
        return []
    ignored = config.describe_setting("num_gpus")
    used = config.describe_setting("global_num_gpus")
    return [
        f"{ignored} has no effect: without a hostfile {used} counts the ranks; `--set global_num_gpus=None` unsets it"
    ]


def _model_copy_size(config: NeoXConfig) -> int:
    """Return the number of ranks that hold the model once, the fewest that can train it."""
    return max(1, config.parallelism.pipe_parallel_size) * config.parallelism.model_parallel_size


def _assume_ranks(config: NeoXConfig, why: str) -> tuple[Placement, list[str]]:
    """Return a placement with the configured number of ranks, else with one copy of the model, and a warning."""
    configured = config.runner.global_num_gpus or config.runner.num_gpus
    if configured:
        count = configured
        warning = f"{why}; {count} ranks are assumed"
    else:
        count = _model_copy_size(config)
        warning = f"{why}; {count} ranks are assumed, one copy of the model"
    visible = visible_accelerators()
    hosts = _with_local_devices((Host("localhost", tuple(range(count))),), visible)
    return Placement(hosts, "assumed", len(visible), assumed=True), [warning]
