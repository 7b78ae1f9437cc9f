"""Planning of a run: the configuration of a command line, and its plan with all problems in one list."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from neox.config import LoadedConfig, NeoXConfig, for_inference, load_config
from neox.errors import ConfigError, LaunchError
from neox.launch.command_line import INFERENCE, overrides
from neox.launch.placement import Placement, choose_hosts
from neox.launch.remote import path_state
from neox.launch.rendezvous import master_port_problem
from neox.plan import (
    Capabilities,
    Device,
    RunPlan,
    check_config,
    check_run,
    decides_run,
    resolve,
    saved_precision,
)
from neox.preflight.checks import (
    checkpoint_problems,
    device_of_ranks,
    finetune_notes,
    login_problems,
    memory_problems,
    missing_packages,
    nvme_paths,
    nvme_problems,
    task_problems,
    vocabulary,
)
from neox.preflight.data_checks import data_problems, epoch_samples, with_loss_normalization, with_train_iters
from neox.problems import Problem, in_file_order


def read_config(arguments: argparse.Namespace) -> NeoXConfig:
    """Load the configuration with the command line's overrides.

    For a script that only runs a model, what binds the configuration to the number of ranks it trains on is left out.

    Args:
        arguments: The command line.

    Raises:
        ConfigError: With every problem of keys, grid and batch.
    """
    loaded = load_config(arguments.conf_file, conf_dir=arguments.conf_dir, overrides=overrides(arguments))
    if Path(arguments.script).stem in INFERENCE:
        loaded = replace(loaded, config=for_inference(loaded.config))
    if not loaded.problems:
        return loaded.config
    if arguments.script == "doctor":
        raise ConfigError(loaded.problems)
    raise ConfigError(_all_problems(loaded, arguments))


def _all_problems(loaded: LoadedConfig, arguments: argparse.Namespace) -> list[Problem]:
    """Return the problems of keys that cannot be read with those of all others, so that one run shows everything."""
    if not decides_run(loaded):
        return check_config(loaded)
    try:
        placement, _ = choose_hosts(loaded.config, arguments)
    except LaunchError as error:
        return [*loaded.problems, Problem((), str(error))]
    except ConfigError as error:
        return in_file_order([*loaded.problems, *loaded.certain(error.problems)])
    return check_run(loaded, placement.world_size, vocabulary(loaded.config)[0])


def build_plan(
    config: NeoXConfig,
    placement: Placement,
    script: Path,
    capabilities: Capabilities,
    *,
    dry_run: bool,
    environment: Mapping[str, str] | None = None,
) -> tuple[RunPlan, Device, list[Problem]]:
    """Resolve a configuration and check what the run needs.

    Args:
        config: The configuration.
        placement: Hosts and slots.
        script: The script that ranks run; what one of the user's own needs is not known.
        capabilities: What the hosts multiply natively.
        dry_run: Whether nothing will be started.
        environment: Variables of the ranks, where logins are looked for; None not to look.

    Returns:
        The plan, what a rank runs on, and the problems: what is missing or does not fit. They are warnings of a dry
        run, errors of a launch.

    Raises:
        ConfigError: The configuration cannot be resolved; with the problems of a launch.
    """
    size, tokenizer, problems = vocabulary(config)
    if tokenizer is None and dry_run:
        assumed = f"a vocabulary of {size:,} ids is assumed"
        problems = [replace(problem, message=f"{problem.message}; {assumed}") for problem in problems]
    asked, world = config.runner.global_num_gpus, placement.world_size
    if asked not in (None, world):
        message = f"`global_num_gpus: {asked}`, but there are {world} ranks ({placement.why}); remove it"
        problems.append(config.problem_about(message, "global_num_gpus"))
    if port_problem := master_port_problem(placement, config.runner):
        problems.append(config.problem_about(port_problem, "master_port"))
    training = script.stem == "train"
    runs_model = training or script.stem in INFERENCE
    if training:
        problems += data_problems(config, tokenizer, dry_run=dry_run)
    if runs_model:
        problems += [*checkpoint_problems(config, training=training), *task_problems(config, script.stem, tokenizer)]
    if training or script.stem == "evaluate":
        problems += missing_packages(config)
    if training and environment is not None and placement.is_local:
        problems += login_problems(config, environment)
    if config.model.precision == "auto":
        capabilities = replace(capabilities, saved=saved_precision(config, training=training))
        if not dry_run and capabilities.bf16 is None and capabilities.saved is None:
            problems.append(config.problem("precision", "needs hosts that can be asked; set it to bf16 or fp32"))
    decided: list[str] = []
    if training:
        config, decided, uncounted = with_train_iters(config, world)
        problems += uncounted
        config, normalised = with_loss_normalization(config)
        decided += normalised
    try:
        plan = resolve(config, world, size, capabilities)
    except ConfigError as error:
        raise ConfigError([*error.problems, *([] if dry_run else problems)]) from None
    device = device_of_ranks(plan, placement, training=training, dry_run=dry_run)
    if runs_model:
        problems += memory_problems(plan, device, training=training)
    if training and placement.is_local:
        paths = {path: path_state(Path(path)) for path in nvme_paths(config)}
        problems += nvme_problems(plan, range(world), "this machine", paths)
    if training:
        notes = (*plan.notes, *decided, *finetune_notes(config))
        plan = replace(plan, notes=notes, epoch_samples=epoch_samples(config))
    return plan, device, problems
