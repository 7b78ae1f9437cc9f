"""Training loop: steps, evaluations, saves and the conditions that end it. Everything else is a feature."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path

from torch import Tensor

from neox.architecture import recomputed_flops_per_token, training_flops_per_token
from neox.data.batches import Batch
from neox.data.run_data import DataIterators, EvaluationSet
from neox.engine import (
    BackgroundSaves,
    Engine,
    EvaluationResult,
    Feature,
    SaveReport,
    StepReport,
    TrainState,
    roll_back,
    save_checkpoint,
)
from neox.evaluation.evaluation_scalars import evaluation_scalars
from neox.launch import busy_saving, report_progress
from neox.log import get_logger
from neox.plan import RunPlan
from neox.train.stopping import NonFiniteRule, StopSignals

_log = get_logger(__name__)


class Trainer:
    """Trains an engine on data until `train_iters`, a signal, or `exit_interval`.

    Args:
        plan: The resolved run.
        engine: Engine with the model and its features. It may have completed iterations already.
        data: Endless iterators of this data rank's micro batches.
        open_data: Function that opens the data again from the engine's iteration on, after a rollback.
        more: Further features that only observe the loop.
    """

    def __init__(
        self,
        plan: RunPlan,
        engine: Engine,
        data: DataIterators,
        open_data: Callable[[], DataIterators] | None = None,
        more: Sequence[Feature] = (),
    ) -> None:
        self.plan = plan
        self.engine = engine
        self.data = data
        self.features = (*engine.features, *more)
        self.state = TrainState(iteration=engine.iteration)
        self.start = engine.iteration
        self.train_iters = plan.config.training.train_iters or 0
        fp16 = plan.config.deepspeed.fp16
        has_fixed_scale = fp16 is not None and bool(fp16.loss_scale)
        is_scale_dynamic = plan.precision == "fp16" and not has_fixed_scale
        self.rule = NonFiniteRule(plan.config.training.max_nonfinite_steps, is_scale_dynamic)
        self._has_labels = True  # whether the last step had a label
        self._saved: int | None = None  # last iteration that was saved
        self._evaluated: int | None = None  # last iteration that was evaluated on validation data
        self._evaluated_further: int | None = None  # last iteration with further evaluations
        keys = plan.config.checkpoint
        self._background = BackgroundSaves(engine) if keys.async_save and keys.save is not None else None
        self._open_data = open_data
        self._signals = StopSignals()
        self._train_batches = TimedBatches(data.train)
        self._flops_per_token = cache(partial(_flops_per_token, plan))  # cached by sequence length
        for feature in self.features:
            feature.on_data(engine, data)

    def fit(self) -> int:
        """Train until the end, then evaluate or save.

        Returns:
            The exit code: 0, or 130 after Ctrl-C.

        Raises:
            NeoXError: If something fails that the user can fix. Features were told first (`on_failure`).
        """
        try:
            for feature in self.features:
                feature.on_start(self.state)
            with self._signals:
                self._train()
                self._finish()
                for feature in self.features:
                    feature.on_end(self.state)
        except BaseException:
            for feature in self.features:
                feature.on_failure(self.state)
            raise
        return self._signals.exit_code

    def _train(self) -> None:
        """Step, evaluate and save until the last iteration or a reason to stop."""
        state = self.state
        if state.iteration >= self.train_iters:
            _log.warning("iteration %d of %d: there is nothing left to train", state.iteration, self.train_iters)
        if state.iteration == 0 and 0 in self.plan.save_iterations:
            self.save()
        if state.iteration == 0 and self.plan.config.training.eval_at_start:
            self.evaluate("validation", self.data.valid)
        while state.iteration < self.train_iters and not self._should_stop():
            report = self.step()
            self._follow_background_save()
            if self._has_rolled_back(report):
                continue
            if state.iteration % self.plan.config.training.eval_interval == 0:
                self.evaluate("validation", self.data.valid)
                self.evaluate_further()
            if state.iteration in self.plan.save_iterations:
                self.save()

    def _finish(self) -> None:
        """Evaluate after the last iteration; save if the run ends earlier."""
        if self.state.iteration >= self.train_iters:
            self.evaluate("validation", self.data.valid)
            self.evaluate_further()
            self.evaluate("test", self.data.test)
        elif self.plan.config.checkpoint.save is not None:
            self.save()
        else:
            _log.warning("no `save` directory is set: iteration %d is not saved", self.state.iteration)
        if self._background is not None:
            self._background.wait()
            self._report_saves(self._background)

    def step(self) -> StepReport:
        """Do one step and report it.

        Raises:
            TrainingError: If too many successive losses or gradient norms were not finite.
        """
        samples = self.plan.batch_schedule.batch_size(self.state.iteration)
        length = self.plan.batch_schedule.seq_length(self.state.iteration)
        started = time.perf_counter()
        result = self.engine.train_batch(self._train_batches)
        seconds = time.perf_counter() - started
        self.state.iteration = self.engine.iteration
        self.state.skipped_updates += result.update_skipped
        self.state.nonfinite += self.rule.counts(result)
        report = StepReport(
            result=result,
            seconds=seconds,
            samples=samples,
            seq_length=length,
            flops=samples * length * self._flops_per_token(length),
            ranks=self.plan.grid.world_size,
            reading=self._train_batches.take_seconds(),
        )
        if result.loss is None and self._has_labels:
            _log.warning(
                "iteration %d: no sample of this step has a label, so there is no loss and no gradient; weight decay "
                "and the optimizer's momentum still move the weights",
                self.state.iteration,
            )
        self._has_labels = result.loss is not None
        for feature in self.features:
            feature.on_step(self.state, report)
        report_progress(self.state.iteration)
        self.rule.enforce(result, self.state.iteration)
        return report

    def _has_rolled_back(self, report: StepReport) -> bool:
        """Go back to a checkpoint if a feature asks for it after a step.

        The head of `neox.features.loss_spikes.run` goes through an example.
        """
        # Every feature is asked, whatever the others answer: it looks at the step then, and may end the run.
        asks = [feature.wants_rollback(self.state, report) for feature in self.features]
        may_roll_back = any(feature.may_roll_back for feature in self.features)
        if not may_roll_back:
            return False  # the same on every rank, so none need ask the others
        if not self.engine.any_rank(any(asks)):
            return False
        step = self.state.iteration
        if self._background is not None:
            self._background.wait()
            self._report_saves(self._background)
        if self._open_data is None:
            _log.warning("iteration %d: no rollback, because this trainer cannot open its data again", step)
            return False
        if not all(feature.allows_rollback(self.engine, step) for feature in self.features):
            return False
        back_to = roll_back(self.engine, step)
        for feature in self.features:
            feature.after_rollback(self.engine, back_to, step)
        if back_to is None:
            return False
        self.data.train.close()
        self.data = self._open_data()
        for feature in self.features:
            feature.on_data(self.engine, self.data)
        self._train_batches = TimedBatches(self.data.train)
        self.state.iteration = self.engine.iteration
        self._saved = None
        self._evaluated = None
        self._evaluated_further = None
        self.save()  # so that the checkpoint knows what is skipped
        return True

    def evaluate(self, name: str, sets: Sequence[EvaluationSet]) -> None:
        """Report the objective's scores over each set, as far as an evaluation reads it.

        Validation is reported at most once per iteration.

        Losses per token are reported with their perplexity. A signal ends the evaluation without a report. Other
        weights of a feature, such as an average, are evaluated on the same batches.

        Args:
            name: `validation` or `test`.
            sets: Sets of this part of the data.
        """
        is_repeated = name == "validation" and self._evaluated == self.state.iteration
        if not sets or self.plan.config.training.eval_iters == 0 or is_repeated:
            return
        for item in sets:
            if item.start is not None:
                item.batches.seek(item.start)
        others: dict[str, AbstractContextManager[None]] = {}
        for feature in self.features:
            others |= feature.other_weights(self.engine)
        starts = [item.batches.position for item in sets] if others else []
        is_complete = self._evaluate_weights(name, sets)
        if not is_complete:
            return
        if name == "validation":
            self._evaluated = self.state.iteration
        for suffix, in_model in others.items():
            for item, start in zip(sets, starts, strict=True):
                item.batches.seek(start)
            with in_model:
                self._evaluate_weights(f"{name}_{suffix}", sets)

    def _evaluate_weights(self, name: str, sets: Sequence[EvaluationSet]) -> bool:
        """Report the scores of the weights in the model. Return False if a signal interrupted it."""
        started = time.perf_counter()
        scores = []
        labels = []
        densities = []
        for item in sets:
            batches: Iterator[Mapping[str, Tensor]] = item.batches
            for feature in self.features:
                batches = feature.evaluation_batches(batches)
            counter = LabelCounter(batches, self.engine.objective.label_mask)
            found = self._scores(name, counter, self._micro_batches(item))
            if found is None:
                return False
            scores.append(found)
            labels.append(self._labels_of_data_ranks(counter.labels))
            if not labels[-1]:
                which = "" if item.name is None else f" of the set {item.name}"
                _log.warning("%s: the batches%s have no label, so there is no loss", name, which)
            for feature in self.features:
                density = feature.tokens_per_character(self.engine)
                if density is not None:
                    densities.append(density)
        scalars = evaluation_scalars(name, sets, scores, self.engine.objective.per_token, labels, densities)
        scalars[f"timers/{name}"] = time.perf_counter() - started
        self._report_evaluation(name, scalars)
        return True

    def _micro_batches(self, item: EvaluationSet) -> int:
        """Return the number of micro batches of an evaluation on a set."""
        if item.micro_batches is not None:
            return item.micro_batches
        steps = self.plan.config.training.eval_iters
        assert steps != "all"
        return steps * self.plan.batch.gradient_accumulation_steps

    def _labels_of_data_ranks(self, labels: int) -> int:
        """Return the labels that the data ranks have read. Ranks of one model read the same; middle stages nothing."""
        read: dict[int, int] = {}
        for data_rank, counted in self.engine.gather((self.engine.grid.data_rank, labels)):
            read[data_rank] = max(counted, read.get(data_rank, 0))
        return sum(read.values())

    def _scores(
        self, name: str, batches: Iterator[Mapping[str, Tensor]], micro_batches: int
    ) -> dict[str, float | None] | None:
        """Return the objective's scores over micro batches by name; None after a signal."""
        total: EvaluationResult | None = None
        at_once = self.plan.batch.gradient_accumulation_steps
        for done in range(0, micro_batches, at_once):
            if self._asked_to_stop():
                _log.warning("%s: interrupted after %d of %d micro batches, not reported", name, done, micro_batches)
                return None
            result = self.engine.eval_batch(batches, min(at_once, micro_batches - done))
            total = result if total is None else total.combine(result)
            report_progress()
        assert total is not None
        return total.scores

    def evaluate_further(self) -> None:
        """Report the further evaluations of features, such as scores of tasks, once per iteration."""
        if self._evaluated_further == self.state.iteration or self._asked_to_stop():
            return
        self._evaluated_further = self.state.iteration
        for feature in self.features:
            for name, scalars in feature.further_evaluations(self.engine).items():
                self._report_evaluation(name, scalars)
                report_progress()

    def _report_evaluation(self, name: str, scalars: Mapping[str, float | None]) -> None:
        scalars = dict(scalars)
        for feature in self.features:
            scalars |= feature.evaluation_numbers(self.state, name)
        for feature in self.features:
            feature.on_evaluation(self.state, name, scalars)

    @busy_saving()
    def save(self) -> None:
        """Write a checkpoint, unless this iteration is saved already; `async_save` only starts it.

        Raises:
            CheckpointError: If the checkpoint could not be written; with `async_save` perhaps that of the last one.
        """
        save = self.plan.config.checkpoint.save
        if save is None or self._saved == self.state.iteration:
            return
        for feature in self.features:
            feature.before_save(self.engine)
        if self._background is not None:
            self._background.start(Path(save))
            self._report_saves(self._background)
        else:
            started = time.perf_counter()
            path = save_checkpoint(self.engine, Path(save))
            seconds = time.perf_counter() - started
            self._report_save(SaveReport(path, self.state.iteration, seconds, seconds))
        self._saved = self.state.iteration
        report_progress()

    def _follow_background_save(self) -> None:
        """Report a save that has ended meanwhile.

        Raises:
            CheckpointError: If the save of any rank failed. All ranks wait for theirs and raise after the same step.
        """
        if self._background is None:
            return
        if self.engine.any_rank(self._background.failed):
            self._background.wait()
        self._report_saves(self._background)

    def _report_saves(self, background: BackgroundSaves) -> None:
        for report in background.take_reports():
            self._report_save(report)

    def _report_save(self, report: SaveReport) -> None:
        for feature in self.features:
            feature.on_save(self.state, report)

    def _asked_to_stop(self) -> bool:
        """Return whether any rank got a signal; the same answer on every rank, which all ask together."""
        asked = self.engine.any_rank(self._signals.received is not None)
        self._signals.elsewhere = asked and self._signals.received is None
        return asked

    def _should_stop(self) -> bool:
        """Return whether any rank got a signal, or `exit_interval` is due; the same answer on every rank."""
        exit_interval = self.plan.config.training.exit_interval
        iteration = self.state.iteration
        if exit_interval and iteration > self.start and iteration % exit_interval == 0:
            _log.info("exit_interval: ending after iteration %d", iteration)
            return True
        if self._asked_to_stop():
            _log.info("a signal asked to end after iteration %d", iteration)
            return True
        return False


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
        seconds = self._seconds
        self._seconds = 0.0
        return seconds


class LabelCounter:
    """Iterator of batches that counts the labels in them.

    Args:
        batches: Micro batches of this data rank.
        label_mask: Name of their mask of labels: above 0 for each label that counts.
    """

    def __init__(self, batches: Iterator[Mapping[str, Tensor]], label_mask: str) -> None:
        self._batches = batches
        self._label_mask = label_mask
        self.labels = 0

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        return self

    def __next__(self) -> Mapping[str, Tensor]:
        batch = next(self._batches)
        self.labels += int((batch[self._label_mask] > 0).sum())
        return batch


def _flops_per_token(plan: RunPlan, length: int) -> int:
    """Return the operations of a training step for one token, recomputed ones included."""
    needed = training_flops_per_token(plan.layers, length, predicted=plan.config.model.predicted_tokens)
    chunk = plan.config.training.checkpoint_num_layers
    return needed + recomputed_flops_per_token(plan.layers, length, plan.recomputed_parts, chunk)
