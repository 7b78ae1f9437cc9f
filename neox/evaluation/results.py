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
        metrics: Value by name, such as `word_ppl`. Tasks of the harness keep its names without the filter. The standard
            error of a metric is `METRIC_stderr`.
        counts: Numbers of tokens, words, examples and so on that were scored.
        settings: `num_fewshot` and `version` of a task of the harness.
        record: Entries of a task in the harness's own report, by section.
    """

    task: str
    metrics: Mapping[str, float]
    counts: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)


def perplexity_of(loss: float) -> float:
    """Return e^loss of a mean loss in nats, at most e^700, which is finite.

    gpt-neox and Megatron stop at e^20. Losses per word are often above 20, and would all show the same perplexity.
    """
    return math.exp(min(700.0, loss))


def bits_per_byte(loss: float, size: float) -> float:
    """Return the bits per byte of text.

    Args:
        loss: Loss in nats, summed over a text or the mean over its tokens.
        size: UTF-8 bytes of the text, or of each token.
    """
    return loss / (math.log(2.0) * size)


def task_scalar(task: str, score: str) -> str:
    """Return the name of a task's score in metrics, TensorBoard and trackers; of patterns the pattern."""
    return f"eval/{task}_{score}"


def flat_metrics(results: Sequence[TaskResult]) -> dict[str, float]:
    """Return `eval/<task>_<metric>` -> value, the names that TensorBoard and wandb show."""
    metrics = {}
    for result in results:
        for name, value in result.metrics.items():
            metrics[task_scalar(result.task, name)] = value
    return metrics


def format_table(results: Sequence[TaskResult]) -> str:
    """Return a table with one line per metric. The first line of a task has its counts and settings."""
    rows = [("task", "metric", "value", "std. error", "over")]
    for result in results:
        counts = [f"{count:,} {name}" for name, count in result.counts.items()]
        settings = [f"{name} {setting}" for name, setting in result.settings.items()]
        task = result.task
        scope = ", ".join([*counts, *settings])
        for name, value in result.metrics.items():
            if name.endswith("_stderr"):
                continue
            error = result.metrics.get(f"{name}_stderr")
            shown_error = "" if error is None else f"{error:.2g}"
            rows.append((task, name, f"{value:.6g}", shown_error, scope))
            task = ""
            scope = ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lines[0], rule, *lines[1:]])


def results_path(prefix: str, now: datetime, kind: str = "eval") -> Path:
    """Return the path of a result file, `PREFIX_KIND_results_DATE.json`; for the kind `eval` it is gpt-neox's name."""
    name = f"{kind}_results_{now:%m-%d-%Y-%H-%M-%S}.json"
    if prefix:
        name = f"{prefix}_{name}"
    return Path(name)


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
        results: Results of all tasks. Metrics that are not finite, as the harness may give, become null.
        about: Further entries of the object, which describe the model and its settings.
        now: Time in the file's name.

    Returns:
        The path of the file.

    Raises:
        EvaluationError: If it cannot be written.
    """
    record: dict[str, Any] = {"results": {}, "counts": {}, "settings": {}}
    for result in results:
        record["results"][result.task] = result.metrics
        record["counts"][result.task] = result.counts
        if result.settings:
            record["settings"][result.task] = result.settings
    return _write_json(results_path(prefix, now), {**record, **about})


def write_harness_report(
    prefix: str, results: Sequence[TaskResult], about: Mapping[str, Any], now: datetime
) -> Path | None:
    """Write the results of the harness's tasks in its own JSON form to `PREFIX_lm_eval_results_DATE.json`.

    Args:
        prefix: Beginning of the path.
        results: Results of all tasks. Those that are not the harness's are left out.
        about: Entries that describe the model and its settings: the harness's entry `config`.
        now: Time in the file's name and in the entry `date`.

    Returns:
        The path of the file; None if there is no task of the harness.

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
    return _write_json(results_path(prefix, now, "lm_eval"), report)


def _write_json(path: Path, record: Mapping[str, Any]) -> Path:
    """Write JSON atomically, with null for numbers in `results` that are not finite. Raises EvaluationError."""
    finite: dict[str, dict[str, Any]] = {}
    for task, metrics in record["results"].items():
        finite[task] = {}
        for name, value in metrics.items():
            is_finite = not isinstance(value, float) or math.isfinite(value)
            finite[task][name] = value if is_finite else None
    content = {**record, "results": finite}
    try:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False, default=dict)
        files.write_text(path, text + "\n")
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{path}: cannot be written ({error})") from error
    return path
