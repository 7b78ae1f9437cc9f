"""DeepSpeed's pipeline engine for any order of passes, with correct tied weights and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from neox.engine.deepspeed_patches.bf16_optimizer import BF16Optimizer
from neox.engine.deepspeed_patches.engines import PlainEngine
from neox.engine.deepspeed_patches.range_reduction import RangeReduction
from neox.engine.measurements import BACKWARD, COMMUNICATION, FORWARD, OPTIMIZER
from neox.engine.pipeline.instructions import (
    AskFor,
    Backward,
    Forward,
    LoadBatch,
    Message,
    PassSchedule,
    ReceiveActivation,
    ReceiveGradient,
    ReduceRange,
    SendActivation,
    SendGradient,
)
from neox.engine.pipeline.messages import Form, Mailbox
from neox.objectives import unpack_rows
from neox.plan.ranks.pipeline_schedules import Pass


def _timed(part: str, instruction: Callable[..., Any]) -> Callable[..., Any]:
    """Return an instruction of the pipeline's schedule whose time is added to a part of the step."""

    @wraps(instruction)
    def timed(engine: PlainEngine, *args: Any, **kwargs: Any) -> Any:
        with engine.step_timers.part(part):
            return instruction(engine, *args, **kwargs)

    return timed


class PipelineEngine(DeepSpeedPipelineEngine, PlainEngine):  # type: ignore[misc]
    """DeepSpeed's engine for pipeline stages; ZeRO 0 and 1. Its `backward` calls `PlainEngine.backward`.

    A stage of DeepSpeed's engine holds one range of layers. Its DualPipeV engine has two, but its module splits layers
    by itself. Both wait until a message has been taken. Here a stage holds any number of ranges, runs its passes in the
    order of `PassSchedule`, and sends without waiting. DeepSpeed's code runs each pass.
    """

    module_state_dict = PlainEngine.module_state_dict
    loss: Tensor
    grad_layer: Tensor | list[Tensor] | None
    _is_constructed = False
    _active_range: int | None = None
    """Number of the range that a pass works on; None between passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # DeepSpeed compares types for equality. Gradients of tied weights would not be summed over stages.
        self.using_bf16_optimizer = isinstance(self.optimizer, BF16Optimizer)
        self._is_constructed = True
        self._micro_batches = 0  # of the step that runs
        self._kept_losses: dict[Pass, Tensor] = {}
        self._arrived_gradients: dict[Pass, list[Tensor]] = {}
        self._mailbox = Mailbox(
            self.stage_id, self.module.pp_ranks, self.device, self.module.sharers, self._form_of_gradient
        )
        self._reduction = self._range_reduction()
        self._mailbox.connect(self.module.order(self.micro_batches, is_training=True))

    def is_last_stage(self) -> bool:
        """Return whether the pass that runs now computes the loss; between passes, whether this stage does.

        While DeepSpeed's constructor opens its own connections, it asks for the last stage of the line.
        """
        if not self._is_constructed:
            return bool(super().is_last_stage())
        if self.stage_id != self.module.loss_stage:
            return False
        return self._active_range is None or self.module.stage.ranges[self._active_range].is_last

    def _loss_stage_global_rank(self) -> int:
        """Return the rank whose stage computes the loss: the first stage with DualPipeV."""
        return int(self.module.pp_ranks[self.module.loss_stage])

    def reset_activation_shape(self) -> None:
        """Expect hidden states of another shape from now on."""
        super().reset_activation_shape()
        self._mailbox.forget_forms()

    def _train_schedule(self) -> PassSchedule:
        """Return the instructions of this stage in a training step."""
        return PassSchedule(self.module.order(self.micro_batches, is_training=True), self.stage_id)

    def _inference_schedule(self, micro_batches: int) -> PassSchedule:
        """Return the instructions of this stage in an evaluation."""
        return PassSchedule(self.module.order(micro_batches, is_training=False), self.stage_id)

    def _exec_schedule(self, pipe_schedule: PassSchedule) -> None:
        """Run the instructions of a step."""
        self._micro_batches = pipe_schedule.order.micro_batches
        self._mailbox.begin(pipe_schedule.order)
        super()._exec_schedule(pipe_schedule)
        self._mailbox.finish()

    def _buffer(self, work: Pass) -> int:
        """Return the number of the buffer of a range and a micro batch."""
        return work.chunk * self._micro_batches + work.micro_batch

    @contextmanager
    def _running(self, work: Pass) -> Iterator[None]:
        """Let DeepSpeed's methods work on the range of a pass while the context lasts."""
        self._active_range = work.chunk
        self.module.active_range = work.chunk
        try:
            yield
        finally:
            self._active_range = None

    def _load_micro_batch(self, micro_batch: int) -> None:
        """Read the next micro batch: its tokens for the first range, its targets for the last one."""
        given, targets = self._next_batch()
        if self.is_first_stage():
            self.pipe_buffers["inputs"][self._buffer(Pass(False, 0, micro_batch))] = given
        if self.is_last_stage():
            last = Pass(False, len(self.module.stage.ranges) - 1, micro_batch)
            self.pipe_buffers["labels"][self._buffer(last)] = targets

    def _forward_pass(self, work: Pass) -> None:
        """Run a micro batch through a range; the last one computes the scores in its module.

        DeepSpeed calls a loss function after the module. Its engine prepares for a backward pass when the gradient of
        the module's output arrives, and clears gradients of the head that came before.
        """
        buffer = self._buffer(work)
        loss_scale = float(self.optimizer.loss_scale) if self.fp16_enabled() else 1.0
        self.module.loss_factor = loss_scale / self.gradient_accumulation_steps()
        with self._running(work):
            is_last = self.is_last_stage()
            if is_last:
                self.module.targets = self.pipe_buffers["labels"][buffer]
                self.pipe_buffers["labels"][buffer] = None
            try:
                self._exec_forward_pass(buffer)
            finally:
                self.module.targets = None
        if not torch.is_grad_enabled():
            self.pipe_buffers["inputs"][buffer] = None
        elif is_last:
            self._kept_losses[work] = self.loss

    def _backward_pass(self, work: Pass) -> None:
        """Run the backward pass of a micro batch through a range."""
        buffer = self._buffer(work)
        gradients = self._arrived_gradients.pop(work, [])
        self.grad_layer = gradients
        if gradients and torch.is_tensor(self.pipe_buffers["outputs"][buffer]):
            self.grad_layer = gradients[0]
        self.loss = self._kept_losses.pop(work._replace(backward=False), self.loss)
        with self._running(work):
            self._exec_backward_pass(buffer)
        self.grad_layer = None
        self.pipe_buffers["outputs"][buffer] = None
        if work.chunk == 0 and self.is_first_stage():
            self.pipe_buffers["inputs"][buffer] = None

    def _ask_for(self, message: Message) -> None:
        """Prepare for a message."""
        self._mailbox.ask(message)

    def _receive_activation(self, message: Message) -> None:
        """Wait for the hidden states of a forward pass."""
        tensors = self._mailbox.take(message)
        for tensor in tensors:
            tensor.requires_grad_(torch.is_grad_enabled() and tensor.is_floating_point())
        inputs: Tensor | tuple[Tensor, ...] = tuple(tensors)
        if len(tensors) == 1:
            inputs = tensors[0]
        self.pipe_buffers["inputs"][self._buffer(message.needed_by)] = inputs

    def _send_activation(self, message: Message) -> None:
        """Send the hidden states that a forward pass has computed."""
        buffer = self._buffer(message.made_by)
        self._mailbox.send(message, _as_list(self.pipe_buffers["outputs"][buffer]))
        if not torch.is_grad_enabled():
            self.pipe_buffers["outputs"][buffer] = None

    def _receive_gradient(self, message: Message) -> None:
        """Wait for the gradients of a range's output."""
        self._arrived_gradients[message.needed_by] = self._mailbox.take(message)

    def _send_gradient(self, message: Message) -> None:
        """Send the gradients of a range's input."""
        buffer = self._buffer(message.made_by)
        inputs = _as_list(self.pipe_buffers["inputs"][buffer])
        gradients = [tensor.grad for tensor in inputs if tensor.grad is not None]
        self._mailbox.send(message, gradients)
        self.pipe_buffers["inputs"][buffer] = None

    def _form_of_gradient(self, message: Message) -> Form | None:
        """Return the form of the gradients of a range's output; None before its forward pass."""
        outputs = self.pipe_buffers["outputs"][self._buffer(message.needed_by)]
        if outputs is None:
            return None
        return tuple((tensor.shape, tensor.dtype) for tensor in _as_list(outputs) if tensor.is_floating_point())

    def _reduce_tied_gradients(self) -> None:
        """Sum the gradients of tied weights over their stages.

        DeepSpeed sums `grad`, but its ZeRO optimizer (of bf16 with offload) has moved them to `grad_accum` by then. The
        copies of tied weights drift apart.
        """
        if not isinstance(self.optimizer, DeepSpeedZeroOptimizer):
            self._exec_reduce_tied_grads()
            return
        for weight, group in self.module.get_tied_weights_and_groups():
            gradient = self.optimizer.get_gradient_for_reduction(weight)
            if gradient is not None:
                dist.all_reduce(gradient, group=group)

    def _range_reduction(self) -> RangeReduction | None:
        """Return what reduces ranges during other passes; None if gradients are reduced at the end.

        DeepSpeed's ZeRO optimizer (fp32 and fp16 with ZeRO 1) has its own buffers for that. Gradients of experts that
        ranks divide are not averages of all data ranks.
        """
        is_plain_average = self.postscale_gradients() and self.gradient_predivide_factor() == 1.0
        if not self.module.overlaps_reduction or not is_plain_average:
            return None
        if isinstance(self.optimizer, DeepSpeedZeroOptimizer) or self.experts is not None:
            return None
        accumulated: dict[int, Tensor] = {}
        if isinstance(self.optimizer, BF16Optimizer):
            accumulated = {id(weight): gradient for weight, gradient in self.optimizer.accumulated_gradients}

        def gradient_of(parameter: nn.Parameter) -> Tensor:
            if id(parameter) in accumulated:
                return accumulated[id(parameter)]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            return parameter.grad

        group = self.mpu.get_data_parallel_group()
        return RangeReduction(self.module.parameters_of_ranges(), gradient_of, group, self.communication_data_type)

    def _reduce_range(self, chunk: int) -> None:
        """Start the reduction of a range's gradients."""
        if self._reduction is not None:
            self._reduction.start(chunk)

    def _reduce_gradients(self) -> None:
        """Reduce all gradients, or those that no range has begun to reduce."""
        if self._reduction is None:
            self._exec_reduce_grads()
            return
        self._reduction.finish()
        rest = []
        for parameter in self.module.parameters():
            if parameter.requires_grad and not self._reduction.holds(parameter):
                rest.append(self._reduction.gradient_of(parameter))
        if rest:
            self.buffered_allreduce_fallback(grads=rest)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate. DeepSpeed adds the scores of an evaluation to those of the last training step."""
        self.total_loss = None
        return super().eval_batch(*args, **kwargs)

    def _reduce_outputs(self, outputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return the rows of scores [K, 2] of micro batches on all data ranks. DeepSpeed would average the scores."""
        table = self.module.score_table
        rows = table.empty(self.device)
        for packed in outputs:
            rows = table.combine(rows, unpack_rows(packed))
        return table.all_reduce(rows, self.module.grid)

    def _bcast_pipe_scalar(self, data: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """Send the rows of scores from the last stage to all. DeepSpeed expects a single number."""
        rows = self.module.score_table.empty(self.device) if data is None else data
        dist.broadcast(rows, src=self._loss_stage_global_rank(), group=self.mpu.get_pipe_parallel_group())
        return rows

    def _optimizer_step(self) -> None:
        """Agree on the step's scores, and update.

        DeepSpeed updates first, and the host waits for both. Here a host can read the scores while the device updates.
        """
        rows = self._reduce_outputs(self.fwd_outputs) if self.is_last_stage() else None
        self.step_rows = self._bcast_pipe_scalar(rows)
        self._exec_optimizer_step()

    def _aggregate_total_loss(self) -> Tensor:
        """Return the mean of the first row that `_optimizer_step` has computed, for DeepSpeed's own log."""
        total, count = self.step_rows[0]
        return total / count

    _INSTRUCTION_MAP = MappingProxyType(
        {
            LoadBatch: _load_micro_batch,
            AskFor: _timed(COMMUNICATION, _ask_for),
            ReceiveActivation: _timed(COMMUNICATION, _receive_activation),
            ReceiveGradient: _timed(COMMUNICATION, _receive_gradient),
            Forward: _timed(FORWARD, _forward_pass),
            Backward: _timed(BACKWARD, _backward_pass),
            SendActivation: _timed(COMMUNICATION, _send_activation),
            SendGradient: _timed(COMMUNICATION, _send_gradient),
            schedule.ReduceTiedGrads: _timed(COMMUNICATION, _reduce_tied_gradients),
            schedule.ReduceGrads: _timed(COMMUNICATION, _reduce_gradients),
            ReduceRange: _timed(COMMUNICATION, _reduce_range),
            schedule.OptimizerStep: _timed(OPTIMIZER, _optimizer_step),
        }
    )


def _as_list(tensors: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return list(tensors)
