"""Start of a script that runs a model: arguments to plan, process groups, tokenizer and checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from neox.arguments import add_overrides
from neox.checkpoint import (
    CheckpointReader,
    add_end_ids,
    check_same_model,
    find_checkpoint,
    find_generation_settings,
)
from neox.checkpoint.remote.fetching import with_local_load
from neox.config import NeoXConfig, for_inference
from neox.engine import choose_device, from_first_rank, initialize_distributed, shutdown
from neox.errors import CheckpointError, ConfigError, refusals
from neox.launch.hosts.machine import native_formats
from neox.log import setup_logging
from neox.parallel import ParallelGrid
from neox.plan import (
    Capabilities,
    RunPlan,
    config_from_files,
    decode_payload,
    resolve,
    saved_precision,
    with_trained_model,
)
from neox.tokenizer import Tokenizer, other_tokenizer, tokenizer_of

# Keys of a training configuration that do not apply to a single process.
_MULTI_PROCESS_KEYS = (
    "pipe_parallel_size",
    "model_parallel_size",
    "global_num_gpus",
    "num_gpus",
    "num_nodes",
    "hostfile",
    "include",
    "exclude",
)
_SUGGESTION = "--set load=DIRECTORY names another directory"


def add_plan_arguments(parser: argparse.ArgumentParser, *more: str) -> None:
    """Add the launcher's `--payload`, and the files and settings of a run in a single process.

    Args:
        parser: Parser of the script.
        *more: Further spellings of `--set`.
    """
    parser.add_argument("files", nargs="*", help="YAML files: the model's, and text_generation.yml or the like")
    parser.add_argument("-d", "--conf_dir", help="directory of the files")
    add_overrides(parser, *more)
    parser.add_argument("--iteration", type=int, help="checkpoint to load (default: the newest)")
    parser.add_argument("--payload", help="resolved configuration, passed by deepy.py")


def plan_from_arguments(args: argparse.Namespace, *, takes_reward_models: bool = False) -> tuple[RunPlan, Tokenizer]:
    """Return the tokenizer, and the plan: the launcher's, or that of a single process with the whole model.

    Args:
        args: Arguments of the script.
        takes_reward_models: Whether the script takes reward models, too.

    Raises:
        ConfigError: If the configuration is wrong, or describes the wrong kind of model.
        TokenizerError: If the tokenizer cannot be built.
    """
    with refusals():
        plan, tokenizer = _plan_and_tokenizer(args)
        if plan.architecture.bidirectional:
            rule = "describes a masked language model, which has no next tokens to score or to generate"
            raise ConfigError(plan.config.problem("objective", rule))
        if plan.architecture.score_head and not takes_reward_models:
            rule = "describes a reward model, which does not predict tokens; use tools/score.py to score texts with it"
            raise ConfigError(plan.config.problem("train_impl", rule))
    return plan, tokenizer


def _plan_and_tokenizer(args: argparse.Namespace) -> tuple[RunPlan, Tokenizer]:
    """Return the plan and the tokenizer, whatever the kind of model."""
    if args.payload:
        plan = decode_payload(args.payload)
        return plan, tokenizer_of(plan.config)
    if not args.files:
        raise ConfigError("no configuration: name the model's YAML files, or start this script with deepy.py")
    overrides = list(args.set)
    if args.iteration is not None:
        overrides.append(f"iteration={args.iteration}")
    training = config_from_files(args.files, conf_dir=args.conf_dir, overrides=overrides)
    config = with_local_load(one_process(with_trained_model(training)), trains=False)
    capabilities = Capabilities.of_hosts([native_formats()])
    saved = saved_precision(config)
    tokenizer = tokenizer_of(config)
    return resolve(config, 1, tokenizer.vocab_size, replace(capabilities, saved=saved)), tokenizer


def one_process(config: NeoXConfig) -> NeoXConfig:
    """Return the configuration for a single process, whatever number of ranks it trains on."""
    config = for_inference(config)
    return config.updated({}, without=_MULTI_PROCESS_KEYS)


def start_ranks(plan: RunPlan, prepare: Callable[[], Path]) -> tuple[ParallelGrid, torch.device, Path]:
    """Join the other ranks and agree on a checkpoint.

    Args:
        plan: Plan of the run; a single process makes no process group.
        prepare: Function that checks the request and returns the checkpoint; it is called on rank 0 only.

    Returns:
        The process groups, this rank's device and the checkpoint.

    Raises:
        NeoXError: If `prepare` raises it; then on all ranks.
    """
    if plan.grid.world_size == 1:
        with refusals():
            return ParallelGrid.single(), choose_device(0), prepare()
    grid, device = initialize_distributed(plan)
    setup_logging(grid.rank)
    with refusals():
        return grid, device, from_first_rank(prepare)


def end_ranks(grid: ParallelGrid) -> None:
    """Leave the process groups of `start_ranks` together with the other ranks, at the end without errors."""
    if grid.world_size > 1:
        shutdown()


def choose_checkpoint(plan: RunPlan, tokenizer: Tokenizer) -> Path:
    """Return the `global_stepN` directory to load: from `load`, or from `save` if `load` is not given.

    It reads every file (unless `checkpoint_verify` is off), so call it on one rank.

    Raises:
        CheckpointError: If neither key is given, there is no complete checkpoint, or it belongs to another model or
            tokenizer.
    """
    keys = plan.config.checkpoint
    key = "save" if keys.load is None else "load"
    directory = keys.load or keys.save
    if directory is None:
        raise CheckpointError(f"neither `load` nor `save` is given, so there is no checkpoint to read; {_SUGGESTION}")
    if not Path(directory).is_dir():
        raise CheckpointError(
            f"{key}: {directory} is not a directory, so there is no checkpoint to read; {_SUGGESTION}"
        )
    checkpoint = find_checkpoint(directory, keys.iteration, verify=keys.checkpoint_verify, way_out=_SUGGESTION)
    args = CheckpointReader(checkpoint).args
    check_same_model(checkpoint, args, plan)
    difference = other_tokenizer(plan.config, tokenizer, checkpoint)
    if difference is not None:
        raise CheckpointError(difference)
    check_vocabulary(checkpoint, args, plan.vocab_size)
    return checkpoint


def use_end_ids(plan: RunPlan, checkpoint: Path, tokenizer: Tokenizer) -> None:
    """Let generation end at the end ids that a checkpoint carries, too; all ranks call it together.

    Args:
        plan: Plan of the run.
        checkpoint: Result of `choose_checkpoint`.
        tokenizer: The tokenizer, which is changed.

    Raises:
        NeoXError: If the settings cannot be read; then on all ranks.
    """

    def find() -> dict[str, Any]:
        return find_generation_settings(plan.config, checkpoint, plan.config.tokenizer.vocab_file, tokenizer)

    with refusals():
        settings = find() if plan.grid.world_size == 1 else from_first_rank(find)
        add_end_ids(tokenizer, settings, str(checkpoint))


def check_vocabulary(checkpoint: Path, args: Mapping[str, Any], vocab_size: int) -> None:
    """Check that a tokenizer can be the one that a checkpoint was trained with.

    Args:
        checkpoint: The checkpoint, which the message names.
        args: Settings of its model that the checkpoint stores; gpt-neox's have only the padded size.
        vocab_size: Number of ids that text may have.

    Raises:
        CheckpointError: If the sizes contradict each other.
    """
    exact = args.get("vocab_size")
    padded = args.get("padded_vocab_size")
    if exact is not None and padded is not None:
        exact = min(exact, padded)  # imports may name more ids than there are rows
    if exact not in (None, vocab_size) or (padded is not None and vocab_size > padded):
        known = exact if exact is not None else f"at most {padded}"
        raise CheckpointError(
            f"{checkpoint} has rows for {known} ids of its tokenizer, but the configuration's tokenizer has "
            f"{vocab_size}, so its text would be meaningless; set vocab_file to the tokenizer that the model was "
            "trained with (and hf_architecture and padded_vocab_size as in config.yml of an import)"
        )
