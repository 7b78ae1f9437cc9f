"""Rules of the stages of the training data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from neox.config.neox_config import NeoXConfig
from neox.config.sections.data import DataStage
from neox.plan.batches.batch import BatchPlan
from neox.plan.batches.batch_schedule import BatchSchedule
from neox.problems import Problem

_KEY = "data_stages"
_STARTS = ("start_step", "start_tokens", "start_fraction", "start_at_lr_decay")


def stage_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield what is wrong with single stages."""
    for number, stage in enumerate(config.data.data_stages or ()):
        for rule, *others in (*_start_rules(config, number, stage), *_weight_rules(config, stage)):
            yield _problem(config, number, rule, *others)


def order_problems(config: NeoXConfig, batch: BatchPlan) -> Iterator[Problem]:
    """Yield stages that do not start after the one before, or within the run. All other rules must hold."""
    train_iters = config.training.train_iters
    for number, (before, stage) in enumerate(pairwise(BatchSchedule.of(config, batch).mixtures), start=1):
        if stage.step <= before.step:
            rule = f"starts at step {stage.step:,}, and the one before it at step {before.step:,}; let it start later"
            yield _problem(config, number, rule)
        if train_iters is not None and stage.step >= train_iters:
            rule = f"starts at step {stage.step:,}, and the run ends after {train_iters:,} steps; let it start earlier"
            yield _problem(config, number, rule, "train_iters")


def _problem(config: NeoXConfig, number: int, rule: str, *others: str) -> Problem:
    """Return the problem of a stage. `rule` is the rest of a sentence that begins with it."""
    return config.problem_about(f"`{_KEY}`: item {number} {rule}", _KEY, *others)


def _start_rules(config: NeoXConfig, number: int, stage: DataStage) -> Iterator[tuple[str, ...]]:
    """Yield what is wrong with the start of a stage, and the other keys that it depends on."""
    starts = [key for key in _STARTS if getattr(stage, key)]
    if number == 0 and starts:
        yield (f"has {starts[0]}, but the first stage starts with the run; remove it",)
    if number and len(starts) != 1:
        yield (f"needs one of {', '.join(_STARTS)}, and has {' and '.join(starts) or 'none'}",)
    if stage.start_at_lr_decay and config.schedule.lr_decay_style != "WSD":
        yield "has start_at_lr_decay, which needs `lr_decay_style: WSD`", "lr_decay_style"
    if stage.start_fraction and config.training.train_iters is None:
        yield "has start_fraction, which needs train_iters", "train_iters"


def _weight_rules(config: NeoXConfig, stage: DataStage) -> Iterator[tuple[str, ...]]:
    """Yield what is wrong with weights and lengths of a stage, and the other keys that it depends on."""
    paths = len(config.data.train_data_paths or ())
    if stage.weights is not None and (len(stage.weights) != paths or not any(stage.weights)):
        wanted = f"give one for each of the {paths} train_data_paths, not all 0"
        yield f"has the weights {list(stage.weights)}; {wanted}", "train_data_paths"
    if stage.weights is not None and stage.temperature is not None:
        yield ("has weights and a temperature, which both set weights; remove one",)
    longest = config.model.seq_length
    if stage.seq_length is not None and longest is not None and stage.seq_length > longest:
        yield f"has samples of {stage.seq_length} tokens, longer than the key seq_length", "seq_length"
