"""Flat keys of gpt-neox that are another spelling of a setting.

gpt-neox derives these from the target and silently overwrites what the user wrote; here they set it, and a
contradiction is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Alias:
    """What a key stands for.

    target: flat key or dotted path. values: for keys that imply a value rather than carry it, given value -> the
    target's values it agrees with, the first being set where the target is absent; None: the value itself.
    """

    target: str
    section: str
    type: str
    values: Mapping[Any, tuple[Any, ...]] | None = None

    def agreeing(self, value: Any) -> tuple[Any, ...]:
        """Return the target's values that agree with a given value; none where it implies nothing."""
        if self.values is None:
            return (value,)
        return self.values.get(value, ()) if isinstance(value, bool) else ()


_ZERO = "zero_optimization"

ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        "batch_size": Alias("train_micro_batch_size_per_gpu", "deepspeed", "int"),
        "gas": Alias("gradient_accumulation_steps", "deepspeed", "int"),
        "clip_grad": Alias("gradient_clipping", "deepspeed", "float"),
        "optimizer_type": Alias("optimizer.type", "optimizer", "str"),
        "lr": Alias("optimizer.params.lr", "optimizer", "float"),
        "zero_stage": Alias(f"{_ZERO}.stage", "deepspeed", "int"),
        "zero_reduce_scatter": Alias(f"{_ZERO}.reduce_scatter", "deepspeed", "bool"),
        "zero_contiguous_gradients": Alias(f"{_ZERO}.contiguous_gradients", "deepspeed", "bool"),
        "zero_reduce_bucket_size": Alias(f"{_ZERO}.reduce_bucket_size", "deepspeed", "int"),
        "zero_allgather_bucket_size": Alias(f"{_ZERO}.allgather_bucket_size", "deepspeed", "int"),
        "loss_scale": Alias("fp16.loss_scale", "deepspeed", "float"),
        "loss_scale_window": Alias("fp16.loss_scale_window", "deepspeed", "int"),
        "min_scale": Alias("fp16.min_loss_scale", "deepspeed", "int"),
        "hysteresis": Alias("fp16.hysteresis", "deepspeed", "int"),
        "dynamic_loss_scale": Alias("fp16.loss_scale", "deepspeed", "bool", {True: (0, 0.0)}),
        "deepspeed_slurm": Alias("launcher", "runner", "bool", {True: ("slurm",)}),
        "deepspeed_mpi": Alias("launcher", "runner", "bool", {True: ("openmpi", "mvapich")}),
        "is_pipe_parallel": Alias("pipe_parallel_size", "parallelism", "bool", {}),  # checked by a law
        "save_interval": Alias("checkpoint_factor", "checkpoint", "int"),  # gpt-neox before v2.0
    }
)
