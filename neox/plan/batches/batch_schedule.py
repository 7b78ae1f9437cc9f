"""Batch size and sequence length of each step: constant, with Megatron's ramp-up, and with DeepSpeed's curriculum."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from neox.config.neox_config import NeoXConfig
from neox.config.sections.schedule import CurriculumSettings
from neox.plan.batches.batch import BATCH_KEYS, MICRO, BatchPlan
from neox.plan.batches.mixtures import Mixture, mixtures_of
from neox.problems import Problem

RAMP_KEY = "rampup_batch_size"


class Phase(NamedTuple):
    """Steps of one batch size.

    Attributes:
        step: Number of the first step.
        sample: Number of samples taken before it.
        batch_size: Samples of each step.
    """

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
    """Samples and tokens of each step of a run. Steps count from 0, with those that are skipped.

    Attributes:
        batch: Batch sizes after the ramp-up.
        full_length: Value of `seq_length`.
        phases: Steps of each batch size, ascending; one phase without ramp-up.
        curriculum: Growth of the sequence length; None if there is none.
        mixtures: Stages of the training data, which have lengths of their own; the first one starts at step 0.
    """

    batch: BatchPlan
    full_length: int
    phases: tuple[Phase, ...]
    curriculum: CurriculumSettings | None = None
    mixtures: tuple[Mixture, ...] = ()

    @classmethod
    def of(cls, config: NeoXConfig, batch: BatchPlan) -> BatchSchedule:
        """Return the schedule that a configuration asks for, which the rules have accepted."""
        phases: tuple[Phase, ...] = (Phase(0, 0, batch.train_batch_size),)
        if config.schedule.rampup_batch_size is not None:
            start, increment, samples = config.schedule.rampup_batch_size
            phases = tuple(_ramp(start, increment, samples, batch.train_batch_size))
        curriculum = config.schedule.curriculum_learning
        if curriculum is not None and not curriculum.enabled:
            curriculum = None
        schedule = cls(batch, config.model.seq_length or 0, phases, curriculum)
        return replace(schedule, mixtures=mixtures_of(config, schedule))

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
        if self.curriculum is not None:
            return min(self.full_length, _length(self.curriculum, step))
        if self.mixtures:
            return self.mixtures[self.mixture_number(step)].seq_length
        return self.full_length

    def mixture_number(self, step: int) -> int:
        """Return the number of the stage of the training data in a step."""
        return bisect_right(self.mixtures, step, key=lambda mixture: mixture.step) - 1

    def segments(self, steps: int) -> Iterator[Segment]:
        """Yield the first `steps` steps in parts of equal batch size and length."""
        first = 0
        while first < steps:
            sizes = self._sizes(first)
            end = min([steps, *(mixture.step for mixture in self.mixtures if mixture.step > first)])
            # Within a stage sizes only grow, so a binary search finds the end of equal ones.
            last = first + bisect_right(range(first, end), sizes, key=self._sizes)
            yield Segment(first, last, *sizes)
            first = last

    def _sizes(self, step: int) -> tuple[int, int]:
        return self.batch_size(step), self.seq_length(step)

    def _phase(self, step: int) -> Phase:
        return self.phases[bisect_right(self.phases, step, key=lambda phase: phase.step) - 1]

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
    """Yield the phases of a ramp-up: the n-th of equal parts of `samples` begins with start + n x increment."""
    step = 0
    sample = 0
    parts = (final - start) // increment
    while sample < samples:
        part = sample * parts // samples
        size = start + part * increment
        yield Phase(step, sample, size)
        end_of_part = -(-(part + 1) * samples // parts)
        steps = -(-(end_of_part - sample) // size)
        step += steps
        sample += steps * size
    yield Phase(step, sample, final)


def _length(curriculum: CurriculumSettings, step: int) -> int:
    """Return DeepSpeed's difficulty of a step; DeepSpeed counts steps from 1."""
    growth = curriculum.schedule_config
    number = step + 1
    if curriculum.schedule_type == "fixed_discrete":
        return growth.difficulty[bisect_left(growth.max_step, number)]
    # The rules require all numbers of the chosen type.
    lowest = curriculum.min_difficulty or 1
    highest = curriculum.max_difficulty or 1
    multiple = growth.difficulty_step or 1
    root = 1
    if curriculum.schedule_type == "fixed_root":
        root = growth.root_degree or 1
    part_of_growth = (number / (growth.total_curriculum_step or 1)) ** (1.0 / root)
    length = math.floor(part_of_growth * (highest - lowest) + lowest)
    length -= length % multiple
    lowest_multiple = -(-lowest // multiple) * multiple
    return min(max(length, lowest_multiple), highest)


def ramp_sizes(config: NeoXConfig) -> tuple[int, ...]:
    """Return the numbers of samples that data ranks must be able to divide in a ramp-up: first size and increment.

    If they can, they can divide all sizes of the ramp-up. Without a ramp-up there are none.
    """
    ramp = config.schedule.rampup_batch_size
    if ramp is None:
        return ()
    start, increment, _ = ramp
    return start, increment


def ramp_problems(config: NeoXConfig, batch: BatchPlan) -> Iterator[Problem]:
    """Yield what is wrong with `rampup_batch_size` for a batch."""
    ramp = config.schedule.rampup_batch_size
    if ramp is None:
        return
    start, increment, _ = ramp
    final = batch.train_batch_size
    if start >= final:
        rule = f"starts at {start}, not below the batch of {final} that it should grow to"
        yield config.problem(RAMP_KEY, rule, *BATCH_KEYS)
    elif (final - start) % increment:
        rule = f"does not reach the batch of {final} from {start} in steps of {increment}"
        yield config.problem(RAMP_KEY, f"{rule}; use a divisor of {final - start}", *BATCH_KEYS)
    unit = batch.samples_at_once
    micro = batch.train_micro_batch_size_per_gpu
    for value, name in ((start, "first size"), (increment, "increment")):
        if value % unit:
            factors = f"{MICRO} {micro} x {unit // micro} data-parallel ranks"
            rule = f"has the {name} {value}, which is no multiple of {unit}: {factors}"
            nearest = max(1, round(value / unit)) * unit
            yield config.problem(RAMP_KEY, f"{rule}; use {nearest}", *BATCH_KEYS)
