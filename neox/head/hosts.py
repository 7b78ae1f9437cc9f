"""Where ranks go, or would go: hosts of the configuration, imagined ones, and what a dry run assumes."""

from __future__ import annotations

import argparse
from dataclasses import replace

from neox.config import NeoXConfig, static_problems
from neox.config.wording import said
from neox.errors import ConfigError, LaunchError
from neox.launch.placement import UNCOUNTED, Placement, Request, check_local_devices, place
from neox.launch.spec import Host

_MOST_IMAGINED = 2**20


def choose_hosts(config: NeoXConfig, arguments: argparse.Namespace) -> tuple[Placement, list[str]]:
    """Return where ranks go; in a dry run what is wrong with it becomes a warning, and hosts can be imagined."""
    if arguments.hosts or arguments.gpus:
        if (arguments.hosts or 1) * (gpus := arguments.gpus or config.runner.num_gpus or 8) > _MOST_IMAGINED:
            raise LaunchError(f"--hosts and --gpus: at most {_MOST_IMAGINED:,} ranks can be planned")
        slots = tuple(range(gpus))
        hosts = tuple(Host(f"host{number}", slots) for number in range(arguments.hosts or 1))
        return Placement(hosts, "--hosts and --gpus", 0), []
    try:
        placement = place(Request.of(config.runner))
        if not arguments.dry_run:
            check_local_devices(placement)
        elif placement.why == UNCOUNTED and one_copy(config) > 1:
            return assumed_hosts(config, "hosts, num_gpus and global_num_gpus are not given, and there is no GPU here")
        return placement, overruled(config, placement)
    except LaunchError as error:
        if arguments.dry_run:
            return assumed_hosts(config, str(error))
        if problems := static_problems(config):
            raise ConfigError([*problems, str(error)]) from None
        raise


def overruled(config: NeoXConfig, placement: Placement) -> list[str]:
    """Say that `num_gpus` counts nothing where `global_num_gpus` does and no hostfile tells what a host has."""
    total, each = config.runner.global_num_gpus, config.runner.num_gpus
    if placement.why != "global_num_gpus" or each in (None, total):
        return []
    keys = said(config, "num_gpus", each), said(config, "global_num_gpus", total)
    advice = "`--set global_num_gpus=None` unsets it"
    return ["{} has no effect: without a hostfile {} counts the ranks; ".format(*keys) + advice]


def one_copy(config: NeoXConfig) -> int:
    """Ranks that hold the model once: the fewest that can train it."""
    return max(1, config.parallelism.pipe_parallel_size) * config.parallelism.model_parallel_size


def assumed_hosts(config: NeoXConfig, why: str) -> tuple[Placement, list[str]]:
    """Return the ranks that are counted, else those of one copy of the model, and the warning that says so."""
    runner = config.runner
    count = runner.global_num_gpus or runner.num_gpus or one_copy(config)
    what = "" if runner.global_num_gpus or runner.num_gpus else ", one copy of the model"
    placement = replace(place(Request(global_num_gpus=count)), why="assumed")
    return placement, [f"{why}; {count} ranks are assumed{what}"]
