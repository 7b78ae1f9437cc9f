"""What an evaluation found: as a table for people, as JSON for programs, as flat names for curves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from neox.errors import EvaluationError
from neox.files import check_writable as writable
from neox.files import write_text


@dataclass(frozen=True)
class TaskResult:
    """One task's scores.

    metrics: by name, such as `word_ppl`; harness tasks keep the harness's names without the filter. counts: what the
    scores were computed over (tokens, words, examples, ...).
    """

    task: str
    metrics: Mapping[str, float]
    counts: Mapping[str, int] = field(default_factory=dict)


def flat_metrics(results: Sequence[TaskResult]) -> dict[str, float]:
    """Return `eval/<task>_<metric>` -> value, the names that TensorBoard and wandb show."""
    return {f"eval/{r.task}_{name}": value for r in results for name, value in r.metrics.items()}


def format_table(results: Sequence[TaskResult]) -> str:
    """Return a table, one line a metric, with each task's counts in its first line."""
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
    """Return where results of a moment go."""
    name = f"eval_results_{now:%m-%d-%Y-%H-%M-%S}.json"
    return Path(f"{prefix}_{name}" if prefix else name)


def check_writable(prefix: str) -> None:
    """Raise EvaluationError where results could not be written, before hours of scoring; makes their directory."""
    path = results_path(prefix, datetime.now())
    try:
        writable(path)
    except OSError as error:
        raise EvaluationError(
            f"eval_results_prefix {prefix}: nothing can be written in {path.parent} ({error.strerror})"
        ) from error


def write_results(prefix: str, results: Sequence[TaskResult], about: Mapping[str, Any], now: datetime) -> Path:
    """Write everything as one JSON object to `PREFIX_eval_results_DATE.json` (gpt-neox's name) and return its path.

    about: what was evaluated. A metric that is not a number, as the harness may give, is null. The file appears whole
    or not at all. Raises EvaluationError where it cannot be written.
    """
    path = results_path(prefix, now)
    record = {
        "results": {result.task: {k: _finite(v) for k, v in result.metrics.items()} for result in results},
        "counts": {result.task: dict(result.counts) for result in results},
        **about,
    }
    try:
        write_text(path, [json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False), "\n"])
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path}: cannot be written ({error})") from error
    return path


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
