"""Target of a ladder: the batch that its files were made for, the GPUs that it is planned on, and where it is trained.

The small runs scale the target's batch, so it must not follow from the hosts that happen to be here:

    batch    train_batch_size, else that of the GPUs that the files name: planned_num_gpus, global_num_gpus, their
             hostfile, num_gpus (`batch_to_plan`); only if they name none, that of the hosts
    plan     on the GPUs that the files name, else on the hosts of -H, else on those of `deepy.py` without it
    training on the hosts of -H, else on those of `deepy.py` without it, with the batch of the plan
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from neox.config import NeoXConfig
from neox.devices import GPUS
from neox.errors import ConfigError, LaunchError
from neox.launch.hosts.placement import Placement, hosts_of_file, named_hostfile
from neox.launch.status.run_status import duration
from neox.plan.batches.batch import STEPS, TOTAL
from neox.plan.devices.device import GPUS_OF_HOST
from neox.preflight.gpu_choice import batch_to_plan, gpus_to_plan
from tools.ladder.family import Family, largest_divisor, short
from tools.ladder.ladder_file import Ladder
from tools.sweep.command import unplanned_because
from tools.sweep.places import Place, find_places, places_on
from tools.sweep.planned_run import PlannedRun, config_of, placement_of, plan_runs
from tools.sweep.sweep_file import Sweep, SweepRun

TARGET = "target"
"""Name of the target's run."""


@dataclass(frozen=True)
class Target:
    """The target of a ladder.

    Attributes:
        planned: Its plan.
        batch: Keys that keep its batch on any number of ranks; none if its files have `train_batch_size`, or name no
            number of GPUs.
        batch_origin: What decides its batch, as text.
        ranks_origin: What decides the ranks of its plan, as text.
        trained_on: Place where it is trained.
        hosts: Hosts of that place; None if they cannot be found.
    """

    planned: PlannedRun
    batch: Mapping[str, int | None]
    batch_origin: str
    ranks_origin: str
    trained_on: Place
    hosts: Placement | None

    def notes(self, family: Family) -> Iterator[str]:
        """Yield the lines that say what is predicted, for which batch, ranks and GPU, and whether it fits there."""
        plan = self.planned.plan
        ranks = plan.grid.world_size
        if self.planned.planned_seconds is not None:
            time = f"planned {duration(self.planned.planned_seconds)} on {ranks} ranks"
        else:
            time = f"its time is not planned: {unplanned_because(self.planned)}"
        yield f"{short(family.parameters)} parameters without the embedding, {short(family.tokens)} tokens, {time}"
        yield f"its batch is {plan.batch.train_batch_size:,} samples: {self.batch_origin}"
        device = self.planned.device
        sources = {device.source: None}  # of memory
        if device.peak_tflops is not None:
            sources[device.peak_source] = None  # of speed, which is often the same
        yield f"its plan is for {ranks} ranks ({self.ranks_origin}), each on {device.name} ({', '.join(sources)})"
        if not device.shared:
            yield "another GPU for its plan: `overrides: {gpu_type: ...}` in one of `configs`; `set` is for small runs"
        for problem in self.planned.too_large:
            yield f"the target does not fit there, though the small runs can be trained: {problem}"
        for problem in self.planned.problems:
            if problem not in self.planned.too_large:
                yield f"problem of the target: {problem}"
        hosts = self.hosts
        if hosts is not None and not hosts.assumed and hosts.world_size != ranks:
            yield f"--train_target trains it on {hosts.world_size} ranks ({hosts.why}), with the same batch"


def target_sweep(ladder: Ladder, values: Mapping[str, Any]) -> Sweep:
    """Return the sweep that trains the target. It has no table: that of the directory is of the small runs."""
    return ladder.sweep([SweepRun(TARGET, values)], has_table=False)


def plan_target(ladder: Ladder, hostfile: str | None = None) -> Target:
    """Plan the target with the batch of the GPUs that its files were made for, on these GPUs.

    Args:
        ladder: The ladder.
        hostfile: That of `-H`; None without it.

    Raises:
        ConfigError: The configuration is wrong.
    """
    sweep = target_sweep(ladder, {})
    config = _config(ladder)
    trained_on = Place(hostfile=hostfile or "")
    placement = _placement(ladder, trained_on)
    place = trained_on
    ranks_origin = ""
    named = gpus_to_plan(config)
    if named is not None:
        number, ranks_origin = named
        own = _placement(ladder, Place())
        if placement is not None and placement.world_size == number:
            place = trained_on
        elif own is not None and own.world_size == number:
            place = Place()
        else:
            place = Place(imagined=_imagined_hosts(config, number))
    elif placement is not None:
        ranks_origin = placement.why

    batch: dict[str, int | None] = {}
    intended = batch_to_plan(config)
    if intended is None:
        origin = (
            "it follows from the ranks, because the target's files name no number of GPUs; `planned_num_gpus` or "
            "`train_batch_size` there keeps one batch"
        )
    else:
        origin = intended.origin
        if config.deepspeed.train_batch_size is None:
            batch = {TOTAL: intended.samples, STEPS: None}
            sweep = target_sweep(ladder, batch)
    (planned,) = plan_runs(sweep, place)
    return Target(planned, batch, origin, ranks_origin, trained_on, placement)


def check_training(ladder: Ladder, target: Target) -> tuple[str, ...]:
    """Check that the target can be trained on its hosts.

    Returns:
        Why it does not fit there, if nobody gave the memory of these hosts.

    Raises:
        ConfigError: It cannot, also because its hosts cannot divide its batch.
    """
    try:
        (run,) = plan_runs(target_sweep(ladder, target.batch), target.trained_on)
    except ConfigError as error:
        kept = ""
        if target.batch:
            kept = f" (it keeps its batch: {target.batch_origin})"
        raise ConfigError([f"{TARGET}: {problem}{kept}" for problem in error.problems]) from None
    if run.problems:
        raise ConfigError([f"{TARGET}: {problem}" for problem in run.problems])
    return run.too_large


def places_of_small_runs(ladder: Ladder, hostfile: str | None) -> tuple[Place, ...]:
    """Return the places of the small runs: those of `-H`, else of the hostfile that the target's files name.

    A small run never takes several hosts of a hostfile, which are the target's.

    Args:
        ladder: The ladder.
        hostfile: That of `-H`; None without it.

    Raises:
        ConfigError: The hostfile cannot be read, or runs would have different numbers of ranks.
    """
    if hostfile is None:
        config = _config(ladder)
        runner = config.runner
        named = named_hostfile(runner, config.source("hostfile"))
        if named is not None:
            path = named[0]
            return places_on(hosts_of_file(runner, path), path, ladder.slots_per_run)
    return find_places(hostfile, ladder.slots_per_run)


def _config(ladder: Ladder) -> NeoXConfig:
    """Return the configuration of the target's files."""
    sweep = target_sweep(ladder, {})
    return config_of(sweep, sweep.runs[0], Place())


def _placement(ladder: Ladder, place: Place) -> Placement | None:
    """Return the hosts and slots that the target has at a place; None if there are none here."""
    sweep = target_sweep(ladder, {})
    try:
        return placement_of(sweep, sweep.runs[0], place)
    except (ConfigError, LaunchError):
        return None


def _imagined_hosts(config: NeoXConfig, number: int) -> tuple[int, int]:
    """Return numbers of hosts, and of GPUs of each, that a number of GPUs has."""
    kind = config.runner.gpu_type
    most = GPUS_OF_HOST
    if kind is not None:
        most = GPUS[kind].per_host
    of_host = largest_divisor(number, most)
    return number // of_host, of_host
