"""Timers of the parts of a training step (`wall_clock_breakdown`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule

from neox.engine.deepspeed_engines import PipelineEngine, PlainEngine

PARTS = ("forward", "backward", "communication", "optimizer")
"""What is timed: `communication` is the reduction of gradients, and in a pipeline what stages send each other.
Collectives inside layers (tensor ranks, ZeRO 3) belong to `forward` and `backward`, those of the update to
`optimizer`."""

# Methods of DeepSpeed's plain engine, and instructions of its pipeline's schedule.
_METHODS: Mapping[str, str] = MappingProxyType(
    {"forward": "forward", "backward": "backward", "allreduce_gradients": "communication", "step": "optimizer"}
)
_INSTRUCTIONS: Mapping[type, str] = MappingProxyType(
    {
        schedule.ForwardPass: "forward",
        schedule.BackwardPass: "backward",
        schedule.OptimizerStep: "optimizer",
        **dict.fromkeys(
            (
                *(schedule.ReduceGrads, schedule.ReduceTiedGrads),
                *(schedule.SendActivation, schedule.RecvActivation, schedule.SendGrad, schedule.RecvGrad),
            ),
            "communication",
        ),
    }
)


class StepTimers:
    """Seconds in each part of a step on this rank, each without the parts inside it.

    Args:
        engine: DeepSpeed's engine, whose calls are timed from now on.
        device: Is synchronised before and after every call.
    """

    def __init__(self, engine: PlainEngine, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._inside: list[float] = []  # of each call under way, the seconds in parts inside it
        if isinstance(engine, PipelineEngine):
            engine._INSTRUCTION_MAP = MappingProxyType(
                {
                    instruction: self._timed(_INSTRUCTIONS[instruction], run) if instruction in _INSTRUCTIONS else run
                    for instruction, run in engine._INSTRUCTION_MAP.items()
                }
            )
        else:
            for name, part in _METHODS.items():
                setattr(engine, name, self._timed(part, getattr(engine, name)))

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return seconds

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._synchronize()
            started = time.perf_counter()
            self._inside.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                self._synchronize()
                seconds = time.perf_counter() - started
                self._seconds[part] += seconds - self._inside.pop()
                if self._inside:
                    self._inside[-1] += seconds

        return timed

    def _synchronize(self) -> None:
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
