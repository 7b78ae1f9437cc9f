"""One training engine over two bodies: pipeline stages, or the plain network under ZeRO."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from neox.config import RunPlan
from neox.engine.bodies import Body, PipelineBody, build_body, build_model
from neox.errors import TrainingError
from neox.optim import ClippingAdamW, LRSchedule
from neox.parallel import ParallelGrid, derive_seed

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    loss: mean over micro batches and data ranks of each micro batch's mean token loss (nats).
    grad_norm: L2 norm of the whole model's gradient before clipping; inf where it is not finite.
    loss_scale: 1 except in fp16. lr: the learning rate of this step. skipped: the weights were left as they were.
    """

    loss: float
    grad_norm: float
    loss_scale: float
    lr: float
    skipped: bool


class Engine:
    """A model in training on this rank. Every method is called by all ranks together.

    iteration: completed steps, skipped ones included.
    """

    def __init__(self, plan: RunPlan, grid: ParallelGrid, device: torch.device, body: Body, adamw: torch.optim.AdamW):
        self.plan = plan
        self.grid = grid
        self.device = device
        self.body = body
        self.adamw = adamw
        self.schedule = LRSchedule(plan, adamw)
        body.lr_scheduler = self.schedule  # stepped by DeepSpeed after each applied step
        self.iteration = 0

    def train_batch(self, batches: Iterator[Batch]) -> StepResult:
        """Do one optimizer step on the next `gradient_accumulation_steps` micro batches.

        Random streams are a function of (seed, iteration, rank), so that a resumed run draws what an undisturbed one
        does.
        """
        self.grid.seed(derive_seed(self.plan.config.training.seed, "step", self.iteration))
        skipped, lr = self.body.skipped_steps, self.schedule.get_lr()[0]
        loss_scale = self.loss_scale
        with _readable_scaler_failure(self.iteration + 1):
            if isinstance(self.body, PipelineBody):
                loss = float(self.body.train_batch(_stage_pairs(batches)))
            else:
                loss = self._train_plain(batches)
        self.iteration += 1
        was_skipped = self.body.skipped_steps > skipped
        return StepResult(loss, self._grad_norm(was_skipped), loss_scale, lr, was_skipped)

    @torch.no_grad()
    def eval_batch(self, batches: Iterator[Batch]) -> float:
        """Return the mean loss of the next `gradient_accumulation_steps` micro batches, over all data ranks."""
        if isinstance(self.body, PipelineBody):
            return float(self.body.eval_batch(_stage_pairs(batches)))
        self.body.eval()
        count = self.plan.batch.gradient_accumulation_steps
        total = torch.zeros((), device=self.device)
        for _ in range(count):
            total += self._loss(next(batches))
        return self._mean(total / count)

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; every rank gets the same answer."""
        if self.grid.world_size == 1:
            return flag
        answer = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(answer, op=dist.ReduceOp.MAX)
        return bool(answer)

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step."""
        if self.plan.precision != "fp16":
            return 1.0
        return float(self.body.optimizer.loss_scale)

    def _train_plain(self, batches: Iterator[Batch]) -> float:
        self.body.train()
        count = self.plan.batch.gradient_accumulation_steps
        total = torch.zeros((), device=self.device)
        for _ in range(count):
            loss = self._loss(next(batches))
            total += loss.detach()
            self.body.backward(loss)
            self.body.step()
        return self._mean(total / count)

    def _loss(self, batch: Batch) -> Tensor:
        tokens, labels, mask = (
            batch[key].to(self.device, non_blocking=True) for key in ("tokens", "labels", "loss_mask")
        )
        starts = batch.get("document_starts")
        apart = {} if starts is None else {"document_starts": starts.to(self.device, non_blocking=True)}
        # in there, so that logits need not be held whole
        return self.body(tokens, targets=(labels, mask), **apart)

    def _mean(self, value: Tensor) -> float:
        """Average over data ranks."""
        if self.grid.dp_size > 1:
            dist.all_reduce(value, group=self.grid.dp_group)
        return float(value) / self.grid.dp_size

    def _grad_norm(self, skipped: bool) -> float:
        if skipped:
            return math.inf
        if isinstance(self.adamw, ClippingAdamW):
            return self.adamw.last_norm
        return float(self.body.get_global_grad_norm())


def initialize_engine(plan: RunPlan, grid: ParallelGrid, device: torch.device) -> Engine:
    """Build the network with its initial weights and hand it to DeepSpeed; all ranks call it together."""
    body, adamw = build_body(plan, grid, build_model(plan, grid, device))
    return Engine(plan, grid, device, body, adamw)


@contextmanager
def _readable_scaler_failure(iteration: int) -> Iterator[None]:
    """Turn DeepSpeed's bare exception about the loss scale into an error that says what to do."""
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise TrainingError(
            f"iteration {iteration}: gradients overflow fp16 even at the smallest loss scale (fp16.min_loss_scale); "
            "train in bf16, lower the learning rate, or look at the data of this step"
        ) from error


def _stage_pairs(batches: Iterator[Batch]) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Give micro batches the form DeepSpeed's pipeline takes: what the first stage reads, what the last one reads."""
    for batch in batches:
        yield batch["tokens"], (batch["labels"], batch["loss_mask"])
