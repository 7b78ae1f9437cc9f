"""Training engine: steps, evaluations and counters of a model in training on DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from neox.checkpoint import LoadedWeights
from neox.engine.averaged_weights import AveragedWeights
from neox.engine.determinism import readable_refusal
from neox.engine.distributed import limit_collectives
from neox.engine.label_weights import EvaluationResult
from neox.engine.measurements import NoiseScale, StepValues, Timers
from neox.engine.replicas import ReplicaCheck
from neox.engine.stability import Stability
from neox.engine.steps import Steps
from neox.errors import TrainingError
from neox.model import NetworkOutput, move_selection_biases
from neox.objectives import Batch, Objective
from neox.optim import ClippedOptimizer, LRSchedule
from neox.parallel import ParallelGrid, derive_seed
from neox.plan import RunPlan
from neox.plan.run_identity import run_identity
from neox.tokenizer import TokenizerIdentity
from neox.tokenizer.chat import ChatTemplate

T = TypeVar("T")


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step.

    Attributes:
        scores: Means over micro batches and data ranks of the objective's scores, by name; the trained loss first.
        grad_norm: L2 norm of the whole model's gradient before clipping; inf if it is not finite.
        loss_scale: Loss scale of fp16; 1 in other precisions.
        lr: Learning rate of this step.
        skipped: Whether the weights were left unchanged.
        timers: Seconds in each part of the step on this rank, with `wall_clock_breakdown`.
        computing: Seconds of forward and backward passes on this rank, without what it waited for other ranks; 0 if
            hosts are not compared.
        noise_scale: Gradient noise scale in samples, with `log_gradient_noise_scale`, once it is known.
        stability: Numbers by layer of a step that `log_stability_every` observes, by their names in metrics.
    """

    scores: Mapping[str, float]
    grad_norm: float
    loss_scale: float
    lr: float
    skipped: bool
    timers: Mapping[str, float] = field(default_factory=dict)
    noise_scale: float | None = None
    stability: Mapping[str, float] = field(default_factory=dict)
    computing: float = field(default=0.0, compare=False)

    @property
    def loss(self) -> float:
        """The trained loss."""
        return next(iter(self.scores.values()))


class Engine:
    """A model in training on this rank; all ranks call every method together.

    Args:
        plan: The run.
        grid: This rank's grid.
        device: Device of the model.
        objective: What a batch is and what its loss is.
        steps: How the micro batches of a step run.
        optimizer: The optimizer that updates the weights; DeepSpeed may have wrapped it.
        timers: Timers of the parts of a step.
        averages: Average of the trained weights, if it is kept.
        stability: What observes some steps, with `log_stability_every`.

    Attributes:
        deepspeed_engine: DeepSpeed's engine, which holds the model.
        schedule: Schedule of the learning rate.
        iteration: Number of completed steps, skipped ones included.
        run: Identity of the run, which its checkpoints carry.
        chat_template: Template of conversations with the model, which its checkpoints carry; None if there is none.
        generation_settings: Settings of generation, such as end ids, which its checkpoints carry.
        tokenizer: Identity of the run's tokenizer, saved in its checkpoints; None if the tokenizer cannot be built.
        ledger: Record in the loaded checkpoint of what was read of each dataset; None if there is none.
        averages: Average of the trained weights; None without `ema_decay`.
        reference: Identity of the weights that the run began with, to which a loss may compare the model; None if it is
            not known.
        reference_from: Checkpoint that these weights are in, and which of its weights they are; None for initial ones,
            or if no loss needs it.
        with_reference: Function that adds the reference model's log-probabilities to a number of micro batches; None
            if the data includes them, or the loss does not need them.
        skipped: First and last step of each range whose batches were skipped after a loss spike.
        last_losses: Losses of the steps before the newest checkpoint in order, with which later ones are compared. It
            is set before each save; none without `loss_spike_action`.
        ledger_at: Maps a number of steps to the ledger of the data, which checkpoints carry; None to save none.
    """

    def __init__(
        self,
        plan: RunPlan,
        grid: ParallelGrid,
        device: torch.device,
        objective: Objective,
        steps: Steps,
        optimizer: ClippedOptimizer,
        timers: Timers,
        averages: AveragedWeights | None = None,
        stability: Stability | None = None,
    ) -> None:
        self.plan = plan
        self.grid = grid
        self.device = device
        self.objective = objective
        self.optimizer = optimizer
        self.deepspeed_engine = steps.engine
        self.schedule = LRSchedule(plan, optimizer)
        self.deepspeed_engine.lr_scheduler = self.schedule  # stepped by DeepSpeed after each applied step
        self.averages = averages
        self.iteration = 0
        self.run = run_identity(plan.config)
        self.chat_template: ChatTemplate | None = None
        self.generation_settings: Mapping[str, Any] = {}
        self.tokenizer: TokenizerIdentity | None = None
        self.ledger: Mapping[str, Any] | None = None
        self.ledger_at: Callable[[int], Mapping[str, Any]] | None = None
        self.reference: str | None = None
        self.reference_from: tuple[str, LoadedWeights] | None = None
        self.with_reference: Callable[[Iterator[Batch], int], Iterator[Batch]] | None = None
        self.skipped: tuple[tuple[int, int], ...] = ()
        self.last_losses: tuple[float, ...] = ()
        self._steps = steps
        self._timers = timers
        self._stability = stability
        self._replicas = self._replica_check()
        self._noise_scale = _noise_scale(plan, optimizer)
        self._values = StepValues(device, len(objective.names))
        self._before_next_update: Callable[[], None] | None = None
        optimizer.register_step_pre_hook(self._before_update)
        # A gloo group for flags of the hosts, so that agreeing on them does not wait for the GPUs.
        self._hosts: dist.ProcessGroup | None = None
        if device.type == "cuda" and grid.world_size > 1:
            self._hosts = dist.new_group(backend="gloo")
        limit_collectives(plan)

    def train_batch(self, batches: Iterator[Batch]) -> StepResult:
        """Do one optimizer step on the next micro batches, as many and as long as the plan's batch schedule says.

        Random streams are a function of (seed, iteration, rank), so that a resumed run draws the same numbers as an
        uninterrupted one.

        Args:
            batches: Micro batches of this data rank, as `neox.data` makes them.

        Raises:
            TrainingError: If gradients overflow fp16 at the smallest loss scale.
            ReplicaError: If the weights on data ranks differ, with `check_replicas_every`.
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
            completed = self._completed(self._cut(batches, length), count)
            observed = self._observation()  # after the reference model has run, so that it is not observed
            self._steps.train(completed, length)
        if self.plan.architecture.router_bias:
            move_selection_biases(self.deepspeed_engine.module, self.grid)
        self.iteration += 1
        if self.averages is not None:
            self.hold_for_saves()  # an update that was skipped has not done it
            self.averages.update()
        skipped = self.deepspeed_engine.skipped_steps > skipped_before
        scores, grad_norm = self._take_values(skipped)
        stability: Mapping[str, float] = {}
        if observed is not None:
            stability = observed.finish(grad_norm, skipped=skipped)
        return StepResult(
            scores=scores,
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            lr=lr,
            skipped=skipped,
            computing=self._timers.take_computing(),
            timers=self._timers.take(),
            noise_scale=None if self._noise_scale is None else self._noise_scale.value,
            stability=stability,
        )

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

    @property
    def divides_optimizer(self) -> bool:
        """Whether DeepSpeed divides the optimizer's state over data ranks, and writes each part to a file."""
        return hasattr(self.deepspeed_engine.optimizer, "dp_process_group")

    def before_next_update(self, call: Callable[[], None]) -> None:
        """Call a function once, just before the optimizer steps next."""
        self._before_next_update = call

    def hold_for_saves(self) -> None:
        """Let a save copy what it needs before weights or states are overwritten; see `before_next_update`."""
        if self._before_next_update is not None:
            self._before_next_update()
            self._before_next_update = None

    def _replica_check(self) -> ReplicaCheck | None:
        every = self.plan.config.healing.check_replicas_every
        if every is None:
            return None
        whole_optimizer = None if self.divides_optimizer else self.optimizer
        return ReplicaCheck(every, self.grid, self.deepspeed_engine.module, whole_optimizer)

    def check_replicas(self) -> None:
        """Compare the weights on data ranks, with `check_replicas_every`; all ranks call it together.

        Raises:
            ReplicaError: If they differ.
        """
        if self._replicas is not None:
            self._replicas.check(self.iteration)

    def restart_replica_check(self) -> None:
        """Forget which step was checked last, because the run goes on from another step and may repeat that one."""
        if self._replicas is not None:
            self._replicas.restart()

    def restore_counters(self, client_state: Mapping[str, Any]) -> None:
        """Set DeepSpeed's counters and the learning rate's position to those of a checkpoint."""
        engine = self.deepspeed_engine
        engine.global_steps = client_state["global_steps"]
        engine.global_samples = client_state["global_samples"]
        engine.skipped_steps = client_state["skipped_steps"]
        self.schedule.load_state_dict(client_state["lr_scheduler"])

    def _set_batch_size(self) -> None:
        """Set DeepSpeed to this step's number of micro batches."""
        engine = self.deepspeed_engine
        # DeepSpeed counts a micro batch for each rank with the same weights; context ranks share one.
        size = self.plan.batch_schedule.batch_size(self.iteration) * self.plan.grid.cp_size
        if size != engine.train_batch_size():
            engine.set_train_batch_size(size)
        # DeepSpeed ends a step when its count of micro batches is a multiple of the step's, which may change.
        engine.micro_steps = 0

    def _cut(self, batches: Iterator[Batch], length: int) -> Iterator[Batch]:
        """Return the micro batches, cut to a length."""
        if length == self.plan.batch_schedule.full_length:
            return batches
        return ({name: value[:, :length] for name, value in batch.items()} for batch in batches)

    def _observation(self) -> Stability | None:
        """Start observing the next step if it is due; return the observer, otherwise None."""
        observed = self._stability
        if observed is None or not observed.is_due(self.iteration + 1):
            return None
        observed.start()
        return observed

    def _completed(self, batches: Iterator[Batch], count: int) -> Iterator[Batch]:
        """Return the next micro batches, with a reference model's log-probabilities if the loss needs them."""
        if self.with_reference is None:
            return batches
        return self.with_reference(batches, count)

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
        """Queue the copies of this step's scores and gradient norm; called before each part of the update."""
        if self._replicas is not None:
            self._replicas.check_if_due(self.iteration + 1)
        self.hold_for_saves()
        norm = getattr(self.deepspeed_engine.optimizer, "_global_grad_norm", None)
        self._values.put(self.deepspeed_engine.step_scores, 0.0 if norm is None else norm)


def _noise_scale(plan: RunPlan, optimizer: ClippedOptimizer) -> NoiseScale | None:
    keys = plan.config.logging
    if not keys.log_gradient_noise_scale:
        return None
    return NoiseScale(
        optimizer,
        batch=plan.batch.train_batch_size,
        steps=keys.gradient_noise_scale_n_batches,
        on_cpu=keys.gradient_noise_scale_cpu_offload,
    )


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
