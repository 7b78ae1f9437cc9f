"""Placement of ranks on hosts: by a hostfile, by counts, or by the accelerators of this machine."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from neox.config import NeoXConfig
from neox.config.sections.runner import RunnerConfig
from neox.errors import ConfigError, LaunchError
from neox.launch.environment import environment_file
from neox.launch.hosts.hostfile import (
    check_host_name,
    is_this_machine,
    read_hostfile,
    refusal,
    resolves_to_this_machine,
    select_hosts,
)
from neox.launch.hosts.machine import visible_accelerators
from neox.launch.hosts.vendors import torch_problem
from neox.launch.spec import Host
from neox.plan import static_problems
from neox.problems import DEFAULT, Source

_RANKS_PER_CORE = 4
_MAX_CPU_RANKS = 8  # on a machine with few cores
_MAX_PLANNED_RANKS = 2**20
_GPUS_OF_IMAGINED_HOST = 8
_MAX_CPU_SLOTS = 1024  # that `include` may choose from


class ChosenBy(Enum):
    """What decided the hosts and slots of a run; the value is a text for messages."""

    HOSTFILE = "hostfile"
    SLURM = "the slurm allocation"
    INCLUDE = "include"
    GLOBAL_NUM_GPUS = "global_num_gpus"
    NUM_GPUS = "num_gpus"
    ACCELERATORS = "the accelerators of this machine"
    NOTHING = "one CPU rank: no accelerator here, and neither num_gpus nor a hostfile is given"
    DRY_RUN_FLAGS = "--hosts and --gpus"
    ASSUMPTION = "assumed"


@dataclass(frozen=True)
class Placement:
    """Hosts and slots of a run.

    Attributes:
        hosts: The chosen hosts, in rank order.
        chosen_by: What decided the choice.
        accelerators: Number of GPUs of this machine.
        hostfile: The hostfile and what names it, as `PATH of -H`; empty without one.
        spares: Hosts that may replace an unusable host.
    """

    hosts: tuple[Host, ...]
    chosen_by: ChosenBy
    accelerators: int
    hostfile: str = ""
    spares: tuple[Host, ...] = ()

    @property
    def why(self) -> str:
        """What decided the choice, for messages."""
        if self.chosen_by is ChosenBy.HOSTFILE:
            return f"hostfile {self.hostfile}"
        return self.chosen_by.value

    @property
    def assumed(self) -> bool:
        """Whether a dry run only imagines the hosts."""
        return self.chosen_by in (ChosenBy.DRY_RUN_FLAGS, ChosenBy.ASSUMPTION)

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
        arguments: The command line. Its `hosts` and `gpus` are numbers of hosts, and of GPUs each, to imagine.

    Returns:
        The placement, and warnings. In a dry run without a hostfile, a problem becomes a warning, and a number of ranks
        is assumed.

    Raises:
        ConfigError: Ranks cannot be placed; with the configuration's other problems.
        LaunchError: Slurm does not answer.
    """
    if not arguments.dry_run:
        _refuse_copies(os.environ)
    if arguments.hosts or arguments.gpus:
        gpus = arguments.gpus or config.runner.num_gpus or _GPUS_OF_IMAGINED_HOST
        return _imagine_hosts(arguments.hosts or 1, gpus), []
    source = config.source("hostfile")
    try:
        placement = place_ranks(config.runner, source)
        if not arguments.dry_run:
            check_local_devices(placement)
    except (ConfigError, LaunchError) as error:
        if arguments.dry_run and named_hostfile(config.runner, source) is None:
            return _assume_ranks(config, str(error))
        if isinstance(error, LaunchError):
            raise
        raise ConfigError([*static_problems(config), *error.problems]) from None
    nothing_given = placement.chosen_by is ChosenBy.NOTHING
    if arguments.dry_run and nothing_given and _model_copy_size(config) > 1:
        return _assume_ranks(config, "hosts, num_gpus and global_num_gpus are not given, and there is no GPU here")
    return placement, _overruled_counts(config, placement)


def _refuse_copies(environment: Mapping[str, str]) -> None:
    """Raise LaunchError if a launcher of ranks has started this command, which starts the ranks itself."""
    if "TORCHELASTIC_RUN_ID" in environment:
        starter = "torchrun"
    elif environment.get("SLURM_STEP_NUM_TASKS", "1") != "1" and environment.get("SLURM_PROCID", "0") != "0":
        starter = "srun, as one of several tasks"  # the first may also be the shell of `srun --pty`
    elif environment.get("OMPI_COMM_WORLD_RANK", "0") != "0":
        starter = "mpirun, as one of several"
    else:
        return
    raise LaunchError(f"deepy.py was started by {starter}: start it once, without that; it starts all ranks itself")


def _imagine_hosts(count: int, gpus: int) -> Placement:
    """Return the placement on hosts that need not exist."""
    if count * gpus > _MAX_PLANNED_RANKS:
        raise ConfigError(f"--hosts and --gpus: at most {_MAX_PLANNED_RANKS:,} ranks can be planned")
    slots = tuple(range(gpus))
    hosts = tuple(Host(f"host{number}", slots) for number in range(count))
    return Placement(hosts, ChosenBy.DRY_RUN_FLAGS, 0)


def place_ranks(runner: RunnerConfig, source: Source = DEFAULT) -> Placement:
    """Choose hosts and slots.

    The first of these that is given decides: the hostfile (that of `-H`, else of `DLTS_HOSTFILE`, else of `hostfile` in
    a file); the slurm allocation under `launcher: slurm`; `include`; `global_num_gpus`; `num_gpus`; this machine's
    GPUs; else one CPU rank.

    Args:
        runner: Keys of the configuration about hosts.
        source: Source of `hostfile`.

    Returns:
        The placement.

    Raises:
        ConfigError: More is asked for than there is, or the hostfile cannot be read.
        LaunchError: Slurm does not answer.
    """
    named = named_hostfile(runner, source)
    if named is not None:
        return _place_by_hostfile(runner, *named)
    if runner.launcher == "slurm" and "SLURM_JOB_NODELIST" in os.environ:
        hosts = select_hosts(_slurm_hosts(runner.num_gpus), num_nodes=runner.num_nodes)
        return Placement(hosts, ChosenBy.SLURM, _count_accelerators())
    return _place_here(runner)


def named_hostfile(runner: RunnerConfig, source: Source = DEFAULT) -> tuple[str, str] | None:
    """Return the hostfile's path and what names it; None without a hostfile.

    Args:
        runner: Keys of the configuration about hosts.
        source: Source of `hostfile`.
    """
    variable = os.environ.get("DLTS_HOSTFILE")
    if variable and not source.is_command_line:
        return variable, "DLTS_HOSTFILE"
    if runner.hostfile is None:
        return None
    return runner.hostfile, "-H" if source.is_command_line else str(source)


def hosts_of_file(runner: RunnerConfig, path: str) -> tuple[Host, ...]:
    """Return the hosts of a hostfile that a configuration selects. Raises ConfigError."""
    return select_hosts(
        read_hostfile(path),
        include=runner.include,
        exclude=runner.exclude,
        num_nodes=runner.num_nodes,
        num_gpus=runner.num_gpus,
    )


def _place_by_hostfile(runner: RunnerConfig, path: str, named_by: str) -> Placement:
    hosts = hosts_of_file(runner, path)
    spares = tuple(host for host in hosts if host.spare)
    hosts = tuple(host for host in hosts if not host.spare)
    if len(hosts) == 1 and not is_this_machine(hosts[0].name) and resolves_to_this_machine(hosts[0].name):
        hosts = (replace(hosts[0], name="localhost"),)
    placement = Placement(hosts, ChosenBy.HOSTFILE, _count_accelerators(), f"{path} of {named_by}", spares)
    if runner.global_num_gpus and runner.global_num_gpus != placement.world_size:
        raise refusal(
            f"global_num_gpus is {runner.global_num_gpus}, but the chosen hosts of {path} have "
            f"{placement.world_size} slots: remove global_num_gpus, or change the hostfile",
            "global_num_gpus",
        )
    return placement


def _place_here(runner: RunnerConfig) -> Placement:
    """Place all ranks on this machine."""
    if runner.num_nodes > 1:
        raise refusal(
            f"num_nodes is {runner.num_nodes}, which needs a hostfile (hostfile: PATH, or -H PATH)", "num_nodes"
        )
    if runner.exclude or (runner.include and "@" in runner.include):
        raise refusal("include/exclude of hosts need a hostfile (hostfile: PATH, or -H PATH)", "include", "exclude")
    accelerators = _count_accelerators()
    if runner.include:
        every_slot = tuple(range(accelerators or _MAX_CPU_SLOTS))
        hosts = select_hosts([Host("localhost", every_slot)], include=runner.include)
        chosen_by = ChosenBy.INCLUDE
    else:
        ranks, chosen_by = _count_ranks(runner, accelerators)
        hosts = (Host("localhost", tuple(range(ranks))),)
    return Placement(hosts, chosen_by, accelerators)


def _slurm_hosts(num_gpus: int | None) -> tuple[Host, ...]:
    """Return the hosts of the slurm allocation that this process runs in.

    Args:
        num_gpus: Number of slots on each host; None for the number of allocated GPUs.
    """
    count = num_gpus or slurm_gpus()
    if not count:
        raise refusal(
            "slurm allocated no GPUs (SLURM_GPUS_ON_NODE): set num_gpus to the ranks on each host", "num_gpus"
        )
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"`{' '.join(command)}` failed ({error}): name the hosts in a hostfile") from None
    hosts = []
    for name in done.stdout.split():
        hosts.append(Host(check_host_name(name, "SLURM_JOB_NODELIST"), tuple(range(count))))
    return tuple(hosts)


def slurm_gpus() -> int:
    """Return the number of GPUs on each host of the slurm allocation that this process runs in; 0 if it has none."""
    allocated = os.environ.get("SLURM_GPUS_ON_NODE") or os.environ.get("SLURM_GPUS_PER_NODE") or "0"
    count = allocated.rpartition(":")[2]
    return int(count) if count.isdecimal() else 1  # `a100:8`, or `a100` for one


def _environment_of_ranks() -> dict[str, str]:
    """Return this process's environment with the variables of DeepSpeed's files, such as `DS_ACCELERATOR`."""
    return {**os.environ, **environment_file(os.environ)}


def _count_accelerators() -> int:
    """Return the number of accelerators that ranks on this machine may use."""
    return len(visible_accelerators(_environment_of_ranks()))


def _count_ranks(runner: RunnerConfig, accelerators: int) -> tuple[int, ChosenBy]:
    """Return the number of ranks on this machine, and what decided it."""
    if runner.global_num_gpus:
        return runner.global_num_gpus, ChosenBy.GLOBAL_NUM_GPUS
    if runner.num_gpus:
        return runner.num_gpus, ChosenBy.NUM_GPUS
    if accelerators:
        return accelerators, ChosenBy.ACCELERATORS
    return 1, ChosenBy.NOTHING


def check_local_devices(placement: Placement) -> None:
    """Check that this machine has accelerators that torch can use, or enough cores, for its ranks.

    Raises:
        ConfigError: There are fewer accelerators, or far fewer cores, than ranks.
        LaunchError: torch cannot use the accelerators.
    """
    cores = os.cpu_count() or 1
    for host in placement.hosts:
        ranks = len(host.slots)
        if not is_this_machine(host.name):
            continue
        problem = torch_problem(_environment_of_ranks())
        if problem is not None:
            raise LaunchError(f"{host.name} has {problem}")
        if 0 < placement.accelerators < ranks:
            raise refusal(
                f"{ranks} ranks on {host.name} ({placement.why}), which has {placement.accelerators} "
                "accelerators: lower num_gpus, or set DS_ACCELERATOR=cpu for CPU ranks",
                "num_gpus",
            )
        if not placement.accelerators and ranks > max(_MAX_CPU_RANKS, _RANKS_PER_CORE * cores):
            raise refusal(
                f"{ranks} CPU ranks on {host.name} ({placement.why}), which has {cores} cores and no accelerator: "
                "name the hosts in a hostfile (-H PATH), or add --dry-run to see the plan",
                "hostfile",
            )


def _overruled_counts(config: NeoXConfig, placement: Placement) -> list[str]:
    """Return a warning if `global_num_gpus` overrules another `num_gpus`."""
    if placement.chosen_by is not ChosenBy.GLOBAL_NUM_GPUS:
        return []
    if config.runner.num_gpus in (None, config.runner.global_num_gpus):
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
    hosts = (Host("localhost", tuple(range(count))),)
    return Placement(hosts, ChosenBy.ASSUMPTION, _count_accelerators()), [warning]
