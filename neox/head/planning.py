"""From the command line to a checked plan, with everything that is wrong or missing in one list."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from neox.config import Draft, NeoXConfig, RunPlan, draft_config, for_inference, further_problems, resolve
from neox.errors import ConfigError, LaunchError
from neox.head.checks import refused_work, too_little_memory, unusable_data, vocabulary
from neox.head.command_line import INFERENCE, overrides
from neox.head.hosts import choose_hosts
from neox.launch.placement import Placement, Request, master_port_problem
from neox.launch.preflight import checkpoint_problems, missing_packages


def read_config(arguments: argparse.Namespace, *more: str) -> NeoXConfig:
    """Load the configuration with the command line's overrides, and more; for a script that only runs a model, without
    what binds it to the ranks of training. Raises ConfigError with every problem of keys, grid and batch."""
    draft = draft_config(arguments.conf_file, conf_dir=arguments.conf_dir, overrides=[*overrides(arguments), *more])
    if Path(arguments.script).stem in INFERENCE:
        draft = replace(draft, config=for_inference(draft.config))
    if draft.problems:
        more_problems = [] if arguments.script == "doctor" else other_problems(draft, arguments)
        raise ConfigError([*draft.problems, *more_problems])
    return draft.config


def other_problems(draft: Draft, arguments: argparse.Namespace) -> list[str]:
    """What else is wrong beside the keys that cannot be read, so that one run shows everything."""
    try:
        placement, _ = choose_hosts(draft.config, arguments)
    except (LaunchError, ConfigError) as error:
        return draft.certain(error.problems if isinstance(error, ConfigError) else [str(error)])
    return further_problems(draft, placement.world_size, vocabulary(draft.config)[0])


def build_plan(config: NeoXConfig, placement: Placement, script: Path, *, dry_run: bool) -> tuple[RunPlan, list[str]]:
    """Resolve, and return with the plan what is missing or does not fit: warnings of a dry run, errors of a launch."""
    size, tokenizer, problems = vocabulary(config)
    if tokenizer is None and dry_run:
        problems = [f"{problem}; a vocabulary of {size:,} ids is assumed" for problem in problems]
    asked, world = config.runner.global_num_gpus, placement.world_size
    if asked not in (None, world):
        where = config.source("global_num_gpus")
        problems.append(
            f"{where}: `global_num_gpus: {asked}`, but there are {world} ranks ({placement.why}); remove it"
        )
    if taken := master_port_problem(placement, Request.of(config.runner)):
        problems.append(taken)
    training = script.stem == "train"
    runs_model = training or script.stem in INFERENCE  # what another script needs is not known
    if training:
        problems += unusable_data(config, tokenizer, dry_run)
    if runs_model:
        problems += [*checkpoint_problems(config, training=training), *refused_work(config, script.stem, tokenizer)]
    if training or script.stem == "evaluate":
        problems += missing_packages(config)
    try:
        plan = resolve(config, world, size)
    except ConfigError as error:
        raise ConfigError([*error.problems, *([] if dry_run else problems)]) from None
    if runs_model:
        problems += too_little_memory(plan, placement, training=training, dry_run=dry_run)
    return plan, problems
