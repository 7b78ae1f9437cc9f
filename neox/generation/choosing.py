"""Which checkpoint text and scores come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neox.checkpoint import CheckpointReader, check_same_model, find_checkpoint
from neox.config import RunPlan
from neox.errors import CheckpointError

_WAY_OUT = "--set load=DIRECTORY names another place"


def choose_checkpoint(plan: RunPlan) -> Path:
    """Return the `global_stepN` directory to read: of `load`, or, where that is not given, of `save`.

    It reads every file (unless `checkpoint_verify` is off): call it on one rank. Raises CheckpointError where neither
    is given, nothing whole is there, or it is of another model or made with another tokenizer.
    """
    keys = plan.config.checkpoint
    key = "save" if keys.load is None else "load"
    directory = keys.load or keys.save
    if directory is None:
        raise CheckpointError(f"neither `load` nor `save` is given, so there is no checkpoint to read; {_WAY_OUT}")
    if not Path(directory).is_dir():
        raise CheckpointError(f"{key}: {directory} is not a directory, so there is no checkpoint to read; {_WAY_OUT}")
    checkpoint = find_checkpoint(directory, keys.iteration, verify=keys.checkpoint_verify, way_out=_WAY_OUT)
    args = CheckpointReader(checkpoint).args
    check_same_model(checkpoint, args, plan)
    check_tokenizer(checkpoint, args, plan.vocab_size)
    return checkpoint


def check_tokenizer(checkpoint: Path, args: Mapping[str, Any], vocab_size: int) -> None:
    """Raise CheckpointError where a tokenizer of `vocab_size` ids cannot be the one that a checkpoint was trained with.

    args: what it stores of its model. Of gpt-neox's checkpoints only the padded number of ids is known.
    """
    exact, padded = args.get("vocab_size"), args.get("padded_vocab_size")
    if exact not in (None, vocab_size) or (padded is not None and vocab_size > padded):
        known = exact if exact is not None else f"at most {padded}"
        raise CheckpointError(
            f"{checkpoint} was trained with a tokenizer of {known} ids, and this one has {vocab_size}: its text would "
            "be nonsense; give the vocab_file that it was trained with"
        )
