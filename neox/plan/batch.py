"""Samples and sequence length of each step: ramp-up of the batch (Megatron-LM's) and curriculum (DeepSpeed's)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from neox.config.neox_config import NeoXConfig
from neox.config.sections.schedule import CurriculumSettings
from neox.problems import Problem

RAMP_KEY = "rampup_batch_size"


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes in samples: train_batch_size = micro batch x accumulation steps x data-parallel ranks."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int

    @property
    def samples_at_once(self) -> int:
        """Samples of one micro batch over all data-parallel ranks."""
        return self.train_batch_size // self.gradient_accumulation_steps


class Phase(NamedTuple):
    """Steps of one batch size: the first one, the samples taken before it, and the batch size."""

    step: int
    sample: int
    batch_size: int


class Segment(NamedTuple):
    """Steps of one batch size and one sequence length: [first, last)."""

    first: int
    last: int
    batch_size: int
    seq_length: int

    @property
    def tokens(self) -> int:
        """Tokens of all its steps."""
        return (self.last - self.first) * self.batch_size * self.seq_length


@dataclass(frozen=True)
class BatchSchedule:
    """What each step of a run takes; steps count from 0, skipped ones included.

    Attributes:
        batch: Batch sizes after the ramp-up.
        full_length: seq_length.
        phases: Steps of each batch size, ascending; one without ramp-up.
        curriculum: Lengths; None where all are seq_length.
    """

    batch: BatchPlan
    full_length: int
    phases: tuple[Phase, ...]
    curriculum: CurriculumSettings | None = None

    @classmethod
    def of(cls, config: NeoXConfig, batch: BatchPlan) -> BatchSchedule:
        """Return the schedule that a configuration asks for, which `validation` has accepted."""
        ramp, curriculum = config.schedule.rampup_batch_size, config.schedule.curriculum_learning
        phases: tuple[Phase, ...] = (Phase(0, 0, batch.train_batch_size),)
        if ramp is not None:
            phases = tuple(_ramp(*ramp, batch.train_batch_size))
        used = curriculum if curriculum is not None and curriculum.enabled else None
        return cls(batch, config.model.seq_length or 0, phases, used)

    def _phase(self, step: int) -> Phase:
        return self.phases[bisect_right(self.phases, step, key=lambda phase: phase.step) - 1]

    def batch_size(self, step: int) -> int:
        """Return the samples of a step."""
        return self._phase(step).batch_size

    def samples(self, steps: int) -> int:
        """Return the samples of the first `steps` steps."""
        phase = self._phase(steps)
        return phase.sample + (steps - phase.step) * phase.batch_size

    def steps(self, samples: int) -> int:
        """Return how many whole steps so many samples give."""
        phase = self.phases[bisect_right(self.phases, samples, key=lambda phase: phase.sample) - 1]
        return phase.step + (samples - phase.sample) // phase.batch_size

    def seq_length(self, step: int) -> int:
        """Return the tokens of each sample in a step."""
        return self.full_length if self.curriculum is None else min(self.full_length, _length(self.curriculum, step))

    def segments(self, steps: int) -> Iterator[Segment]:
        """Yield the first `steps` steps in parts of equal batch size and length."""
        first = 0
        while first < steps:
            size, length = self.batch_size(first), self.seq_length(first)
            later = range(first, steps)  # both only grow
            last = first + bisect_right(later, (size, length), key=lambda i: (self.batch_size(i), self.seq_length(i)))
            yield Segment(first, last, size, length)
            first = last

    def describe(self, steps: int) -> Iterator[tuple[str, str]]:
        """Yield a label and a line for what changes within the first `steps` steps."""
        if len(self.phases) > 1:
            last = self.phases[-1]
            grown = f"{last.batch_size:,} from step {last.step:,}, after {last.sample:,} samples"
            yield "ramp-up", f"{self.phases[0].batch_size:,} samples a step at first, {grown}"
        if self.curriculum is not None:
            longest = self.seq_length(max(0, steps - 1))
            first = bisect_left(range(steps), longest, key=self.seq_length)
            yield "lengths", f"{self.seq_length(0):,} tokens a sample at first, {longest:,} from step {first:,}"


def _ramp(start: int, increment: int, samples: int, final: int) -> Iterator[Phase]:
    """Yield the batch sizes: the n-th of equal parts of `samples` begins with a batch of start + n x increment."""
    step = sample = 0
    parts = (final - start) // increment
    while sample < samples:
        part = sample * parts // samples
        size = start + part * increment
        yield Phase(step, sample, size)
        end = -(-(part + 1) * samples // parts)
        steps = -(-(end - sample) // size)
        step, sample = step + steps, sample + steps * size
    yield Phase(step, sample, final)


def _length(curriculum: CurriculumSettings, step: int) -> int:
    """Return DeepSpeed's difficulty of a step; it counts steps from 1."""
    keys, number = curriculum.schedule_config, step + 1
    if curriculum.schedule_type == "fixed_discrete":
        return keys.difficulty[bisect_left(keys.max_step, number)]
    # `validation` has seen to it that all are given.
    lowest, highest = curriculum.min_difficulty or 1, curriculum.max_difficulty or 1
    multiple, total = keys.difficulty_step or 1, keys.total_curriculum_step or 1
    root = keys.root_degree if curriculum.schedule_type == "fixed_root" else 1
    length = math.floor((number / total) ** (1.0 / (root or 1)) * (highest - lowest) + lowest)
    return min(max(length - length % multiple, -(-lowest // multiple) * multiple), highest)


# Keys that decide the final batch.
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def ramp_problems(config: NeoXConfig, batch: BatchPlan) -> Iterator[Problem]:
    """Yield what is wrong with `rampup_batch_size` for a batch."""
    ramp = config.schedule.rampup_batch_size
    if ramp is None:
        return
    start, increment, _ = ramp
    final, unit, micro = batch.train_batch_size, batch.samples_at_once, batch.train_micro_batch_size_per_gpu
    if start >= final:
        yield config.problem(
            RAMP_KEY, f"starts at {start}, not below the batch of {final} that it should grow to", *_SIZES
        )
    elif (final - start) % increment:
        yield config.problem(
            RAMP_KEY,
            f"does not reach the batch of {final} from {start} in steps of {increment}; "
            f"use a divisor of {final - start}",
            *_SIZES,
        )
    for value, name in ((start, "first size"), (increment, "increment")):
        if value % unit:
            yield config.problem(
                RAMP_KEY,
                f"has the {name} {value}, which is no multiple of {unit}: train_micro_batch_size_per_gpu {micro} x "
                f"{unit // micro} data-parallel ranks; use {max(1, round(value / unit)) * unit}",
                *_SIZES,
            )
