"""Evaluation results: table, JSON file and metric names for TensorBoard and wandb."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from neox import files
from neox.errors import EvaluationError


@dataclass(frozen=True)
class TaskResult:
    """Scores of one task.

    Attributes:
        task: Name of the task.
        metrics: Value by name, such as `word_ppl`; tasks of the harness keep its names without the filter.
        counts: What the scores were computed over (tokens, words, examples, ...).
    """

    task: str
    metrics: Mapping[str, float]
    counts: Mapping[str, int] = field(default_factory=dict)


def flat_metrics(results: Sequence[TaskResult]) -> dict[str, float]:
    """Return `eval/<task>_<metric>` -> value, the names that TensorBoard and wandb show."""
    return {f"eval/{r.task}_{name}": value for r in results for name, value in r.metrics.items()}


def format_table(results: Sequence[TaskResult]) -> str:
    """Return a table with one line per metric; a task's first line has its counts."""
    rows = [("task", "metric", "value", "over")]
    for result in results:
        counts = ", ".join(f"{value:,} {name}" for name, value in result.counts.items())
        for number, (name, value) in enumerate(result.metrics.items()):
            first = number == 0
            rows.append((result.task if first else "", name, f"{value:.6g}", counts if first else ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def results_path(prefix: str, now: datetime) -> Path:
    """Return the path of a result file: `PREFIX_eval_results_DATE.json`, gpt-neox's name."""
    name = f"eval_results_{now:%m-%d-%Y-%H-%M-%S}.json"
    return Path(f"{prefix}_{name}" if prefix else name)


def check_writable(prefix: str) -> None:
    """Create the directory of the results. Raises EvaluationError if they cannot be written there."""
    path = results_path(prefix, datetime.now())
    try:
        files.check_writable(path)
    except OSError as error:
        raise EvaluationError(
            f"eval_results_prefix {prefix}: nothing can be written in {path.parent} ({error.strerror})"
        ) from error


def write_results(prefix: str, results: Sequence[TaskResult], about: Mapping[str, Any], now: datetime) -> Path:
    """Write all results as one JSON object to `results_path(prefix, now)`, atomically.

    Args:
        prefix: Beginning of the path.
        results: Results; metrics that are not finite, as the harness may give, become null.
        about: What was evaluated; added to the object.
        now: Time in the file's name.

    Returns:
        The path of the file.

    Raises:
        EvaluationError: If it cannot be written.
    """
    path = results_path(prefix, now)
    record = {
        "results": {
            result.task: {name: value if math.isfinite(value) else None for name, value in result.metrics.items()}
            for result in results
        },
        "counts": {result.task: dict(result.counts) for result in results},
        **about,
    }
    try:
        files.write_text(path, json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path}: cannot be written ({error})") from error
    return path
