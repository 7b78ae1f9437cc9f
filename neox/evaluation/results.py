"""Evaluation results: table, JSON file and metric names for TensorBoard and wandb."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
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
            The standard error of a metric is `METRIC_stderr`.
        counts: What the scores were computed over (tokens, words, examples, ...).
        settings: Of a task of the harness: `num_fewshot` and the task's `version`.
        record: The task's entries in the harness's own report, by section.
    """

    task: str
    metrics: Mapping[str, float]
    counts: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)


def perplexity_of(loss: float) -> float:
    """Return e^loss of a mean loss, in nats; at most e^20, so that an untrained network's does not overflow."""
    return math.exp(min(20.0, loss))


def flat_metrics(results: Sequence[TaskResult]) -> dict[str, float]:
    """Return `eval/<task>_<metric>` -> value, the names that TensorBoard and wandb show."""
    return {f"eval/{r.task}_{name}": value for r in results for name, value in r.metrics.items()}


def format_table(results: Sequence[TaskResult]) -> str:
    """Return a table with one line per metric; a task's first line has its counts and settings."""
    rows = [("task", "metric", "value", "std. error", "over")]
    for result in results:
        over = [f"{value:,} {name}" for name, value in result.counts.items()]
        over += [f"{name} {value}" for name, value in result.settings.items()]
        values = {name: value for name, value in result.metrics.items() if not name.endswith("_stderr")}
        for number, (name, value) in enumerate(values.items()):
            first, error = number == 0, result.metrics.get(f"{name}_stderr")
            shown = "" if error is None else f"{error:.2g}"
            rows.append((result.task if first else "", name, f"{value:.6g}", shown, ", ".join(over) if first else ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def results_path(prefix: str, now: datetime, kind: str = "eval") -> Path:
    """Return the path of a result file: `PREFIX_eval_results_DATE.json`, gpt-neox's name, or another kind's."""
    name = f"{kind}_results_{now:%m-%d-%Y-%H-%M-%S}.json"
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
    record = {
        "results": {result.task: result.metrics for result in results},
        "counts": {result.task: result.counts for result in results},
        "settings": {result.task: result.settings for result in results if result.settings},
        **about,
    }
    return _write(results_path(prefix, now), record)


def write_harness_report(
    prefix: str, results: Sequence[TaskResult], about: Mapping[str, Any], now: datetime
) -> Path | None:
    """Write the results of the harness's tasks in its own JSON form to `PREFIX_lm_eval_results_DATE.json`.

    Args:
        prefix: Beginning of the path.
        results: Results; those of other tasks are left out.
        about: What was evaluated: the harness's entry `config`.
        now: Time in the file's name and in the entry `date`.

    Returns:
        The path of the file; None if no task is the harness's.

    Raises:
        EvaluationError: If it cannot be written.
    """
    report: dict[str, Any] = {}
    for result in results:
        for section, entry in result.record.items():
            report.setdefault(section, {})[result.task] = entry
    if not report:
        return None
    report |= {
        "config": {"model": "neox", **about},
        "date": now.timestamp(),
        "lm_eval_version": version("lm_eval"),
        "model_source": "neox",
        "model_name": about.get("checkpoint"),
    }
    return _write(results_path(prefix, now, "lm_eval"), report)


def _write(path: Path, record: Mapping[str, Any]) -> Path:
    """Write JSON atomically, with null for numbers that are not finite in `results`. Raises EvaluationError."""
    finite = {
        task: {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in metrics.items()
        }
        for task, metrics in record["results"].items()
    }
    try:
        text = json.dumps({**record, "results": finite}, indent=2, ensure_ascii=False, allow_nan=False, default=dict)
        files.write_text(path, text + "\n")
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path}: cannot be written ({error})") from error
    return path
