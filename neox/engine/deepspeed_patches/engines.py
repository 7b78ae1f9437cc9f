"""DeepSpeed's engine for the whole network on each rank, with correct gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed.runtime.engine
import deepspeed.runtime.zero.stage3
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from neox.architecture import REDUCED_RANGE
from neox.engine.deepspeed_patches.bf16_optimizer import BF16Optimizer
from neox.engine.deepspeed_patches.expert_shards import ExpertStage3
from neox.engine.deepspeed_patches.file_states import SwappedStage3
from neox.engine.deepspeed_patches.range_reduction import LayerReduction, RangeReduction, ranges_of_layers
from neox.engine.deepspeed_patches.unfused_optimizer import UnfusedOptimizer
from neox.engine.deepspeed_patches.zero_optimizer import ZeroOptimizer
from neox.engine.measurements import COMMUNICATION, NoTimers, Timers
from neox.optim import EXPERTS, ClippedOptimizer, ExpertGroups
from neox.parallel import holds_divided_experts


class PlainEngine(DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed's engine for the whole network on each rank (or its tensor-parallel part); ZeRO 0 to 3.

    Attributes:
        step_rows: Totals and counts of the step's scores [K, 2] over micro batches and data ranks
            (`neox.objectives.scores`). They are on the device before the update is queued.
        step_timers: Timers of the parts of a step.
    """

    step_rows: Tensor
    step_timers: Timers = NoTimers()

    @property
    def experts(self) -> ExpertGroups | None:
        """The groups of data ranks that divide experts; None if each rank has all experts."""
        groups: ExpertGroups | None = getattr(self.client_optimizer, "expert_groups", None)
        return groups

    def module_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Return no weights for DeepSpeed's checkpoint files.

        DeepSpeed writes all weights of a model rank into one file. Here they are in layer files in every layout.
        """

    def _copy_recovery_script(self, save_path: str) -> None:
        """Do nothing.

        DeepSpeed copies `zero_to_fp32.py` into checkpoints, a script that looks for the weights in DeepSpeed's files.
        """

    def _configure_bf16_optimizer(self, optimizer: torch.optim.Optimizer) -> BF16Optimizer:
        """Build our subclass of DeepSpeed's optimizer for bf16, with DeepSpeed's arguments."""
        trains_experts = self.experts is not None and self._mark_experts()
        return BF16Optimizer(
            optimizer,
            self.param_names,
            bfloat16_config=self._config.bfloat16_config,
            mpu=self.mpu,
            clip_grad=self.gradient_clipping(),
            allgather_bucket_size=self.zero_allgather_bucket_size(),
            dp_process_group=self.seq_data_parallel_group,
            grad_acc_dtype=self.get_data_types()[1],
            has_moe_layers=trains_experts,
            experts=self.experts,
        )

    def _configure_fp16_optimizer(self, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> Any:
        """Build our subclass of DeepSpeed's optimizer for fp16, and for bf16 with ZeRO 0."""
        with _replaced(deepspeed.runtime.engine, "FP16_UnfusedOptimizer", UnfusedOptimizer):
            return super()._configure_fp16_optimizer(optimizer, dtype)

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """Build our subclasses of DeepSpeed's ZeRO optimizers.

        That of stage 3 can keep states in files, and knows divided experts.
        """
        stage3 = SwappedStage3 if self.experts is None else ExpertStage3
        with (
            _replaced(deepspeed.runtime.zero.stage3, "DeepSpeedZeroOptimizer_Stage3", stage3),
            _replaced(deepspeed.runtime.engine, "DeepSpeedZeroOptimizer", ZeroOptimizer),
        ):
            if self.experts is None or self.zero_optimization_partition_weights():
                return super()._configure_zero_optimizer(optimizer)
            return self._zero_optimizer_of_experts(self.experts, optimizer)

    def _zero_optimizer_of_experts(self, groups: ExpertGroups, optimizer: torch.optim.Optimizer) -> Any:
        """Build DeepSpeed's ZeRO optimizer 1 or 2 for experts that ranks divide.

        DeepSpeed divides states of experts over the ranks with the same experts, if it knows which parameters these
        are. It takes both from layers of its own only. Its engine must not know: it would save and reduce itself.
        """
        trains_experts = self._mark_experts()
        self.expert_parallel_group = {EXPERTS: groups.divided}
        self.expert_data_parallel_group = {EXPERTS: groups.same}
        # DeepSpeed asserts that some parameter group has experts, but a stage may train none.
        with _replaced(self, "has_moe_layers", trains_experts):
            return super()._configure_zero_optimizer(optimizer)

    def _mark_experts(self) -> bool:
        """Mark the parameters of expert parallel experts for DeepSpeed; return whether any of them is trained."""
        trains_experts = False
        for parameter in self.module.parameters():
            if holds_divided_experts(parameter):
                parameter.allreduce = False
                parameter.group_name = EXPERTS
                trains_experts = trains_experts or parameter.requires_grad
        return trains_experts

    def reduce_during_backward(self, layers: Sequence[nn.Module]) -> None:
        """Reduce gradients during the last backward pass of a step from now on, where that is the plain average.

        It serves `BF16Optimizer`, whose gradients are reduced by this engine. DeepSpeed's ZeRO optimizers reduce in
        buckets of their own.

        Args:
            layers: The layers of the network in order.
        """
        wrapper = self.optimizer
        is_plain_average = self.postscale_gradients() and self.gradient_predivide_factor() == 1.0
        if not isinstance(wrapper, BF16Optimizer) or not wrapper.immediate_grad_update or not is_plain_average:
            return
        group = self.seq_data_parallel_group
        if dist.get_world_size(group) == 1 or self.sequence_parallel_size > 1:
            return
        accumulated = {id(weight): gradient for weight, gradient in wrapper.accumulated_gradients}

        def takes_part(parameter: nn.Parameter) -> bool:
            return id(parameter) in accumulated and not holds_divided_experts(parameter)

        ranges = ranges_of_layers(layers, takes_part, min(REDUCED_RANGE, self.zero_reduce_bucket_size()))
        reduction = RangeReduction(
            ranges, lambda parameter: accumulated[id(parameter)], group, self.communication_data_type
        )
        wrapper.layer_reduction = LayerReduction(ranges, reduction)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; after an evaluation, wait for the weights that ZeRO 3 gathers ahead.

        DeepSpeed gathers ahead in the order of a training step. An evaluation ends before the modules of multi-token
        prediction, whose weights are then on their way until the next forward pass: a save or an average of weights
        in between would read empty tensors.
        """
        output = super().forward(*inputs, **kwargs)
        if self.zero_optimization_partition_weights() and not self.module.training:
            self.optimizer.parameter_offload.get_param_coordinator()._clean_inflight_param_registry()
        return output

    def backward(self, scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Scale the loss, which is the first number of packed scores, and run the backward pass.

        DeepSpeed's fp16 wrapper for ZeRO 0 divides gradients by the loss scale, but its engine multiplies the loss for
        ZeRO's own optimizers only. So gradients are too small by the scale. (Adam hides it; clipping never acts.)
        """
        scaling = getattr(self.optimizer, "loss_scale_config", None)
        loss = scores[0]
        if scaling is not None and scaling.use_grad_scaling:
            loss = loss.float() * scaling.cur_scale
        layer_reduction = getattr(self.optimizer, "layer_reduction", None)
        if layer_reduction is not None and self.is_gradient_accumulation_boundary():
            layer_reduction.begin()
        return super().backward(loss, *args, **kwargs)

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Average gradients over data ranks, and measure how long that takes."""
        with self.step_timers.part(COMMUNICATION):
            super().allreduce_gradients(*args, **kwargs)

    def buffered_allreduce_fallback(self, grads: Any = None, *args: Any, **kwargs: Any) -> None:
        """Average gradients over data ranks, if there are several.

        DeepSpeed copies all gradients into one buffer and back, for a single rank too. Parameters without a gradient
        get zeros, as there.
        """
        layer_reduction = getattr(self.optimizer, "layer_reduction", None)
        if grads is None and layer_reduction is not None:
            layer_reduction.finish()
            rest = []
            for weight, gradient in self.optimizer.accumulated_gradients:
                if not layer_reduction.holds(weight) and not holds_divided_experts(weight):
                    rest.append(gradient)
            if rest:
                super().buffered_allreduce_fallback(rest, *args, **kwargs)
            self._average_experts()
        elif self.dp_world_size > 1:
            super().buffered_allreduce_fallback(grads, *args, **kwargs)
            self._average_experts()
        elif isinstance(self.optimizer, ClippedOptimizer):
            for parameter in _parameters(self.optimizer):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        elif grads is None and not hasattr(self.optimizer, "get_grads_for_reduction"):
            self._get_gradients_for_reduction()

    def _broadcast_model(self) -> None:
        """Copy the first data rank's weights to the others, unless ranks divide experts.

        DeepSpeed would give all of them the first rank's experts. Initial weights are the same on all ranks anyway.
        """
        if not any(map(holds_divided_experts, self.module.parameters())):
            super()._broadcast_model()

    def _get_gradients_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Return the gradients that are averaged over all data ranks: all but those of divided experts.

        DeepSpeed knows experts only in layers of its own.
        """
        if self.experts is None:
            found: tuple[list[Tensor], dict[str, list[Tensor]]] = super()._get_gradients_for_reduction()
            return found
        shared = []
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if not holds_divided_experts(parameter):
                shared.append(parameter.grad)
        return shared, {}

    def _average_experts(self) -> None:
        """Average gradients of experts, which are sums over the ranks that divide experts, over all data ranks."""
        if self.experts is None:
            return
        if isinstance(self.optimizer, BF16Optimizer):
            self.optimizer.average_experts(self.dp_world_size)
            return
        for parameter in self.module.parameters():
            if parameter.requires_grad and holds_divided_experts(parameter):
                dist.all_reduce(parameter.grad, group=self.experts.same)
                parameter.grad /= self.dp_world_size

    def zero_grad(self) -> None:
        """Release the gradients. DeepSpeed walks over all modules to find the parameters."""
        if not isinstance(self.optimizer, ClippedOptimizer):
            super().zero_grad()
            return
        for parameter in _parameters(self.optimizer):
            parameter.grad = None


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute while the context lasts."""
    original = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, original)
