"""The reference model of training on preferences: the weights that a run began with, and their identity.

A loss that compares with them reads their log-probabilities from a file next to the data (`stored`), or computes them
in every step with a second copy of the weights (`copy`). A run that resumes from a checkpoint knows from it which ones
these are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from neox.checkpoint import (
    REFERENCE,
    REFERENCE_FROM,
    CheckpointReader,
    LoadedWeights,
    find_checkpoint,
    hash_of_weights,
)
from neox.engine import Engine, Feature, RunStart, TrainedModel, build_loaded_model, check_copies, from_first_rank
from neox.engine.feature import DataArguments
from neox.errors import CheckpointError
from neox.features.reference.copy import WeightsCopy, with_reference
from neox.features.reference.stored import reference_log_probs
from neox.objectives import Batch
from neox.plan import RunPlan
from neox.plan.run_start import StartMode, requested_start


def build(model: TrainedModel, start: RunStart) -> Reference | None:
    """Return the reference; None if the data or the loss needs none."""
    if not model.plan.config.preferences.needs_reference:
        return None
    return Reference(model, start)


class Reference(Feature):
    """The reference model of a run.

    Attributes:
        identity: Identity of the weights that the run began with; None if it is not known, or no loss needs it.
        source: Checkpoint that these weights are in, and which of its weights they are; None for initial ones, or if
            there is no copy of them.
    """

    def __init__(self, model: TrainedModel, start: RunStart) -> None:
        keys = model.plan.config.preferences
        self.identity: str | None = None
        self.source: tuple[str, str] | None = None
        self._weights: WeightsCopy | None = None
        if keys.compares_with_start:
            self.identity = from_first_rank(lambda: weights_identity(start))
        if keys.copies_reference:
            first = from_first_rank(lambda: first_start(model.plan, start))
            self.source = first.source
            self._weights = _copy_of(model, start, first)

    def state(self, engine: Engine) -> Mapping[str, Any]:
        """Return the identity of the weights that the run began with, and where they are."""
        saved: dict[str, Any] = {}
        if self.identity is not None:
            saved[REFERENCE] = self.identity
        if self.source is not None:
            saved[REFERENCE_FROM] = list(self.source)
        return saved

    def opening_data(self, engine: Engine) -> DataArguments:
        """Return the function that reads or computes the log-probabilities that are stored with the data."""
        return {"reference": partial(reference_log_probs, engine, self.identity)}

    def batches(self, engine: Engine, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Add the log-probabilities by the copy, if there is one."""
        if self._weights is None:
            return batches
        return with_reference(engine, self._weights, batches, count)


def _copy_of(model: TrainedModel, start: RunStart, first: RunStart) -> WeightsCopy:
    """Return a copy of the weights that the run began with. All ranks call it together.

    Raises:
        CheckpointError: On all ranks, if these weights are not where they were.
    """
    if first is start or not start.iteration:
        return WeightsCopy(model.module)
    if first.checkpoint is not None:
        check_copies(first.checkpoint, hashes=model.plan.config.checkpoint.checkpoint_verify)
    # The model holds later weights. So a second one is built as the run began, and only its tensors stay.
    began = build_loaded_model(model.plan, model.grid, model.device, model.objective, first)
    return WeightsCopy(model.module, of=began)


def weights_identity(start: RunStart) -> str | None:
    """Return the identity of the weights that a run starts from; None if it is not known. Only one rank calls it.

    Args:
        start: How the run starts. A resumed run knows its first weights from its checkpoints.

    Raises:
        CheckpointError: If a checkpoint without a manifest cannot be read.
    """
    saved: str | None = start.saved.get(REFERENCE)
    if start.iteration or saved is not None:
        return saved
    if start.checkpoint is None:
        return f"{start.run.start} (run {start.run.run_id})"
    return f"{start.weights} weights {hash_of_weights(start.checkpoint)}"


def first_start(plan: RunPlan, start: RunStart) -> RunStart:
    """Return how the run began, if it is resumed, or how it begins. Only one rank calls it.

    A resumed run may name its own checkpoints as `load`, as the launcher lets it; they say where it began.

    Args:
        plan: The run.
        start: How it starts now.

    Raises:
        CheckpointError: If the weights that it began with are not those that `load` and `finetune` name.
    """
    if not start.iteration:
        return start
    keys = plan.config.checkpoint
    asked = requested_start(plan.config)
    first = RunStart(start.run)
    identity = start.saved.get(REFERENCE)
    saved_in = start.saved.get(REFERENCE_FROM)
    if asked.mode is StartMode.FINETUNE and asked.load is not None:
        path = find_checkpoint(asked.load, asked.iteration, verify=keys.checkpoint_verify)
        first = _finetuned(plan, start, path, keys.load_weights)
    elif saved_in is not None:
        directory, weights = saved_in
        path = find_checkpoint(directory, verify=keys.checkpoint_verify, way_out="bring it back")
        first = _finetuned(plan, start, path, weights)
    if identity is None or weights_identity(first) != identity:
        raise CheckpointError(
            f"reference_model: copy: the run goes on from iteration {start.iteration}, and the weights that it began "
            f"with are not {first.checkpoint or 'the initial ones'}: bring them back, or start again from "
            "others, in another `save`"
        )
    return first


def _finetuned(plan: RunPlan, start: RunStart, path: Path, weights: LoadedWeights) -> RunStart:
    """Return the start of a run from the weights of another one's checkpoint."""
    reader = CheckpointReader(path, plan.layers, finetune=True, gpt_neox_date=plan.config.checkpoint.gpt_neox_date)
    # As when the run began (`neox.engine.checkpoints.run_start`).
    return RunStart(start.run, path, StartMode.FINETUNE, weights=weights, new_layers=reader.new_layers)
