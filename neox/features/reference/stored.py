"""The reference model of training on preferences: its log-probabilities, computed once and stored with the data."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from neox.data.answer_pairs.answers import AnswerPairs
from neox.data.answer_pairs.reference_file import (
    START,
    ReferenceIdentity,
    hash_of_pairs,
    read_reference,
    reference_path,
    start_path,
    write_reference,
)
from neox.engine import Engine, from_first_rank
from neox.errors import DataError
from neox.features.reference.log_probs import answer_log_probs
from neox.log import get_logger

_log = get_logger(__name__)


def reference_log_probs(engine: Engine, reference: str | None, pairs: AnswerPairs, prefix: str) -> np.ndarray:
    """Return the log-probabilities of answers by the model that the run starts from, [pairs, 2].

    With `reference_model: without_adapters` they are computed by the model with its adapters disabled. Otherwise they
    are read from the file next to the data, which must belong to these weights and this data. If there is no file, they
    are computed and written to it. Without `precompute_model_name` each start has a file of its own, and one that an
    earlier version has written is read if it is of these weights. All ranks call it together.

    Args:
        engine: The engine of the run.
        reference: Identity of the weights that the run began with; None if it is not known.
        pairs: The answers.
        prefix: Prefix of their first token file.

    Raises:
        DataError: On all ranks, if the file is damaged or of other weights or data; or if the run goes on, and there is
            no file.
    """
    if engine.plan.config.preferences.reference_model == "without_adapters":
        return answer_log_probs(engine, pairs, adapters=False)
    name = engine.plan.config.preferences.precompute_model_name

    def read() -> tuple[ReferenceIdentity, Path, np.ndarray | None]:
        if reference is None:
            raise DataError(
                f"the run goes on from iteration {engine.iteration} of a checkpoint that does not say which weights "
                "its reference is: start from its weights with finetune: true"
            )
        identity = ReferenceIdentity(reference, hash_of_pairs(pairs), engine.plan.precision)
        if name is not None:
            path = reference_path(prefix, name)
            return identity, path, read_reference(path, identity)
        path = start_path(prefix, identity)
        stored = read_reference(path, identity)
        if stored is None:
            earlier = reference_path(prefix, START)
            with suppress(DataError):  # of other weights, or damaged
                stored = read_reference(earlier, identity)
                if stored is not None:
                    path = earlier
        return identity, path, stored

    identity, path, stored = from_first_rank(read)
    held = pairs.sizes.sum(axis=1) <= engine.plan.batch_schedule.full_length
    if stored is not None:
        missing = np.flatnonzero(held & ~np.isfinite(stored).all(axis=1))
        if len(missing):
            raise DataError(
                f"{path} was computed with a smaller seq_length, and lacks the log-probabilities of {len(missing):,} "
                f"pairs that now fit, the first being {pairs.name(int(missing[0]))}: choose another "
                "precompute_model_name, or remove the file so that it is computed again"
            )
        if engine.grid.rank == 0:
            _log.info("log-probabilities of %d answers by the reference: %s", 2 * len(pairs), path)
        return stored
    if engine.iteration:
        raise DataError(
            f"{path} is missing, and the model has changed since the run began: bring the file back, or start the run "
            "again from the weights of its reference"
        )
    of_neox = name or START
    if engine.grid.rank == 0 and Path(f"{prefix}_{of_neox}.idx").exists():
        _log.warning(
            "%s_%s was written by gpt-neox and is not used, because it does not record which weights it belongs to; "
            "the log-probabilities are computed again",
            prefix,
            of_neox,
        )
    values = answer_log_probs(engine, pairs)
    unknown = np.flatnonzero(held & ~np.isfinite(values).all(axis=1))
    if len(unknown):
        raise DataError(
            f"the reference model's log-probabilities of {len(unknown):,} of {len(pairs):,} answers are not finite, "
            f"the first being {pairs.name(int(unknown[0]))}: train in another precision, or from other weights"
        )
    from_first_rank(lambda: write_reference(path, values, identity))
    if engine.grid.rank == 0:
        _log.info("log-probabilities of %d answers by the reference are in %s", 2 * len(pairs), path)
    return values
