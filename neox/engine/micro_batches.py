"""The micro batches of a step on their way through DeepSpeed's engine: one by one, or as a pipeline's schedule says.

micro batch of a data rank -> weights of labels, and tokens further ahead -> the tokens of this context rank -> the
objective's inputs and targets -> DeepSpeed's engine -> the trained loss, and a row (total, count) of each score -> rows
of all micro batches -> rows of all data ranks

Evaluations report the scores of `evaluated_objective`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from neox.data.answer_pairs.pair_rows import FIELDS_OF_PAIRS
from neox.engine.deepspeed_patches import PipelineEngine, PlainEngine
from neox.engine.measurements import BACKWARD, FORWARD, OPTIMIZER, Timers
from neox.model import Context, NetworkOutput
from neox.objectives import (
    LOSS_NORMALIZATIONS,
    Batch,
    LossNormalization,
    Objective,
    ScoreTable,
    evaluated_objective,
    unpack_rows,
    with_tokens_ahead,
)
from neox.parallel import ParallelGrid, context_indices
from neox.plan import RunPlan


class EvaluationResult(NamedTuple):
    """Scores of some micro batches of all data ranks.

    Attributes:
        table: Names and reductions of the scores.
        rows: Totals and counts of the scores on the host [K, 2], in fp64: an evaluation may have many results.
    """

    table: ScoreTable
    rows: Tensor

    @property
    def scores(self) -> dict[str, float | None]:
        """Each score by name, the trained loss first; None where nothing was counted."""
        return self.table.finish(self.rows.tolist())

    def combine(self, other: EvaluationResult) -> EvaluationResult:
        """Return the result of the micro batches of both."""
        return EvaluationResult(self.table, self.table.combine(self.rows, other.rows))


class MicroBatchRunner(Protocol):
    """Training and evaluation of micro batches; all ranks call every method together."""

    @property
    def engine(self) -> PlainEngine:
        """DeepSpeed's engine, which holds the model."""
        ...

    def train(self, batches: Iterator[Batch], length: int) -> None:
        """Do one optimizer step on the next micro batches. It sets the engine's `step_rows` before the update.

        Args:
            batches: Micro batches of this data rank.
            length: Tokens of each sample.
        """
        ...

    def evaluate(self, batches: Iterator[Batch], count: int, length: int) -> Tensor:
        """Return the rows of scores [K, 2] of the next `count` micro batches of all data ranks.

        Args:
            batches: Micro batches of this data rank.
            count: Number of micro batches.
            length: Tokens of each sample.
        """
        ...

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Return the logits [B, S, V/tp] of tokens [B, S] on the last stage's ranks; None on others."""
        ...

    def apply(self, inputs: Mapping[str, Tensor], function: Callable[[NetworkOutput], Tensor]) -> Tensor | None:
        """Return a function of the network's output on the last stage's ranks; None on others.

        Args:
            inputs: Inputs of an objective, of this context rank's tokens, on the device.
            function: The function.
        """
        ...


class WholeNetworkRunner:
    """Runs the whole network on each rank, one micro batch after the other.

    Args:
        engine: DeepSpeed's engine.
        objective: Objective of the training.
        weights: Weights of labels.
        grid: This rank's grid.
        device: Device of the model.
        timers: Timers of the parts of a step.
    """

    def __init__(
        self,
        engine: PlainEngine,
        objective: Objective,
        weights: LabelWeights,
        grid: ParallelGrid,
        device: torch.device,
        timers: Timers,
    ) -> None:
        self.engine = engine
        self._objective = objective
        self._weights = weights
        self._grid = grid
        self._device = device
        self._timers = timers

    def train(self, batches: Iterator[Batch], length: int) -> None:
        """Do one optimizer step."""
        if not self.engine.module.training:  # `train` walks over all modules, which takes time
            self.engine.train()
        count = self.engine.gradient_accumulation_steps()
        table = ScoreTable(self._objective)
        rows = table.empty(self._device)
        for number, batch in enumerate(self._weights.of_step(batches, count), start=1):
            with self._timers.part(FORWARD):
                scores = self._scores(batch, self._objective)
            rows = table.combine(rows, unpack_rows(scores))
            with self._timers.part(BACKWARD):
                self.engine.backward(scores)
            if number == count:
                self.engine.step_rows = table.all_reduce(rows, self._grid)
            with self._timers.part(OPTIMIZER):
                self.engine.step()  # updates after the last micro batch

    def evaluate(self, batches: Iterator[Batch], count: int, length: int) -> Tensor:
        """Return the rows of scores."""
        self.engine.eval()
        objective = evaluated_objective(self._objective)
        table = ScoreTable(objective)
        rows = table.empty(self._device)
        for batch in self._weights.of_evaluation(batches, count):
            rows = table.combine(rows, unpack_rows(self._scores(batch, objective)))
        return table.all_reduce(rows, self._grid)

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Return the logits of tokens."""
        self.engine.eval()
        logits: Tensor = self.engine(tokens)
        return logits

    def apply(self, inputs: Mapping[str, Tensor], function: Callable[[NetworkOutput], Tensor]) -> Tensor | None:
        """Return a function of the network's output."""
        self.engine.eval()
        others = dict(inputs)
        tokens = others.pop("tokens")
        result: Tensor = self.engine(
            tokens, Context(cache=None, divided=self._grid.cp_size > 1, **others), loss=function
        )
        return result

    def _scores(self, batch: Batch, objective: Objective) -> Tensor:
        """Return an objective's packed scores of a micro batch."""
        batch = own_tokens(batch, self._grid)
        inputs = {name: to_device(value, self._device) for name, value in objective.inputs(batch).items()}
        targets = tuple(to_device(value, self._device) for value in objective.targets(batch))
        tokens = inputs.pop("tokens")
        loss = partial(objective.scores, targets=targets)
        scores: Tensor = self.engine(tokens, Context(cache=None, divided=self._grid.cp_size > 1, **inputs), loss=loss)
        return scores


class PipelineRunner:
    """Runs one pipeline stage, in the order of the pipeline schedule (`neox.engine.pipeline.instructions`).

    Args:
        engine: DeepSpeed's engine.
        objective: Objective of the training.
        weights: Weights of labels.
        grid: This rank's grid.
        device: Device of the model.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        objective: Objective,
        weights: LabelWeights,
        grid: ParallelGrid,
        device: torch.device,
    ) -> None:
        self.engine = engine
        self._objective = objective
        self._weights = weights
        self._grid = grid
        stage = engine.module.stage
        self._is_first = stage.ranges[0].is_first
        self._is_last = stage.ranges[-1].is_last
        self._device = device
        self._token_shares = grid.tp_size if grid.topology.sequence_parallel else 1
        self._length: int | None = None  # of the last step: DeepSpeed keeps buffers of that shape

    def train(self, batches: Iterator[Batch], length: int) -> None:
        """Do one optimizer step. With sequence parallelism each tensor rank passes on its share of the tokens."""
        self._reset_buffers_if_changed(length // self._grid.cp_size // self._token_shares)
        if self._is_last:  # only there are labels weighted; middle stages read no batches
            batches = self._weights.of_step(batches, self.engine.gradient_accumulation_steps())
        self.engine.train_batch(self._pairs(batches, self._objective))

    def evaluate(self, batches: Iterator[Batch], count: int, length: int) -> Tensor:
        """Return the rows of scores. Each tensor rank passes on all tokens."""
        self._reset_buffers_if_changed(length // self._grid.cp_size)
        if self._is_last:
            batches = self._weights.of_evaluation(batches, count)
        rows: Tensor = self.engine.eval_batch(
            self._pairs(batches, evaluated_objective(self._objective)), num_micro_batches=count
        )
        return rows

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Return the logits of tokens on the last stage; None on others."""
        self.engine.eval()
        logits: Tensor | None = self.engine.module.logits(tokens)
        return logits

    def apply(self, inputs: Mapping[str, Tensor], function: Callable[[NetworkOutput], Tensor]) -> Tensor | None:
        """Return a function of the network's output on the last stage; None on others."""
        self.engine.eval()
        others = dict(inputs)
        tokens = others.pop("tokens")
        result: Tensor | None = self.engine.module.apply_to_output(
            tokens, Context(cache=None, divided=self._grid.cp_size > 1, **others), function
        )
        return result

    def _reset_buffers_if_changed(self, length: int) -> None:
        """Reset DeepSpeed's buffers of hidden states if the number of tokens of a sample has changed."""
        if self._length not in (None, length):
            self.engine.reset_activation_shape()
        self._length = length

    def _pairs(
        self, batches: Iterator[Batch], objective: Objective
    ) -> Iterator[tuple[Tensor | tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Yield micro batches in the form DeepSpeed takes: the first stage's input, the last stage's targets.

        Only the stage that uses a tensor copies it to its device. Other stages than the last one have no targets.
        """
        for whole in batches:
            batch = own_tokens(whole, self._grid)
            inputs = tuple(objective.inputs(batch).values())
            if self._is_first:
                inputs = tuple(to_device(value, self._device) for value in inputs)
            targets: tuple[Tensor, ...] = ()
            if self._is_last:
                targets = tuple(to_device(value, self._device) for value in objective.targets(batch))
            yield (inputs if len(inputs) > 1 else inputs[0]), targets


class LabelWeights:
    """Replaces the mask of labels in micro batches by weights, as `loss_normalization` says.

    The labels of an evaluation have weights that do not depend on how it is cut into micro batches: 1, or with
    `samples` one divided by the labels of the sample.

    Args:
        normalization: What losses of training are divided by.
        field: Name of the mask in a batch.
        grid: This rank's grid.
        hosts: Group of this rank's data-parallel group over gloo: hosts add up their numbers of labels without waiting
            for what their devices still have to do.
        depths: Number of modules of multi-token prediction, whose labels are added to the micro batches.
    """

    def __init__(
        self,
        normalization: LossNormalization,
        field: str,
        grid: ParallelGrid,
        hosts: dist.ProcessGroup | None = None,
        *,
        depths: int = 0,
    ) -> None:
        self._normalization = normalization
        self._field = field
        self._grid = grid
        self._hosts = hosts
        self._depths = depths

    @classmethod
    def of(cls, plan: RunPlan, objective: Objective, grid: ParallelGrid) -> LabelWeights:
        """Return the weights of a run; all ranks call it together."""
        normalization = LOSS_NORMALIZATIONS[plan.loss_normalization]
        hosts = None
        if grid.dp_size > 1 and not normalization.divides_micro_batches:
            hosts = _data_group_of_hosts(grid)
        return cls(normalization, objective.label_mask, grid, hosts, depths=plan.architecture.mtp_num_layers)

    def of_step(self, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Return the next `count` micro batches of this data rank; all ranks of the data group call it together."""
        if self._normalization.divides_micro_batches:
            return (self._weighted(next(batches), self._normalization, 1.0) for _ in range(count))
        read = [next(batches) for _ in range(count)]
        share = count * self._grid.data_size / max(1.0, self._total(read))
        return (self._weighted(batch, self._normalization, share) for batch in read)

    def of_evaluation(self, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Return the next `count` micro batches of this data rank for an evaluation."""
        normalization = self._normalization
        if normalization.divides_micro_batches:
            normalization = LOSS_NORMALIZATIONS["tokens"]
        return (self._weighted(next(batches), normalization, 1.0) for _ in range(count))

    def _total(self, read: list[Batch]) -> float:
        """Return the amount of micro batches over all data ranks."""
        total = torch.zeros(1, dtype=torch.float64)
        for batch in read:
            amount = self._normalization.amount(batch[self._field].float())
            assert amount is not None
            total += amount
        if self._grid.dp_size > 1:
            dist.all_reduce(total, group=self._hosts)
            total /= self._grid.cp_size  # context ranks read the same samples
        return float(total)

    def _weighted(self, batch: Batch, normalization: LossNormalization, share: float) -> Batch:
        weights = normalization.weights(batch[self._field].float(), share)
        if self._field not in _OF_WHOLE_SAMPLES:
            # Engines average over context ranks, too, but each computes only the losses of its own tokens.
            weights = weights * self._grid.cp_size
        weighted = {**batch, self._field: weights}
        if self._depths:
            return with_tokens_ahead(weighted, self._depths, self._field)
        return weighted


_OF_WHOLE_SAMPLES = FIELDS_OF_PAIRS | {"document_starts", "lengths"}
"""Fields that all context ranks need whole: where documents and texts begin and end, and what is known of pairs."""


def _data_group_of_hosts(grid: ParallelGrid) -> dist.ProcessGroup:
    """Return this rank's data-parallel group over gloo; all ranks call it together."""
    own = grid.dp_group
    if dist.get_backend(own) != "gloo":
        for ranks in grid.topology.groups("dp"):
            group = dist.new_group(ranks, backend="gloo")
            if grid.rank in ranks:
                own = group
    assert own is not None
    return own


def own_tokens(batch: Batch, grid: ParallelGrid) -> Batch:
    """Return a micro batch with this context rank's tokens; fields of whole samples stay whole."""
    if grid.cp_size == 1:
        return batch
    own = dict(batch)
    for name, value in batch.items():
        if name not in _OF_WHOLE_SAMPLES:
            own[name] = value[:, context_indices(value.shape[1], grid)]
    return own


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """Copy to a device. The memory is pinned first, because the host waits for a copy from other memory."""
    if device.type != "cpu" and value.device.type == "cpu":
        value = get_accelerator().pin_memory(value)
    return value.to(device, non_blocking=True)
