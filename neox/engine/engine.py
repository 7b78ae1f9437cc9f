"""Training engine: steps, evaluations and counters of a model in training on DeepSpeed.

A step crosses into DeepSpeed and back six times (<1> to <6>). In the order of time, callees indented:

    Engine.train_batch                seed, number and length of micro batches; features.batches, before_passes
      WholeNetworkRunner.train        for each micro batch:                                 micro_batches.py
        DeepSpeedEngine.forward
    <1>   GPT.forward                 the network and the objective's scores                model/gpt.py
    <2> PlainEngine.backward          scales the loss for fp16                              deepspeed_patches/engines.py
          DeepSpeedEngine.backward    autograd; gradients are accumulated (ZeRO 2, 3: reduce-scattered at once)
    <3>     PlainEngine.allreduce_gradients   after the last micro batch: average over data ranks
                                            (bf16 with ZeRO 1: waits for what <2> has started, `LayerReduction`)
        DeepSpeedEngine.step          nothing before the last micro batch, then:
    <4>   wrapper.step                looks for overflow, clips: table below                deepspeed_patches/bf16_*.py
    <5>     Engine._before_update     scores and norm start to the host; features.before_update
            ClippedOptimizer.step     with ZeRO 0 the norm and clipping; the update         optim/clipping.py
            Engine._after_update      features.after_update
    <6>   LRSchedule.step             the next learning rate, unless the update was skipped optim/schedule.py
    Engine.train_batch                selection biases of routers, iteration + 1, features.after_step

With pipeline stages `PipelineRunner.train` calls DeepSpeed's `train_batch`, which runs the instructions of
`pipeline/instructions.py`. `deepspeed_patches/pipeline_engine.py` maps each of them to a method, and that calls
DeepSpeed's code for a pass. <1> and <2> are then instructions, <3> is ReduceTiedGrads and ReduceGrads, and <4> to <6>
are OptimizerStep.

The wrapper that DeepSpeed puts around our optimizer, who finds gradients that are not finite (and so skips the update),
who clips, and what holds the fp32 weights that the optimizer updates:

    precision   ZeRO   wrapper                     not finite   clips       fp32 weights
    fp32        0      none                        optimizer    optimizer   the parameters themselves
    fp32, fp16  1, 2   ZeroOptimizer (ours)        wrapper      wrapper     a flat part of each group on a data rank
    fp16        0      UnfusedOptimizer (ours)     wrapper      optimizer   a copy of each parameter
    bf16        0      UnfusedOptimizer (ours)     wrapper      optimizer   a copy of each parameter
    bf16 (pp)   0      BF16Optimizer (ours)        wrapper      wrapper     a flat part of each group on a data rank
    bf16        1      BF16Optimizer (ours) *      wrapper      wrapper     a flat part of each group on a data rank
    bf16        2      ZeroOptimizer (ours)        wrapper      wrapper     a flat part of each group on a data rank
    any         3      SwappedStage3 (ours)        wrapper      wrapper     sub-groups with a part of each parameter

    (pp) with pipeline stages    * ZeroOptimizer with offload, or if gradients are accumulated in bf16

`TrainedModel.wrapper` is the wrapper, `clips_itself` says who clips, and `optimizer_tensors` says which parameters the
fp32 tensors hold.

An update is skipped if gradients are not finite: fp16 while its loss scale is too large, or any precision after a NaN.

    a skipped update leaves alone                  a skipped update moves all the same
    ---------------------------------------------  ------------------------------------------------------------
    weights and their fp32 copies                  `Engine.iteration`, and what follows from it: seeds, batch
    the optimizer's states and counts of steps       size and length, samples read, evaluations and saves
    the learning rate: `LRSchedule.iteration`      DeepSpeed's `global_steps`, `global_samples`, `skipped_steps`
      counts applied updates, as in gpt-neox       fp16's loss scale, which shrinks
    the noise scale: it has no gradients           selection biases of routers: they follow the tokens of the passes
    the window of losses of spikes, if the loss    the average of weights (`ema_decay`): it counts the step, and comes
      is not finite                                  closer to the weights. That is decided, and stays so
                                                   the window of losses of spikes, if the loss is finite

A skipped update is no skipped batch. Four names for four things:

    `StepResult.update_skipped`      whether this step left the weights unchanged
    `TrainState.skipped_updates`     number of such steps of this process, for log lines
    DeepSpeed's `skipped_steps`      number of such steps of the run; checkpoints store it
    `LossSpikes.skipped_batches`     steps whose samples are left out after a rollback, and never trained on
"""

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
from neox.engine.determinism import NO_ALGORITHM
from neox.engine.distributed import limit_collectives
from neox.engine.feature import DataArguments, Feature, TrainedModel
from neox.engine.measurements import StepValues, Timers
from neox.engine.micro_batches import EvaluationResult, MicroBatchRunner
from neox.engine.reports import StepResult
from neox.errors import TrainingError
from neox.model import NetworkOutput, move_selection_biases
from neox.objectives import Batch, ScoreTable, evaluated_objective
from neox.optim import LRSchedule
from neox.parallel import derive_seed

T = TypeVar("T")


class Engine:
    """A model in training on this rank; all ranks call every method together.

    Args:
        model: The model as DeepSpeed has wrapped it.
        runner: Runs the micro batches of a step.
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
        runner: MicroBatchRunner,
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
        self.deepspeed_engine = runner.engine
        self.schedule = LRSchedule(self.plan, self.optimizer)
        self.deepspeed_engine.lr_scheduler = self.schedule  # stepped by DeepSpeed after each applied step
        self.run_files = run_files
        self.features = tuple(features)
        self.iteration = 0
        self._runner = runner
        self._timers = timers
        self._table = ScoreTable(self.objective)
        self._values = StepValues(self.device, len(self._table.rows))
        self._before_overwrite: Callable[[], None] | None = None
        self.optimizer.register_step_pre_hook(self._before_update)
        self.optimizer.register_step_post_hook(self._after_update)
        # A gloo group for flags of the hosts, so that agreeing on them does not wait for the devices.
        self._hosts: dist.ProcessGroup | None = None
        if self.device.type != "cpu" and self.grid.world_size > 1:
            self._hosts = dist.new_group(backend="gloo")
        limit_collectives(self.plan)

    def train_batch(self, batches: Iterator[Batch]) -> StepResult:
        """Do one optimizer step on the next micro batches. The head of this file shows its way through DeepSpeed.

        Their number and length follow from the plan's batch schedule.

        Args:
            batches: Micro batches of this data rank, as `neox.data` makes them.

        Raises:
            TrainingError: If gradients overflow fp16 at the smallest loss scale.
            NeoXError: If a feature ends the run.
        """
        deepspeed_engine = self.deepspeed_engine
        schedule = self.plan.batch_schedule
        # Random streams are a function of (seed, iteration, rank): a resumed run draws the same numbers.
        self.grid.seed(derive_seed(self.plan.config.training.seed, "step", self.iteration))

        # DeepSpeed counts a micro batch for each rank with the same weights; context ranks share one.
        batch_size = schedule.batch_size(self.iteration) * self.plan.grid.cp_size
        if batch_size != deepspeed_engine.train_batch_size():
            deepspeed_engine.set_train_batch_size(batch_size)
        # DeepSpeed updates when its count of micro batches is a multiple of the step's, which may change.
        deepspeed_engine.micro_steps = 0
        count = deepspeed_engine.gradient_accumulation_steps()
        length = schedule.seq_length(self.iteration)
        if length < schedule.full_length:
            batches = _cut(batches, length)

        # Read before the update, which sets those of the next step.
        lr = self.schedule.lr
        loss_scale = self.loss_scale
        skipped_before = deepspeed_engine.skipped_steps
        self._timers.take()  # drops what an evaluation took

        with readable_errors(self.iteration + 1):
            batches = self._completed(batches, count)
            for feature in self.features:
                feature.before_passes(self)
            self._runner.train(batches, length)  # passes, reduction, update, learning rate
        if self.plan.architecture.router_bias:
            self.announce_overwrite()  # an update that was skipped has not done it
            move_selection_biases(deepspeed_engine.module, self.grid)
        self.iteration += 1

        update_skipped = deepspeed_engine.skipped_steps > skipped_before
        scores, grad_norm = self._scores_and_norm(update_skipped)
        result = StepResult(
            scores=scores,
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            lr=lr,
            update_skipped=update_skipped,
            computing=self._timers.take_computing(),
            timers=self._timers.take(),
        )
        numbers: dict[str, float] = {}
        for feature in self.features:
            numbers |= feature.after_step(self, result)
        return replace(result, numbers=numbers)

    def _before_update(self, *_: object) -> None:
        """Handle the moment before each part of an update.

        The copies of scores and norm are queued here, and read after the step. So the host waits for what was queued
        before the update only, and prepares the next step while the device updates.
        """
        for feature in self.features:
            feature.before_update(self)
        self.announce_overwrite()
        norm = getattr(self.deepspeed_engine.optimizer, "_global_grad_norm", None)
        self._values.put(self.deepspeed_engine.step_rows, 0.0 if norm is None else norm)

    def _after_update(self, *_: object) -> None:
        """Handle the moment after each part of an update."""
        for feature in self.features:
            feature.after_update(self)

    def _scores_and_norm(self, update_skipped: bool) -> tuple[dict[str, float | None], float]:
        """Return the scores of the step by name, and its gradient norm, which is inf if the update was skipped."""
        values = self._values.take()
        if values is None:
            # Nothing was queued: DeepSpeed's wrapper skipped the update before it called the optimizer.
            rows = self.deepspeed_engine.step_rows.tolist()
            norm = math.inf
        else:
            rows, norm = values
        if update_skipped:
            norm = math.inf
        elif values is not None and self.optimizer.scope is not None:
            norm = self.optimizer.last_norm  # computed inside the update, after the copies were queued
        return self._table.finish(rows), norm

    @torch.no_grad()
    def eval_batch(self, batches: Iterator[Batch], count: int | None = None) -> EvaluationResult:
        """Return the objective's scores of the next micro batches.

        Args:
            batches: Micro batches of this data rank.
            count: Number of micro batches of each data rank; None for those of a step.
        """
        if count is None:
            count = self.plan.batch.gradient_accumulation_steps
        batches = self._completed(batches, count)
        rows = self._runner.evaluate(batches, count, self.plan.batch_schedule.full_length)
        return EvaluationResult(ScoreTable(evaluated_objective(self.objective)), rows.cpu().double())

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor | None:
        """Return the logits [B, S, V/tp] of tokens [B, S] on the last stage's ranks; None on others."""
        return self._runner.logits(tokens)

    @torch.no_grad()
    def apply(self, inputs: Mapping[str, Tensor], function: Callable[[NetworkOutput], Tensor], zeros: Tensor) -> Tensor:
        """Return a function of the network's output outside of training, on all ranks of this model.

        Args:
            inputs: Inputs of an objective, of this context rank's tokens, on the device.
            function: The function.
            zeros: Zeros of the shape and type of its result.
        """
        found = self._runner.apply(inputs, function)
        if self.grid.pp_size == 1:
            assert found is not None
            return found
        result = zeros if found is None else found.contiguous()  # gloo adds up the memory under a view
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
        """Return the arguments of `neox.data.run_data.build_data_iterators` that features give."""
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

    def _completed(self, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Return the next micro batches, completed by features."""
        for feature in self.features:
            batches = feature.batches(self, batches, count)
        return batches


def _cut(batches: Iterator[Batch], length: int) -> Iterator[Batch]:
    """Yield micro batches, cut to the first tokens of each row."""
    for batch in batches:
        cut = {name: value[:, :length] for name, value in batch.items() if name != "lengths"}
        if "lengths" in batch:  # [B], not [B, S, ...]: the tokens of each row before its padding
            cut["lengths"] = batch["lengths"].clamp(max=length)
        yield cut


@contextmanager
def readable_errors(iteration: int) -> Iterator[None]:
    """Replace bare exceptions of DeepSpeed and torch by errors that say what to do.

    Args:
        iteration: The step, counted from 1.

    Raises:
        TrainingError: If fp16's loss scale cannot shrink further, or `deterministic` meets an operation without a
            deterministic algorithm.
    """
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" in str(error):
            raise TrainingError(
                f"iteration {iteration}: gradients overflow fp16 even at the smallest loss scale "
                "(fp16.min_loss_scale); train in bf16, lower the learning rate, or inspect the data of this step"
            ) from error
        operation, found, _ = str(error).partition(NO_ALGORITHM)
        if found and isinstance(error, RuntimeError):
            raise TrainingError(
                f"deterministic: {operation.strip()} has no deterministic algorithm on this device; set "
                "`deterministic: false`, or choose settings of the network without it"
            ) from error
        raise
