"""Table of pipeline schedules as DeepSpeed runs them; its keys are those of `neox.config`'s `PIPELINE_SCHEDULES`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from deepspeed.runtime.pipe.schedule import PipeSchedule, TrainSchedule

TRAIN_SCHEDULES: Mapping[str, type[PipeSchedule]] = MappingProxyType({"1f1b": TrainSchedule})
"""Value of `pipeline_schedule` -> class of the instructions of one stage in a training step."""
