"""Which checkpoint text and scores come from."""

from __future__ import annotations

from pathlib import Path

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
    if args.get("vocab_size", plan.vocab_size) != plan.vocab_size:
        raise CheckpointError(
            f"{checkpoint} was trained with a tokenizer of {args['vocab_size']} ids, and this one has "
            f"{plan.vocab_size}: its text would be nonsense; give the vocab_file that it was trained with"
        )
    return checkpoint
