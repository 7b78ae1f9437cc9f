"""Flat keys of gpt-neox that are another spelling of a setting: alias -> key or dotted path.

gpt-neox derives these from the target and silently overwrites what the user wrote; here they set it, and a
contradiction is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "batch_size": "train_micro_batch_size_per_gpu",
        "gas": "gradient_accumulation_steps",
        "clip_grad": "gradient_clipping",
        "optimizer_type": "optimizer.type",
        "lr": "optimizer.params.lr",
        "zero_stage": "zero_optimization.stage",
        "zero_reduce_scatter": "zero_optimization.reduce_scatter",
        "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
        "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
        "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
        "loss_scale": "fp16.loss_scale",
        "loss_scale_window": "fp16.loss_scale_window",
        "min_scale": "fp16.min_loss_scale",
        "hysteresis": "fp16.hysteresis",
    }
)
