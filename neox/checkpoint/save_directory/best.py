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

from neox.errors import CheckpointError, os_errors
from neox.files import read_json_object, replace_link, write_text
from neox.plan.run_identity import saved_config

BEST = "best"
"""Name of the link in the directory of checkpoints."""
JOINED_BY = "joined_text_weighed_by"
"""What a scalar of joined texts is measured on besides keys. Versions before 0.3 weighed them otherwise."""
SCORED_OF_DOCUMENTS = "scored_of_documents"
"""What a score of `perplexity=FILE` is measured on besides keys. Versions before 0.3 also scored ends of documents."""
_DEFINITIONS = (JOINED_BY, SCORED_OF_DOCUMENTS)
BEST_RECORD = "best.json"
"""Name of the record beside `best`, whose `checkpoint` is the name of a directory of checkpoints."""


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

    def changes_since(self, earlier: BestRule) -> Iterator[str]:
        """Yield what differs from the rule of an earlier start, with both values.

        A record without data is of a version that did not write them; they count as unchanged.
        """
        before: dict[str, Any] = {"save_best": earlier.metric, "save_best_goal": earlier.goal}
        now: dict[str, Any] = {"save_best": self.metric, "save_best_goal": self.goal}
        if earlier.metric == self.metric:
            before |= earlier.measured_on
            for key, value in self.measured_on.items():
                if earlier.measured_on or key in _DEFINITIONS:
                    now[key] = value
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                yield f"{key} {before.get(key) or 'unset'} -> {now.get(key, 'unset')}"


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
    """Return the best checkpoint in a directory; None if none has the name, or its directory is gone.

    The goal of a record from a version that did not write it is that of the checkpoint's configuration; it is empty if
    that cannot be read.
    """
    fields = read_json_object(save / BEST_RECORD)
    try:
        goal = fields.get("goal")
        if goal is None:
            config = saved_config(save / str(fields["checkpoint"]))
            goal = "" if config is None else config.checkpoint.save_best_goal or "min"  # its default then
        rule = BestRule(str(fields["metric"]), str(goal), dict(fields.get("measured_on", {})))
        found = BestCheckpoint(str(fields["checkpoint"]), int(fields["iteration"]), float(fields["value"]), rule)
    except (ValueError, KeyError, TypeError):
        return None
    return found if (save / found.checkpoint).is_dir() else None


def name_best(save: Path, best: BestCheckpoint) -> None:
    """Give a checkpoint the name `best`. Raises CheckpointError."""
    record = {"checkpoint": best.checkpoint, "iteration": best.iteration, "value": best.value, **asdict(best.rule)}
    with os_errors(CheckpointError, f"{save / BEST}: cannot be written"):
        replace_link(save / BEST, best.checkpoint)
        write_text(save / BEST_RECORD, json.dumps(record, indent=2) + "\n")


def change_of_rule(found: BestCheckpoint, rule: BestRule) -> str | None:
    """Return what becomes of the best checkpoint if it was compared by another rule; None if it was not.

    Args:
        found: The best checkpoint.
        rule: The rule of the run that resumes.
    """
    changes = list(rule.changes_since(found.rule))
    if not changes:
        return None
    return (
        f"save_best: {found.checkpoint} is `best` with {found.rule.metric} {found.value:.6g}, which cannot be compared "
        f"any more ({'; '.join(changes)}); it keeps the name until the next checkpoint is saved and evaluated"
    )


def forget_best(save: Path) -> None:
    """Remove the name, if there is one, from a directory in which a run begins anew."""
    for name in (BEST, BEST_RECORD):
        with suppress(OSError):
            (save / name).unlink(missing_ok=True)
