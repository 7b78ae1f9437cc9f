"""Training loop: steps, evaluations, saves and the conditions that end it; all else is a callback."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import torch

from neox.architecture import recomputed_flops_per_token, training_flops_per_token
from neox.data.batches import Batch, BatchIterator
from neox.data.build import DataIterators
from neox.engine import BackgroundSaves, Engine, SaveReport, save_checkpoint
from neox.evaluation.results import perplexity_of
from neox.launch import busy_saving, report_progress
from neox.log import get_logger
from neox.plan import RunPlan
from neox.train.callbacks import Callback, StepReport, TrainState
from neox.train.stopping import NonFiniteRule, StopSignals

_log = get_logger(__name__)


class Trainer:
    """Training of an engine on data until `train_iters`, a signal, or `exit_interval`.

    Args:
        plan: The resolved run.
        engine: Holds the model; may have completed iterations already.
        data: Endless iterators of this data rank's micro batches.
        callbacks: Of rank 0; other ranks give none.
        tasks: Scores `eval_tasks` wherever validation is due; all ranks call it together.
    """

    def __init__(
        self,
        plan: RunPlan,
        engine: Engine,
        data: DataIterators,
        callbacks: Sequence[Callback] = (),
        tasks: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self.plan, self.engine, self.data, self.callbacks = plan, engine, data, tuple(callbacks)
        self.tasks = tasks
        self._scored: int | None = None
        self.state = TrainState(iteration=engine.iteration)
        self.start = engine.iteration
        self.train_iters = plan.config.training.train_iters or 0
        self.rule = NonFiniteRule(plan.config.training.max_nonfinite_steps, plan.precision == "fp16")
        self._flops_per_token = cache(partial(_flops_per_token, plan))  # by sequence length
        self._saved: int | None = None
        self._evaluated: int | None = None
        keys = plan.config.checkpoint
        self._background = BackgroundSaves(engine) if keys.async_save and keys.save is not None else None
        self._signals = StopSignals()
        self._train_batches = TimedBatches(data.train)

    def fit(self) -> int:
        """Train until the end, and evaluate and save there.

        Returns:
            The exit code: 0, or 130 after Ctrl-C.

        Raises:
            NeoXError: Something that users can mend; callbacks have been told.
        """
        try:
            self._notify("on_start", self.state)
            with self._signals:
                self._train()
                self._finish()
                self._notify("on_end", self.state)
        except BaseException:
            self._notify("on_failure", self.state)
            raise
        return self._signals.exit_code

    def _train(self) -> None:
        """Step, evaluate and save until the last iteration or a reason to stop."""
        state, training = self.state, self.plan.config.training
        if state.iteration >= self.train_iters:
            _log.warning("iteration %d of %d: there is nothing left to train", state.iteration, self.train_iters)
        if state.iteration == 0 and 0 in self.plan.save_iterations:
            self.save()
        while state.iteration < self.train_iters and not self._should_stop():
            self.step()
            self._follow_background_save()
            if state.iteration % training.eval_interval == 0:
                self.evaluate("validation", self.data.valid)
                self.score_tasks()
            if state.iteration in self.plan.save_iterations:
                self.save()

    def _finish(self) -> None:
        """Evaluate after the last iteration; save where the run ends earlier."""
        if self.state.iteration >= self.train_iters:
            self.evaluate("validation", self.data.valid)
            self.score_tasks()
            self.evaluate("test", self.data.test)
        elif self.plan.config.checkpoint.save is not None:
            self.save()
        else:
            _log.warning("no `save` directory is set: iteration %d is not saved", self.state.iteration)
        if self._background is not None:
            self._background.wait()
            self._report_saves(self._background)

    def step(self) -> None:
        """Do one step and report it.

        Raises:
            TrainingError: Too many successive losses or gradient norms were not finite.
        """
        schedule, done = self.plan.batch_schedule, self.state.iteration
        started = time.perf_counter()
        result = self.engine.train_batch(self._train_batches)
        seconds = time.perf_counter() - started
        state = self.state
        state.iteration = self.engine.iteration
        state.skipped += result.skipped
        state.nonfinite += self.rule.counts(result)
        samples, length = schedule.batch_size(done), schedule.seq_length(done)
        flops = samples * length * self._flops_per_token(length)
        report = StepReport(
            result=result,
            seconds=seconds,
            samples=samples,
            seq_length=length,
            samples_per_second=samples / seconds,
            tokens_per_second=samples * length / seconds,
            flops_per_second_per_gpu=flops / seconds / self.plan.grid.world_size,
            peak_memory=_peak_memory(),
            reading=self._train_batches.take_seconds(),
        )
        self._notify("on_step", state, report)
        report_progress()
        self.rule.enforce(result, state.iteration)

    def evaluate(self, name: str, batches: BatchIterator | None) -> None:
        """Report the mean scores over `eval_iters` batches and the perplexity, once per iteration.

        A signal ends the evaluation without a report.

        Args:
            name: `validation` or `test`.
            batches: None where the data has no such part.
        """
        iterations = self.plan.config.training.eval_iters
        if batches is None or iterations == 0 or (name == "validation" and self._evaluated == self.state.iteration):
            return
        started = time.perf_counter()
        totals = dict.fromkeys(self.engine.objective.names, 0.0)
        for done in range(iterations):
            if self._asked_to_stop():
                _log.warning("%s: interrupted after %d of %d batches, not reported", name, done, iterations)
                return
            for key, score in self.engine.eval_batch(batches).items():
                totals[key] += score
            report_progress()
        scores = {key: total / iterations for key, total in totals.items()}
        scores["lm_loss_ppl"] = perplexity_of(scores["lm_loss"])
        if name == "validation":
            self._evaluated = self.state.iteration
        scalars = {f"{name}/{key}": value for key, value in scores.items()}
        self._notify("on_evaluation", self.state, name, {**scalars, f"timers/{name}": time.perf_counter() - started})

    def score_tasks(self) -> None:
        """Report the scores of `eval_tasks`, once per iteration."""
        if self.tasks is None or self._scored == self.state.iteration or self._asked_to_stop():
            return
        self._scored = self.state.iteration
        self._notify("on_evaluation", self.state, "tasks", self.tasks())
        report_progress()

    @busy_saving()
    def save(self) -> None:
        """Write a checkpoint of this iteration, once; with `async_save`, begin to.

        Raises:
            CheckpointError: The checkpoint could not be written; with `async_save`, maybe the one before it.
        """
        save = self.plan.config.checkpoint.save
        if save is None or self._saved == self.state.iteration:
            return
        started = time.perf_counter()
        self._saved = self.state.iteration
        if self._background is not None:
            self._background.start(Path(save))
            self._report_saves(self._background)
        else:
            path = save_checkpoint(self.engine, Path(save))
            seconds = time.perf_counter() - started
            self._notify("on_save", self.state, SaveReport(path, self.state.iteration, seconds, seconds))
        report_progress()

    def _follow_background_save(self) -> None:
        """Report a save that has ended meanwhile. Raises CheckpointError, on all ranks after the same step."""
        if self._background is None:
            return
        if self.engine.any_rank(self._background.failed):
            self._background.wait()
        self._report_saves(self._background)

    def _report_saves(self, background: BackgroundSaves) -> None:
        for report in background.take_reports():
            self._notify("on_save", self.state, report)

    def _asked_to_stop(self) -> bool:
        """Whether any rank got a signal; the same answer on every rank, which all ask together."""
        return self.engine.any_rank(self._signals.received is not None)

    def _should_stop(self) -> bool:
        """Whether any rank got a signal, or `exit_interval` is due; the same answer on every rank."""
        exit_interval = self.plan.config.training.exit_interval
        iteration = self.state.iteration
        if exit_interval and iteration > self.start and iteration % exit_interval == 0:
            _log.info("exit_interval: ending after iteration %d", iteration)
            return True
        if self._asked_to_stop():
            _log.info("a signal asked to end after iteration %d", iteration)
            return True
        return False

    def _notify(self, event: str, *arguments: object) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*arguments)


class TimedBatches:
    """Iterator of batches that measures the time spent in the iterator it wraps."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._seconds = 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        batch = next(self._batches)
        self._seconds += time.perf_counter() - started
        return batch

    def take_seconds(self) -> float:
        """Return the seconds waited since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _flops_per_token(plan: RunPlan, length: int) -> int:
    """Return the operations of a training step for one token, recomputed ones included."""
    asked = training_flops_per_token(plan.layers, length, predicted=plan.config.model.predicted_tokens)
    return asked + recomputed_flops_per_token(plan.layers, length, plan.recomputed_parts)


def _peak_memory() -> int:
    """Most bytes held so far: by tensors on the GPU, or by the whole process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
