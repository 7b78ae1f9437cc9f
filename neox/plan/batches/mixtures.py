"""Stages of the training data: from which step on which datasets are read, and in samples of which length."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from neox.config.neox_config import NeoXConfig
from neox.config.sections.data import DataStage
from neox.plan.schedule import WarmupStableDecay, schedule_of


class Mixture(NamedTuple):
    """What is read from a step on.

    Attributes:
        name: Name in the plan.
        step: First step.
        seq_length: Number of tokens of a sample.
        weights: Weight of each training dataset; None if they follow from sizes, or are equal.
        temperature: Temperature of weights by size; None if there is none.
    """

    name: str
    step: int
    seq_length: int
    weights: tuple[float, ...] | None = None
    temperature: float | None = None


class StepSamples(Protocol):
    """Number of samples of each step."""

    def samples(self, steps: int) -> int:
        """Return the samples of the first `steps` steps."""

    def steps(self, samples: int) -> int:
        """Return how many whole steps so many samples give."""


def mixtures_of(config: NeoXConfig, schedule: StepSamples) -> tuple[Mixture, ...]:
    """Return the stages of the training data; one stage if `data_stages` is not set.

    Args:
        config: The configuration, which the rules have accepted.
        schedule: Samples of each step.
    """
    data = config.data
    full_length = config.model.seq_length or 0
    mixtures: list[Mixture] = []
    tokens = 0  # before the last stage
    for number, stage in enumerate(data.data_stages or (DataStage(),)):
        step = 0
        if mixtures:
            step = _first_step(config, stage, schedule, mixtures[-1], tokens)
            tokens += (schedule.samples(step) - schedule.samples(mixtures[-1].step)) * mixtures[-1].seq_length
        weights = stage.weights
        temperature = stage.temperature
        if weights is None and temperature is None:
            weights = data.train_data_weights
            temperature = data.train_data_temperature
        name = stage.name or f"stage {number + 1}"
        mixtures.append(Mixture(name, step, stage.seq_length or full_length, weights, temperature))
    return tuple(mixtures)


def _first_step(config: NeoXConfig, stage: DataStage, schedule: StepSamples, before: Mixture, tokens: int) -> int:
    """Return the first step of a stage. `tokens` is the number of tokens up to the start of the stage before it."""
    if stage.start_step is not None:
        return stage.start_step
    if stage.start_fraction is not None:
        return round(stage.start_fraction * (config.training.train_iters or 0))
    if stage.start_tokens is not None:
        missing = math.ceil((stage.start_tokens - tokens) / before.seq_length)
        samples = schedule.samples(before.step) + max(0, missing)
        step = schedule.steps(samples)
        if schedule.samples(step) < samples:
            step += 1
        return step
    decay = schedule_of(config)
    assert isinstance(decay, WarmupStableDecay), "the rules require it"
    return decay.first_decay_step
