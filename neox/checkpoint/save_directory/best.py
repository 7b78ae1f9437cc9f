"""The checkpoint named `best`: the link `SAVE/best`, and a record of why it is the best.

`SAVE/best` is a symbolic link to a `global_stepN` directory, so every command that takes a checkpoint takes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from neox.config.sections.data import split_shares
from neox.errors import CheckpointError, os_errors
from neox.files import read_json_object, replace_link, write_text
from neox.plan import RunPlan

BEST = "best"
"""Name of the link in the directory of checkpoints."""
_RECORD = "best.json"
_OF_VALIDATION = {
    "data": ("data_path", "valid_data_paths", "valid_data_weights", "valid_label_data_paths"),
    "preferences": (
        "pos_valid_data_paths",
        "pos_valid_label_data_paths",
        "neg_valid_data_paths",
        "neg_valid_label_data_paths",
        "valid_reward_data_paths",
    ),
}
"""Keys that say of which data validation is, by section."""
_OF_TASKS = ("eval_stride", "eval_num_fewshot", "eval_limit")


@dataclass(frozen=True)
class BestRule:
    """By what checkpoints are compared. Values under different rules cannot be.

    Attributes:
        metric: Scalar of evaluations.
        goal: Whether the smallest or the largest value is the best: `min` or `max`.
        measured_on: What the scalar is measured on: keys and values.
    """

    metric: str
    goal: str = "min"
    measured_on: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: RunPlan) -> BestRule:
        """Return the rule of a run with `save_best`."""
        keys = plan.config.checkpoint
        assert keys.save_best is not None
        return cls(keys.save_best, keys.save_best_goal, _measured_on(plan, keys.save_best))

    def changes_since(self, earlier: BestRule) -> Iterator[str]:
        """Yield what differs from the rule of an earlier start, with both values.

        A record without a goal or data is of a version that did not write them; they count as unchanged.
        """
        before = {"save_best": earlier.metric, "save_best_goal": earlier.goal or self.goal}
        now = {"save_best": self.metric, "save_best_goal": self.goal}
        if earlier.measured_on and earlier.metric == self.metric:
            before |= earlier.measured_on
            now |= self.measured_on
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                yield f"{key} {before.get(key, 'unset')} -> {now.get(key, 'unset')}"


def _measured_on(plan: RunPlan, metric: str) -> dict[str, Any]:
    """Return what a scalar is measured on, as JSON holds it."""
    config = plan.config
    group, _, name = metric.partition("/")
    found: dict[str, Any] = {}
    if group == "eval":
        tasks = config.generation.eval_tasks or ()
        own = []  # further tasks change nothing about this one
        for task in tasks:
            kind, _, path = task.partition("=")
            if name.startswith((kind, Path(path or kind).stem)):
                own.append(task)
        found["eval_tasks"] = own or [*tasks]
        found |= config.generation.model_dump(mode="json", include={*_OF_TASKS}, exclude_none=True)
        return found
    for section, keys in _OF_VALIDATION.items():
        found |= getattr(config, section).model_dump(mode="json", include={*keys}, exclude_none=True)
    found["split"] = [round(share, 6) for share in split_shares(config.data.split)]
    if config.data.data_path is None:
        del found["split"]
    sets = config.data.validation_sets
    one_set = name.partition("/")[0]
    if one_set in sets:  # neither other sets nor their weights change anything about this one
        found["valid_data_paths"] = {one_set: sets[one_set].path}
    elif sets:
        found["valid_data_paths"] = {key: [item.path, item.weight] for key, item in sets.items()}
    samples = config.training.evaluation_samples(plan.batch.train_batch_size)
    found["samples"] = "all" if samples is None else samples
    found["seq_length"] = config.model.seq_length
    found["eval_order"] = config.training.eval_order
    return found


@dataclass(frozen=True)
class BestCheckpoint:
    """The best checkpoint of a run so far.

    Attributes:
        checkpoint: Name of its directory.
        iteration: Its iteration.
        value: Its value of the rule's scalar.
        rule: By what it is the best.
    """

    checkpoint: str
    iteration: int
    value: float
    rule: BestRule


def read_best(save: Path) -> BestCheckpoint | None:
    """Return the best checkpoint in a directory; None if none has the name, or its directory is gone."""
    fields = read_json_object(save / _RECORD)
    try:
        rule = BestRule(str(fields["metric"]), str(fields.get("goal", "")), dict(fields.get("measured_on", {})))
        found = BestCheckpoint(str(fields["checkpoint"]), int(fields["iteration"]), float(fields["value"]), rule)
    except (ValueError, KeyError, TypeError):
        return None
    return found if (save / found.checkpoint).is_dir() else None


def name_best(save: Path, best: BestCheckpoint) -> None:
    """Give a checkpoint the name `best`. Raises CheckpointError."""
    record = {"checkpoint": best.checkpoint, "iteration": best.iteration, "value": best.value, **asdict(best.rule)}
    with os_errors(CheckpointError, f"{save / BEST}: cannot be written"):
        replace_link(save / BEST, best.checkpoint)
        write_text(save / _RECORD, json.dumps(record, indent=2) + "\n")


def change_of_rule(save: Path, rule: BestRule) -> str | None:
    """Return what becomes of the best checkpoint in a directory if it was compared by another rule; None if it was not.

    Args:
        save: Directory of checkpoints.
        rule: The rule of the run that resumes.
    """
    found = read_best(save)
    if found is None:
        return None
    changes = list(rule.changes_since(found.rule))
    if not changes:
        return None
    return (
        f"save_best: {found.checkpoint} is `best` with {found.rule.metric} {found.value:.6g}, which cannot be compared "
        f"any more ({'; '.join(changes)}); it keeps the name until the next checkpoint is saved and evaluated"
    )


def forget_best(save: Path) -> None:
    """Remove the name, if there is one, from a directory in which a run begins anew."""
    for name in (BEST, _RECORD):
        with suppress(OSError):
            (save / name).unlink(missing_ok=True)
