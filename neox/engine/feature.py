"""The points of a training at which features take part: averages, checks, observers, trackers, references.

A feature is one object in one folder of `neox/features/`. It overrides the points that it needs. `Engine` and `Trainer`
call every point on all features, in the order of the table `neox.features.table`, and name none of them:

    start          build(model, start)     the model is built and holds its weights; DeepSpeed has wrapped it
                   load(engine, start)     the optimizer's state is loaded; again after a rollback
                   opening_data()          the data is opened, at the start and after a rollback
                   on_data(engine, data)   the data is open
                   on_start(state)
    a step         batches(engine, ...)    micro batches on their way to the model
                   before_passes(engine)   after the batches are complete, so reference models have run
                     forward and backward passes, reduction of gradients; an update that is skipped ends here
                   before_update(engine)   ZeRO 3 updates in several calls: before each of them
                     the optimizer
                   after_update(engine)    after each of them
                   after_step(engine, result)   also of a skipped step: what it returns is logged; if a feature
                                           has `needs_computing_time`, the result has the time of the passes
                   on_step(state, report)
                   wants_rollback(...)     if may_roll_back: whether the run goes back to a checkpoint; then
                                           allows_rollback, load, after_rollback, opening_data, on_data
    an evaluation  other_weights(engine)   weights that are evaluated on the same batches
                   weights_changed(engine) they are in the model; later, that the trained ones are back
                   evaluation_batches(...), tokens_per_character(engine)
                   further_evaluations(engine), evaluation_numbers(...)
                   on_evaluation(state, ...)
    a save         before_save(engine)     the last moment to refuse it
                   files(engine), state(engine)
                   on_save(state, report)  the checkpoint is committed
    the end        on_end(state) or on_failure(state)
                   on_exit()               other ranks may have ended

A point that communicates does so on all ranks: features whose work is rank 0's are built on rank 0 only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from neox.engine.optimizer_tensors import (
    CountedRange,
    OptimizerTensor,
    counted_ranges,
    divides_optimizer,
    optimizer_tensors,
)
from neox.engine.reports import SaveReport, StepReport, StepResult, TrainState
from neox.objectives import Batch, Objective
from neox.optim import ClippedOptimizer
from neox.parallel import ParallelGrid
from neox.plan import RunPlan

if TYPE_CHECKING:
    from neox.engine.checkpoints.run_start import RunStart
    from neox.engine.engine import Engine


@dataclass(frozen=True)
class TrainedModel:
    """A model that DeepSpeed has wrapped for training, on this rank.

    Attributes:
        plan: The run.
        grid: This rank's grid.
        device: Device of the model.
        objective: What a batch is and what its loss is.
        deepspeed_engine: DeepSpeed's engine, which holds the model.
        optimizer: The optimizer that updates the weights; DeepSpeed may have wrapped it.
    """

    plan: RunPlan
    grid: ParallelGrid
    device: torch.device
    objective: Objective
    deepspeed_engine: Any
    optimizer: ClippedOptimizer

    @property
    def module(self) -> nn.Module:
        """This rank's part of the network."""
        module: nn.Module = self.deepspeed_engine.module
        return module

    @property
    def wrapper(self) -> Any:
        """DeepSpeed's wrapper of the optimizer; the optimizer itself if there is none."""
        return self.deepspeed_engine.optimizer

    @property
    def divides_optimizer(self) -> bool:
        """Whether DeepSpeed divides the optimizer's state over data ranks, and writes each part to a file."""
        return divides_optimizer(self.wrapper)

    def optimizer_tensors(self) -> tuple[OptimizerTensor, ...]:
        """Return the fp32 tensors that the optimizer updates on this rank, and what each of them holds."""
        return tuple(optimizer_tensors(self.plan, self.grid, self.module, self.wrapper, self.optimizer))

    def counted_ranges(self) -> dict[Tensor, list[CountedRange]]:
        """Return the ranges of these tensors that no other rank counts."""
        return counted_ranges(self.plan, self.grid, self.module, self.wrapper, self.optimizer)


class DataArguments(TypedDict, total=False):
    """Arguments of `neox.data.run_data.build_data_iterators` that features give.

    Attributes:
        ledger: Record of the samples read of each dataset, after which the data resumes.
        reference: Function that returns the log-probabilities of answers by the reference model.
    """

    ledger: Mapping[str, Any] | None
    reference: Any


class Feature:
    """Something that takes part in a training. Every point does nothing unless it is overridden."""

    needs_computing_time = False
    """Whether it reads `StepResult.computing`, the time of forward and backward passes; the same on every rank."""

    # The start

    def load(self, engine: Engine, start: RunStart) -> None:
        """Take what a checkpoint stores of this feature (`start.saved`), or begin anew. Called again after a rollback.

        Raises:
            CheckpointError: On all ranks, if the checkpoint lacks something.
        """

    def opening_data(self, engine: Engine) -> DataArguments:
        """Return arguments with which the data is opened."""
        return {}

    def on_data(self, engine: Engine, data: Any) -> None:
        """Handle the data (`neox.data.run_data.DataIterators`) that was opened."""

    def on_start(self, state: TrainState) -> None:
        """Handle the start, before the first step."""

    # A step

    def batches(self, engine: Engine, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Return the next `count` micro batches of this data rank, maybe with further fields."""
        return batches

    def before_passes(self, engine: Engine) -> None:
        """Handle the moment before the forward and backward passes of a step, whose batches are complete."""

    def before_update(self, engine: Engine) -> None:
        """Handle the moment before each part of an update.

        Gradients are reduced, and clipped already if DeepSpeed's wrapper clips (the table of `neox.engine.engine`).
        A skipped update has no such moment, unless the optimizer itself finds out (fp32 with ZeRO 0).
        """

    def after_update(self, engine: Engine) -> None:
        """Handle the moment after each part of an update."""

    def weights_changed(self, engine: Engine) -> None:
        """Handle that something other than an update has put weights into the optimizer's tensors and the model."""

    def after_step(self, engine: Engine, result: StepResult) -> Mapping[str, float]:
        """Handle a completed step, and return numbers to log by their names in metrics."""
        return {}

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Handle the report of a step, with the numbers of all features."""

    may_roll_back = False
    """Whether `wants_rollback` may return True in this run; the same on every rank."""

    def wants_rollback(self, state: TrainState, report: StepReport) -> bool:
        """Return whether the run should load the newest checkpoint before this step and skip the batches up to it.

        Ranks may differ; one that asks is enough.

        Raises:
            TrainingError: To end the run.
        """
        return False

    def allows_rollback(self, engine: Engine, step: int) -> bool:
        """Return whether a rollback from a step may take place; the same on every rank."""
        return True

    def after_rollback(self, engine: Engine, back_to: int | None, step: int) -> None:
        """Handle a rollback. The engine is loaded (`load` was called); the data is not open again yet.

        Args:
            engine: The engine.
            back_to: Iteration of the checkpoint; None if there was none, so that the run simply continues.
            step: The step after which it was asked for.
        """

    # An evaluation

    def other_weights(self, engine: Engine) -> Mapping[str, AbstractContextManager[None]]:
        """Return contexts with other weights in the model by the suffix of the evaluation's name."""
        return {}

    def evaluation_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches of an evaluation, maybe looking at each."""
        return batches

    def tokens_per_character(self, engine: Engine) -> float | None:
        """Return the tokens per character of the set that was evaluated last; None if they are not counted."""
        return None

    def further_evaluations(self, engine: Engine) -> Mapping[str, Mapping[str, float]]:
        """Return further evaluations of the model when validation is due: scalars by name of the evaluation."""
        return {}

    def evaluation_numbers(self, state: TrainState, name: str) -> Mapping[str, float]:
        """Return further numbers of a completed evaluation, by their names in metrics."""
        return {}

    def on_evaluation(self, state: TrainState, name: str, scalars: Mapping[str, float | None]) -> None:
        """Handle an evaluation; `name` is `validation`, `test`, `tasks`, `validation_ema` or `test_ema`.

        A scalar is None if nothing was counted for it.
        """

    # A save

    def before_save(self, engine: Engine) -> None:
        """Handle the moment before a save. Raises NeoXError to refuse it."""

    def state(self, engine: Engine) -> Mapping[str, Any]:
        """Return plain values that a checkpoint stores; `load` finds them under the same names in `start.saved`."""
        return {}

    def files(self, engine: Engine) -> Mapping[str, Any]:
        """Return content of files that this rank adds to a checkpoint, by name; all ranks call it together."""
        return {}

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        """Handle a committed checkpoint. With `async_save` it is of an earlier iteration than the state's."""

    # The end

    def on_end(self, state: TrainState) -> None:
        """Handle the end after the last step, also of a run that ends early."""

    def on_failure(self, state: TrainState) -> None:
        """Release resources after an error. It is called instead of `on_end`, maybe before `on_start` has returned."""

    def on_exit(self) -> None:
        """Handle the end of the process, after the process groups are gone."""


def sum_over_ranks(engine: Engine, numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of numbers over all ranks by name, on every rank; a rank may lack some of them."""
    sums: dict[str, float] = defaultdict(float)
    for of_rank in engine.gather(numbers):
        for name, value in of_rank.items():
            sums[name] += value
    return sums


MakeFeatures = Callable[[TrainedModel, "RunStart"], Sequence[Feature]]
"""Builds the features of a run, in the order in which their points are called."""


def no_features(model: TrainedModel, start: RunStart) -> Sequence[Feature]:
    """Return no features, for a model that only takes steps."""
    return ()
