"""Training engine: one interface to DeepSpeed's plain and pipeline engines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from neox.engine.deepspeed_engines import PipelineEngine, PlainEngine, build_deepspeed_engine, build_model
from neox.engine.distributed import limit_collectives
from neox.engine.host_copies import HostCopies
from neox.engine.noise_scale import NoiseScale
from neox.engine.step_values import StepValues
from neox.engine.timers import StepTimers
from neox.errors import TrainingError
from neox.objectives import Batch, Objective, build_objective
from neox.optim import ClippedOptimizer, LRSchedule
from neox.parallel import ParallelGrid, derive_seed
from neox.plan import RunPlan


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step.

    Attributes:
        scores: Means over micro batches and data ranks of the objective's scores, by name; the loss first.
        grad_norm: L2 norm of the whole model's gradient before clipping; inf if it is not finite.
        loss_scale: 1 except in fp16.
        lr: Learning rate of this step.
        skipped: Whether the weights were left unchanged.
        timers: Seconds in each part of the step on this rank, with `wall_clock_breakdown`.
        noise_scale: Gradient noise scale in samples, with `log_gradient_noise_scale`, once it is known.
    """

    scores: Mapping[str, float]
    grad_norm: float
    loss_scale: float
    lr: float
    skipped: bool
    timers: Mapping[str, float] = field(default_factory=dict)
    noise_scale: float | None = None

    @property
    def loss(self) -> float:
        """The loss that is trained."""
        return next(iter(self.scores.values()))


class Engine:
    """A model in training on this rank; all ranks call every method together.

    Attributes:
        objective: What a batch is and what its loss is.
        deepspeed_engine: DeepSpeed's engine, which holds the model.
        optimizer: The optimizer that updates the weights; DeepSpeed may have wrapped it.
        schedule: The learning rate.
        iteration: Completed steps, skipped ones included.
    """

    def __init__(
        self,
        plan: RunPlan,
        grid: ParallelGrid,
        device: torch.device,
        objective: Objective,
        deepspeed_engine: PlainEngine,
        optimizer: ClippedOptimizer,
    ) -> None:
        self.plan = plan
        self.grid = grid
        self.device = device
        self.objective = objective
        self.deepspeed_engine = deepspeed_engine
        self.optimizer = optimizer
        self.schedule = LRSchedule(plan, optimizer)
        deepspeed_engine.lr_scheduler = self.schedule  # stepped by DeepSpeed after each applied step
        self.iteration = 0
        self._length: int | None = None  # what stages passed on last of a sample: DeepSpeed keeps buffers of that shape
        self._timers = StepTimers(deepspeed_engine, device) if plan.config.deepspeed.wall_clock_breakdown else None
        keys = plan.config.logging
        self._noise_scale: NoiseScale | None = None
        if keys.log_gradient_noise_scale:
            steps, on_cpu = keys.gradient_noise_scale_n_batches, keys.gradient_noise_scale_cpu_offload
            self._noise_scale = NoiseScale(optimizer, batch=plan.batch.train_batch_size, steps=steps, on_cpu=on_cpu)
        self._values = StepValues(device, len(objective.names))
        self._copies: HostCopies | None = None
        optimizer.register_step_pre_hook(self._before_update)
        # For what only hosts know: they need not wait for their devices to agree on it.
        self._hosts = dist.new_group(backend="gloo") if device.type == "cuda" and grid.world_size > 1 else None
        limit_collectives(plan)

    def train_batch(self, batches: Iterator[Batch]) -> StepResult:
        """Do one optimizer step on the next micro batches, as many and as long as the plan's batch schedule says.

        Random streams are a function of (seed, iteration, rank), so that a resumed run draws the same numbers as an
        uninterrupted one.

        Args:
            batches: Micro batches of this data rank, as `neox.data` makes them.

        Raises:
            TrainingError: If gradients overflow fp16 at the smallest loss scale.
        """
        self.grid.seed(derive_seed(self.plan.config.training.seed, "step", self.iteration))
        skipped, lr = self.deepspeed_engine.skipped_steps, self.schedule.get_lr()[0]
        loss_scale = self.loss_scale
        batches = self._scheduled(batches)
        if self._timers is not None:
            self._timers.take()  # of evaluations
        with _readable_scaler_failure(self.iteration + 1):
            if isinstance(self.deepspeed_engine, PipelineEngine):
                self.deepspeed_engine.train_batch(self._stage_pairs(batches))
            else:
                self._train_plain(batches)
        self.iteration += 1
        was_skipped = self.deepspeed_engine.skipped_steps > skipped
        timers = self._timers.take() if self._timers is not None else {}
        noise = self._noise_scale.value if self._noise_scale is not None else None
        values = self._values.take()  # none where DeepSpeed skips the update
        scores, norm = values or (self.deepspeed_engine.step_scores.tolist(), math.inf)
        if self.optimizer.scope is not None:
            norm = self.optimizer.last_norm
        named = dict(zip(self.objective.names, scores, strict=True))
        return StepResult(named, math.inf if was_skipped else norm, loss_scale, lr, was_skipped, timers, noise)

    @torch.no_grad()
    def eval_batch(self, batches: Iterator[Batch]) -> list[float]:
        """Return mean scores of the next `gradient_accumulation_steps` micro batches, over all data ranks.

        They stand in the order of the objective's names.
        """
        count = self.plan.batch.gradient_accumulation_steps
        if isinstance(self.deepspeed_engine, PipelineEngine):
            self._pass_on(self.plan.batch_schedule.full_length)
            scores: Tensor = self.deepspeed_engine.eval_batch(self._stage_pairs(batches), num_micro_batches=count)
            return scores.tolist()
        self.deepspeed_engine.eval()
        total = self._no_scores()
        for _ in range(count):
            total += self._scores(next(batches))
        return self._mean(total / count).tolist()

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

    @property
    def divides_optimizer(self) -> bool:
        """Whether DeepSpeed divides the optimizer's state over data ranks, and writes each part to a file."""
        return hasattr(self.deepspeed_engine.optimizer, "dp_process_group")

    def hold_next_update(self, copies: HostCopies) -> None:
        """Let the next update begin after these copies of the state."""
        self._copies = copies

    def restore_counters(self, client_state: Mapping[str, Any]) -> None:
        """Set DeepSpeed's counters and the learning rate's position to those of a checkpoint."""
        for name in ("global_steps", "global_samples", "skipped_steps"):
            setattr(self.deepspeed_engine, name, client_state[name])
        self.schedule.load_state_dict(client_state["lr_scheduler"])

    def _scheduled(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Set DeepSpeed to this step's batch size and length; return the micro batches, cut to the length."""
        schedule, ds_engine = self.plan.batch_schedule, self.deepspeed_engine
        size, length = schedule.batch_size(self.iteration), schedule.seq_length(self.iteration)
        if size != ds_engine.train_batch_size():
            ds_engine.set_train_batch_size(size)
        # DeepSpeed ends a step where the number of all micro batches is a multiple of the step's, as if none had fewer.
        ds_engine.micro_steps = 0
        self._pass_on(length // (self.grid.tp_size if self.grid.topology.sequence_parallel else 1))
        if length == schedule.full_length:
            return batches
        return ({name: value[:, :length] for name, value in batch.items()} for batch in batches)

    def _pass_on(self, length: int) -> None:
        """Let pipeline stages pass on hidden states of so many tokens of each sample."""
        if self._length not in (None, length) and isinstance(self.deepspeed_engine, PipelineEngine):
            self.deepspeed_engine.reset_activation_shape()
        self._length = length

    def _train_plain(self, batches: Iterator[Batch]) -> None:
        if not self.deepspeed_engine.module.training:  # a walk over all modules
            self.deepspeed_engine.train()
        count = self.deepspeed_engine.gradient_accumulation_steps()
        total = self._no_scores()
        for number in range(1, count + 1):
            scores = self._scores(next(batches))
            total += scores.detach()
            self.deepspeed_engine.backward(scores)
            if number == count:
                self.deepspeed_engine.step_scores = self._mean(total / count)
            self.deepspeed_engine.step()

    def _no_scores(self) -> Tensor:
        return torch.zeros(len(self.objective.names), device=self.device)

    def _scores(self, batch: Batch) -> Tensor:
        """Return the objective's scores of a micro batch."""
        inputs = {name: self._on_device(value) for name, value in self.objective.inputs(batch).items()}
        targets = tuple(self._on_device(value) for value in self.objective.targets(batch))
        result: Tensor = self.deepspeed_engine(**inputs, loss=partial(self.objective.scores, targets=targets))
        return result

    def _on_device(self, value: Tensor) -> Tensor:
        """Copy to the device; from pinned memory, as the host waits for a copy from any other."""
        pinned = value.pin_memory() if self.device.type == "cuda" and value.device.type == "cpu" else value
        return pinned.to(self.device, non_blocking=True)

    def _stage_pairs(
        self, batches: Iterator[Batch]
    ) -> Iterator[tuple[Tensor | tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Give micro batches the form DeepSpeed's pipeline takes: the first stage's input, the last stage's targets."""
        first, last = self.grid.pp_rank == 0, self.grid.pp_rank == self.grid.pp_size - 1
        for batch in batches:
            inputs, targets = tuple(self.objective.inputs(batch).values()), self.objective.targets(batch)
            values = tuple(map(self._on_device, inputs)) if first else inputs
            yield (
                values if len(values) > 1 else values[0],
                tuple(map(self._on_device, targets)) if last else targets,
            )

    def _mean(self, value: Tensor) -> Tensor:
        """Average over data ranks, in place."""
        if self.grid.dp_size > 1:
            dist.all_reduce(value, group=self.grid.dp_group)
            value /= self.grid.dp_size
        return value

    def _before_update(self, *_: object) -> None:
        """Queue the copies of this step's scores and gradient norm; called before each part of the update."""
        if self._copies is not None:
            self._copies.hold()
            self._copies = None
        norm = getattr(self.deepspeed_engine.optimizer, "_global_grad_norm", None)
        self._values.put(self.deepspeed_engine.step_scores, 0.0 if norm is None else norm)


def initialize_engine(plan: RunPlan, grid: ParallelGrid, device: torch.device) -> Engine:
    """Build the network with its initial weights and give it to DeepSpeed; all ranks call it together."""
    objective = build_objective(plan)
    model = build_model(plan, grid, objective, device)
    return Engine(plan, grid, device, objective, *build_deepspeed_engine(plan, grid, model))


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
