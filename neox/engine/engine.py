"""Training engine: steps, evaluations and counters of a model in training on DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from neox.engine.checkpoints.run_files import RunFiles
from neox.engine.determinism import readable_refusal
from neox.engine.distributed import limit_collectives
from neox.engine.feature import DataArguments, Feature, TrainedModel
from neox.engine.label_weights import EvaluationResult
from neox.engine.measurements import StepValues, Timers
from neox.engine.reports import StepResult
from neox.engine.steps import Steps
from neox.errors import TrainingError
from neox.model import NetworkOutput, move_selection_biases
from neox.objectives import Batch
from neox.optim import LRSchedule
from neox.parallel import derive_seed

T = TypeVar("T")


class Engine:
    """A model in training on this rank; all ranks call every method together.

    Args:
        model: The model as DeepSpeed has wrapped it.
        steps: How the micro batches of a step run.
        timers: Timers of the parts of a step.
        run_files: What checkpoints say of the run.
        features: What takes part in the training besides, in the order of its points (`neox.engine.feature`).

    Attributes:
        deepspeed_engine: DeepSpeed's engine, which holds the model.
        schedule: Schedule of the learning rate.
        iteration: Number of completed steps, skipped ones included.
    """

    def __init__(
        self,
        model: TrainedModel,
        steps: Steps,
        timers: Timers,
        run_files: RunFiles,
        features: Sequence[Feature] = (),
    ) -> None:
        self.model = model
        self.plan = model.plan
        self.grid = model.grid
        self.device = model.device
        self.objective = model.objective
        self.optimizer = model.optimizer
        self.deepspeed_engine = steps.engine
        self.schedule = LRSchedule(self.plan, self.optimizer)
        self.deepspeed_engine.lr_scheduler = self.schedule  # stepped by DeepSpeed after each applied step
        self.run_files = run_files
        self.features = tuple(features)
        self.iteration = 0
        self._steps = steps
        self._timers = timers
        self._values = StepValues(self.device, len(self.objective.names))
        self._before_overwrite: Callable[[], None] | None = None
        self.optimizer.register_step_pre_hook(self._before_update)
        self.optimizer.register_step_post_hook(self._after_update)
        # A gloo group for flags of the hosts, so that agreeing on them does not wait for the GPUs.
        self._hosts: dist.ProcessGroup | None = None
        if self.device.type == "cuda" and self.grid.world_size > 1:
            self._hosts = dist.new_group(backend="gloo")
        limit_collectives(self.plan)

    def train_batch(self, batches: Iterator[Batch]) -> StepResult:
        """Do one optimizer step on the next micro batches, as many and as long as the plan's batch schedule says.

        Random streams are a function of (seed, iteration, rank), so that a resumed run draws the same numbers as an
        uninterrupted one.

        A step, from top to bottom. DeepSpeed's part is in `neox.engine.steps`; it calls the optimizer (and so
        `_before_update` and `_after_update`) once, in several calls with ZeRO 3, and not at all if fp16 overflowed.

            features.batches        complete the micro batches
            features.before_passes
            forward, backward       of every micro batch, whose gradients are accumulated
            reduction               over data ranks
              _before_update        scores and norm are copied to the host; features.before_update
              the optimizer         clips, updates the weights
              _after_update         features.after_update
            the learning rate       moves on, unless the step was skipped
            selection biases        of routers move
            features.after_step     also of a skipped step: averages, numbers to log

        Args:
            batches: Micro batches of this data rank, as `neox.data` makes them.

        Raises:
            TrainingError: If gradients overflow fp16 at the smallest loss scale.
            NeoXError: If a feature ends the run.
        """
        self.grid.seed(derive_seed(self.plan.config.training.seed, "step", self.iteration))
        skipped_before = self.deepspeed_engine.skipped_steps
        lr = self.schedule.lr
        loss_scale = self.loss_scale
        self._set_batch_size()
        length = self.plan.batch_schedule.seq_length(self.iteration)
        self._timers.take()  # drops what an evaluation took
        with _readable_scaler_failure(self.iteration + 1), readable_refusal():
            count = self.deepspeed_engine.gradient_accumulation_steps()
            batches = self._completed(self._cut(batches, length), count)
            for feature in self.features:
                feature.before_passes(self)
            self._steps.train(batches, length)
        if self.plan.architecture.router_bias:
            move_selection_biases(self.deepspeed_engine.module, self.grid)
        self.iteration += 1
        skipped = self.deepspeed_engine.skipped_steps > skipped_before
        scores, grad_norm = self._take_values(skipped)
        result = StepResult(
            scores=scores,
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            lr=lr,
            skipped=skipped,
            computing=self._timers.take_computing(),
            timers=self._timers.take(),
        )
        numbers: dict[str, float] = {}
        for feature in self.features:
            numbers |= feature.after_step(self, result)
        return replace(result, numbers=numbers)

    @torch.no_grad()
    def eval_batch(self, batches: Iterator[Batch]) -> EvaluationResult:
        """Return the objective's mean scores of the next `gradient_accumulation_steps` micro batches."""
        count = self.plan.batch.gradient_accumulation_steps
        batches = self._completed(batches, count)
        scores, amount = self._steps.evaluate(batches, count, self.plan.batch_schedule.full_length)
        return EvaluationResult(dict(zip(self.objective.names, scores.tolist(), strict=True)), amount)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor | None:
        """Return the logits [B, S, V/tp] of tokens [B, S] on the last stage's ranks; None on others."""
        return self._steps.logits(tokens)

    @torch.no_grad()
    def apply(self, inputs: Mapping[str, Tensor], function: Callable[[NetworkOutput], Tensor], zeros: Tensor) -> Tensor:
        """Return a function of the network's output outside of training, on all ranks of this model.

        Args:
            inputs: Inputs of an objective, on the device.
            function: The function.
            zeros: Zeros of the shape and type of its result.
        """
        found = self._steps.apply(inputs, function)
        if self.grid.pp_size == 1:
            assert found is not None
            return found
        result = zeros if found is None else found
        dist.all_reduce(result, group=self.grid.pp_group)
        return result

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in the order of ranks."""
        values = [value] * self.grid.world_size
        if self.grid.world_size > 1:
            dist.all_gather_object(values, value, group=self._hosts)
        return values

    def any_rank(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank; every rank gets the same answer."""
        if self.grid.world_size == 1:
            return flag
        answer = torch.tensor(int(flag))
        dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self._hosts)
        return bool(answer)

    @property
    def loss_scale(self) -> float:
        """Loss scale of the next step."""
        if self.plan.precision != "fp16":
            return 1.0
        return float(self.deepspeed_engine.optimizer.loss_scale)

    def before_next_overwrite(self, call: Callable[[], None]) -> None:
        """Call a function once, just before weights or optimizer states are overwritten next.

        Copies that a save makes in the background must end before that.
        """
        self._before_overwrite = call

    def announce_overwrite(self) -> None:
        """Let a save copy what it needs; called before anything overwrites weights, their averages or states."""
        if self._before_overwrite is not None:
            self._before_overwrite()
            self._before_overwrite = None

    def data_arguments(self) -> DataArguments:
        """Return the arguments of `neox.data.build.build_data_iterators` that features give."""
        arguments: DataArguments = {}
        for feature in self.features:
            arguments |= feature.opening_data(self)
        return arguments

    def saved_state(self) -> dict[str, Any]:
        """Return what features store in a checkpoint next to the weights, by name."""
        saved: dict[str, Any] = {}
        for feature in self.features:
            saved |= feature.state(self)
        return saved

    def start_at(self, iteration: int) -> None:
        """Go on from a number of completed steps."""
        self.iteration = iteration

    def restore_counters(self, client_state: Mapping[str, Any]) -> None:
        """Set DeepSpeed's counters and the learning rate's position to those of a checkpoint."""
        deepspeed_engine = self.deepspeed_engine
        deepspeed_engine.global_steps = client_state["global_steps"]
        deepspeed_engine.global_samples = client_state["global_samples"]
        deepspeed_engine.skipped_steps = client_state["skipped_steps"]
        self.schedule.load_state_dict(client_state["lr_scheduler"])

    def _set_batch_size(self) -> None:
        """Set DeepSpeed to this step's number of micro batches."""
        deepspeed_engine = self.deepspeed_engine
        # DeepSpeed counts a micro batch for each rank with the same weights; context ranks share one.
        size = self.plan.batch_schedule.batch_size(self.iteration) * self.plan.grid.cp_size
        if size != deepspeed_engine.train_batch_size():
            deepspeed_engine.set_train_batch_size(size)
        # DeepSpeed ends a step when its count of micro batches is a multiple of the step's, which may change.
        deepspeed_engine.micro_steps = 0

    def _cut(self, batches: Iterator[Batch], length: int) -> Iterator[Batch]:
        """Return the micro batches, cut to a length."""
        if length == self.plan.batch_schedule.full_length:
            return batches
        return ({name: value[:, :length] for name, value in batch.items()} for batch in batches)

    def _completed(self, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Return the next micro batches, completed by features."""
        for feature in self.features:
            batches = feature.batches(self, batches, count)
        return batches

    def _take_values(self, skipped: bool) -> tuple[dict[str, float], float]:
        """Return the scores and the gradient norm of the step; the norm of a skipped update is inf."""
        values = self._values.take()
        if values is None:  # nothing was queued, because DeepSpeed skipped the update before it began
            scores = self.deepspeed_engine.step_scores.tolist()
            skipped = True
        else:
            scores, norm = values
        if skipped:
            norm = math.inf
        elif self.optimizer.scope is not None:
            norm = self.optimizer.last_norm
        return dict(zip(self.objective.names, scores, strict=True)), norm

    def _before_update(self, *_: object) -> None:
        """Handle the moment before each part of an update.

        The copies of scores and norm are queued here, and read after the step. So the host waits for what was queued
        before the update only, and prepares the next step while the device updates.
        """
        for feature in self.features:
            feature.before_update(self)
        self.announce_overwrite()
        norm = getattr(self.deepspeed_engine.optimizer, "_global_grad_norm", None)
        self._values.put(self.deepspeed_engine.step_scores, 0.0 if norm is None else norm)

    def _after_update(self, *_: object) -> None:
        for feature in self.features:
            feature.after_update(self)


@contextmanager
def _readable_scaler_failure(iteration: int) -> Iterator[None]:
    """Replace DeepSpeed's bare exception about the loss scale by an error that says what to do."""
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise TrainingError(
            f"iteration {iteration}: gradients overflow fp16 even at the smallest loss scale (fp16.min_loss_scale); "
            "train in bf16, lower the learning rate, or inspect the data of this step"
        ) from error
