"""Results of a sweep: a row for each run, the table, and the picture."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from statistics import mean
from typing import TYPE_CHECKING, Any

from neox.files import atomic_shared_write, write_text
from neox.launch.status.run_status import duration
from neox.metrics import (
    Curves,
    Goal,
    Measure,
    Rows,
    curves,
    draw_curve,
    ends_finite,
    logarithmic,
    places_of,
    read_metrics,
    trained,
)
from tools.sweep.run_files import RunFiles, State
from tools.sweep.sweep_file import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TABLE = "table.csv"
PICTURE = "sweep.png"
_LAST_SHARE = 10
"""The training loss of a run is the mean of its last steps: one of this many."""
_LOGARITHMIC = 8.0
"""Ratio of largest and smallest value from which an axis of values is logarithmic."""
_MOST_PANELS = 9
"""Panels of a picture. A list whose runs differ in many keys has no room for all."""
_PLACES = {State.DONE: 0, State.BEGUN: 1, State.WAITING: 2, State.FAILED: 3, State.DIVERGED: 3}
"""Order of states in tables."""
_STEP_OF_FACTORS = 1.5
"""Ratio of neighbouring values from which they are told apart by factors, as learning rates are."""
_FEWEST_VALUES = 3
"""Values of a key of which the best one at an end says something. Of two, one is always the best."""
_LOST = (State.FAILED, State.DIVERGED)
"""States whose scores are not to be compared with others."""
_MOST_LABELS = 20
"""Runs of a picture that its legend names."""
_ROOM = 0.13
"""Share of an axis between two values from which each has a tick of its own."""


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        name: Name of the run.
        values: What the sweep varies, by key.
        state: What has become of it.
        step: Number of its completed steps.
        tokens: Tokens that it has trained; None if unknown.
        seconds: Seconds of its steps; None if unknown.
        train_loss: Mean training loss of its last steps; None before the first one.
        validation_loss: Loss of its last evaluation; None before it.
        validation_step: Step of that evaluation.
        score: Value by which runs are compared; None until the run has ended, and if it is not known.
        score_of: Name of that value.
        score_step: Step that the value is of.
        host: Host of its last start, if it is known.
        cause: Reason why it failed or diverged; empty if it did not, or the reason is not known.
    """

    name: str
    values: Mapping[str, Any]
    state: State
    step: int = 0
    tokens: float | None = None
    seconds: float | None = None
    train_loss: float | None = None
    validation_loss: float | None = None
    validation_step: int | None = None
    score: float | None = None
    score_of: str = ""
    score_step: int | None = None
    host: str = ""
    cause: str = ""


def read_results(
    sweep: Sweep,
    runs: Sequence[RunFiles],
    causes: Mapping[str, str],
    hosts: Mapping[str, str],
    training: Collection[str] = (),
) -> list[RunResult]:
    """Return the results of all runs: first those that are done, the best first, then those that are not.

    Runs that have failed or diverged come last, whatever their last score was: it is that of other steps, or of weights
    that were lost.

    Args:
        sweep: The sweep.
        runs: Its runs.
        causes: Reasons of failures by name of the run.
        hosts: Hosts by name of the run.
        training: Names of runs whose commands are running. Before its first event, the files of such a run look like
            those of one that has failed, or are those of an earlier start that has.
    """
    results = []
    for run in runs:
        state = run.state()
        if run.name in training and state in _LOST:
            state = State.BEGUN
        results.append(_read_result(sweep, run, state, causes.get(run.name, ""), hosts.get(run.name, "")))
    return sorted(results, key=lambda result: _order(result, sweep.goal))


def best_words(sweep: Sweep, results: Sequence[RunResult]) -> list[str]:
    """Return lines that name the best run, its value and the step of the value; none if nothing is to be compared yet.

    Args:
        sweep: The sweep.
        results: Results of all runs, the best first.
    """
    best = results[0]
    if not sweep.compares or best.score is None or best.state is not State.DONE:
        return []
    best_of = "best" if all(result.state.has_ended for result in results) else "best of those that are done"
    words = f"{best_of}: {best.name}, {best.score_of} {_number(best.score)} at step {best.score_step:,}"
    return [words, *values_at_an_end(results)]


def values_at_an_end(results: Sequence[RunResult]) -> list[str]:
    """Return for each key whose best value is the smallest or the largest one that was tried that it is, in words.

    The best value may then be outside. Runs that diverged were tried, too; those that failed or have no score were not.
    Nothing is said while runs have not ended: their values are still to be compared.

    Args:
        results: Results of all runs, the best first.
    """
    found: list[str] = []
    if not all(result.state.has_ended for result in results):
        return found
    for key, best in results[0].values.items():
        tried: set[float] = set()
        for result in results:
            number = _as_number(result.values.get(key))
            has_score = result.score is not None and result.state is not State.FAILED
            was_tried = has_score or result.state is State.DIVERGED
            if number is not None and was_tried:
                tried.add(number)
        if key == "seed" or len(tried) < _FEWEST_VALUES:
            continue
        if best not in (min(tried), max(tried)):
            continue
        edge, more = ("largest", "larger") if best == max(tried) else ("smallest", "smaller")
        following = _following(tried, best)
        example = f", such as {following:g}," if following is not None else ""
        found.append(f"{key} {best:g} is the {edge} of {len(tried)} values: a {more} one{example} may be better")
    return found


def _following(tried: Collection[float], edge: float) -> float | None:
    """Return a value beyond the smallest or largest of some, as far as they are apart; None if none is of their kind.

    Args:
        tried: The values. Those whose steps are factors are followed by one, others by a sum.
        edge: The smallest or largest of them.
    """
    low, high = min(tried), max(tried)
    steps = len(tried) - 1
    ratio = (high / low) ** (1 / steps) if low > 0 else 1.0
    distance = (high - low) / steps
    if ratio >= _STEP_OF_FACTORS:
        value = edge * ratio if edge == high else edge / ratio
    else:
        value = edge + distance if edge == high else edge - distance
    if all(float(each).is_integer() for each in tried):
        value = round(value)
        if value == edge:
            return None
    if value <= 0 <= low or value <= 0 < edge:  # few keys take 0 or less
        return None
    return float(f"{value:.3g}")


def _as_number(value: object) -> float | None:
    """Return a value as a number; None if it is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _order(result: RunResult, goal: Goal) -> tuple[int, float]:
    """Return what results are sorted by: the place of the state, then the score."""
    place = _PLACES[result.state]
    if result.score is None:
        return place, math.inf
    return place, result.score if goal == "min" else -result.score


def _read_result(sweep: Sweep, run: RunFiles, state: State, cause: str, host: str) -> RunResult:
    """Read what a run in a state has come to, from its metrics file."""
    if state not in _LOST:  # an earlier start failed
        cause = ""
    values = {key: run.run.values.get(key) for key in sweep.varied}
    if not run.metrics.exists():
        return RunResult(run.name, values, state, host=host, cause=cause)
    rows = list(read_metrics(run.metrics))
    losses = curves(rows)
    steps = _of_group(losses, "train")
    evaluations = _of_group(losses, "validation")
    score: _Score | None = None
    if state.has_ended:
        score = _score(sweep.metric, rows, losses)
    return RunResult(
        name=run.name,
        values=values,
        state=state,
        step=max(steps, default=0),
        tokens=_last(trained(rows, "tokens")[1]),
        seconds=_last(trained(rows, "seconds")[1]),
        train_loss=_mean_of_last_steps(steps),
        validation_loss=_newest(evaluations),
        validation_step=max(evaluations, default=None),
        score=None if score is None else score.value,
        score_of="" if score is None else score.of,
        score_step=None if score is None else score.step,
        host=host,
        cause=cause,
    )


@dataclass(frozen=True)
class _Score:
    """Value by which a run is compared, what it is of, and its step."""

    value: float
    of: str
    step: int


def _score(metric: str | None, rows: Rows, losses: Curves) -> _Score | None:
    """Return the value by which a run is compared; None if there is none of its last weights.

    Args:
        metric: Scalar that the sweep names; None for the last validation loss, or without one the training loss.
        rows: Rows of the run's metrics.
        losses: Its curves of losses.
    """
    if metric is not None:
        if not ends_finite(rows, metric):  # an earlier value is not that of its last weights
            return None
        return _newest_score(metric, curves(rows, [metric]).get(metric, {}))
    names = list(_names_of_group(losses, "validation"))
    if names:
        if not all(ends_finite(rows, name) for name in names):
            return None
        return _newest_score(names[0], losses[names[0]])
    steps = _of_group(losses, "train")
    loss = _mean_of_last_steps(steps)
    return None if loss is None else _Score(loss, "mean training loss of the last tenth", max(steps))


def _newest_score(name: str, points: Mapping[int, float]) -> _Score | None:
    """Return the last value of a curve; None if it has none."""
    return _Score(points[max(points)], name, max(points)) if points else None


def _mean_of_last_steps(steps: Mapping[int, float]) -> float | None:
    """Return the mean of a curve over its last steps; None before the first one."""
    if not steps:
        return None
    last = sorted(steps)[-max(1, len(steps) // _LAST_SHARE) :]
    return mean(steps[step] for step in last)


def _newest(points: Mapping[int, float]) -> float | None:
    """Return the last value of a curve; None if it has none."""
    return points[max(points)] if points else None


def _of_group(losses: Curves, group: str) -> dict[int, float]:
    """Return the trained loss of training or of an evaluation; empty if there is none."""
    for name in _names_of_group(losses, group):
        return losses[name]
    return {}


def _names_of_group(losses: Curves, group: str) -> Iterator[str]:
    """Yield the names of the losses of training or of an evaluation: that of all data, then those of single sets."""
    for name in losses:
        if name.startswith(f"{group}/"):
            yield name


def _last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None


def write_results(sweep: Sweep, runs: Sequence[RunFiles], results: Sequence[RunResult]) -> None:
    """Write the table and the picture of a sweep, if it has them, into its directory. Raises OSError."""
    if not sweep.has_table:
        return
    columns = ["run", *sweep.varied, "state", "step", "tokens", "seconds", "train_loss"]
    columns += ["validation_loss", "validation_step"]
    if sweep.metric is not None:
        columns.append(sweep.metric)
    columns += ["host", "cause"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for result in results:
        row = [result.name, *result.values.values(), result.state.value, result.step, result.tokens, result.seconds]
        row += [result.train_loss, result.validation_loss, result.validation_step]
        if sweep.metric is not None:
            row.append(result.score)
        writer.writerow([*row, result.host, result.cause])
    write_text(sweep.directory / TABLE, text.getvalue())
    _draw(sweep, runs, results)


def format_table(sweep: Sweep, results: Sequence[RunResult]) -> str:
    """Format results for a terminal, the best first."""
    rows = [["run", "state", "step", "tokens", "time", "train loss", sweep.metric or "validation loss"]]
    for result in results:
        shown = _number(result.score)
        if sweep.metric is None:
            shown = _number(result.validation_loss)
            if result.validation_step not in (None, result.step):
                shown += f" (step {result.validation_step:,})"
        rows.append(
            [
                result.name,
                result.state.value,
                f"{result.step:,}",
                _amount(result.tokens),
                "" if result.seconds is None else duration(result.seconds),
                _number(result.train_loss),
                shown,
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), row[1].ljust(widths[1])]
        cells += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _amount(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _draw(sweep: Sweep, runs: Sequence[RunFiles], results: Sequence[RunResult]) -> None:
    """Draw loss against tokens, loss against seconds, and the score against each varied key; a colour for each run."""
    with_tokens = {result.name: result for result in results if result.tokens is not None}
    found: dict[str, RunFiles] = {}
    for run in runs:
        if run.name in with_tokens:
            found[run.name] = run
    if not found:
        return
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second of imports
    from matplotlib.figure import Figure

    panels = min(2 + len(sweep.varied), _MOST_PANELS)
    columns = min(panels, 3)
    rows = math.ceil(panels / columns)
    legend = min(len(found), _MOST_LABELS)
    figure = Figure(figsize=(5.2 * columns, 4 * rows + 0.22 * math.ceil(legend / 3) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    colors = {}
    for number, name in enumerate(found):
        colors[name] = colormaps["viridis"](number / max(1, len(found) - 1) * 0.92)
    measures: tuple[Measure, ...] = ("tokens", "seconds")
    for name, run in found.items():
        metrics = list(read_metrics(run.metrics))
        for panel, measure in zip(axes, measures, strict=False):
            _draw_run(panel, metrics, measure, _label(with_tokens[name]), colors[name])
    for panel, measure in zip(axes, measures, strict=False):
        panel.set_xlabel(measure)
        panel.set_ylabel("loss (points: validation)")
        panel.grid(alpha=0.3)
    for panel, key in zip(axes[2:panels], sweep.varied, strict=False):
        _draw_values(panel, key, results, colors)
        panel.set_ylabel(sweep.metric or "final loss")
    for panel in axes[panels:]:
        panel.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles[:_MOST_LABELS], labels[:_MOST_LABELS], loc="outside lower center", ncols=3, fontsize=8)
    with atomic_shared_write(sweep.directory / PICTURE) as file:
        figure.savefig(file, format="png", dpi=110)


def _label(result: RunResult) -> str:
    """Return the name of a run in legends, with its state if its curve is not to be compared with others."""
    return f"{result.name} ({result.state.value})" if result.state in _LOST else result.name


def _draw_run(axes: Axes, rows: Rows, measure: Measure, label: str, color: Any) -> None:
    """Draw the training loss of a run as a line, and its validation loss as points of the same colour."""
    losses = curves(rows)
    for group in ("train", "validation"):
        points = _of_group(losses, group)
        iterations = sorted(points)
        places = places_of(rows, iterations, measure)
        values = [points[iteration] for iteration in iterations]
        if group == "train":
            draw_curve(axes, places, values, {"color": color, "label": label}, smooths=True)
        else:
            axes.plot(places, values, "o", color=color, markersize=4)


def _draw_values(axes: Axes, key: str, results: Sequence[RunResult], colors: Mapping[str, Any]) -> None:
    """Draw the score of each run against its value of a key; values that are no numbers stand side by side.

    Scores of runs that failed or diverged are crosses.
    """
    values = []
    words: dict[str, None] = {}
    for result in results:
        if result.name in colors:
            values.append(result.values[key])
            words[str(result.values[key])] = None
    are_numbers = {*map(type, values)} <= {int, float}
    for result in results:
        if result.name not in colors or result.score is None:
            continue
        place = result.values[key] if are_numbers else list(words).index(str(result.values[key]))
        axes.plot(place, result.score, "x" if result.state in _LOST else "o", color=colors[result.name])
    if not are_numbers:
        axes.set_xticks(range(len(words)), list(words))
        axes.margins(x=0.2)
    elif min(values) > 0 and max(values) >= _LOGARITHMIC * min(values):
        logarithmic(axes)
    ticks = sorted(set(values)) if are_numbers else []
    if len(ticks) > 1 and _have_room(ticks, is_logarithmic=axes.get_xscale() == "log"):
        axes.set_xticks(ticks, list(map("{:g}".format, ticks)))
    axes.set_xlabel(key)
    axes.grid(alpha=0.3)


def _have_room(values: Sequence[float], *, is_logarithmic: bool) -> bool:
    """Return whether the labels of sorted values do not touch each other."""
    places = list(map(math.log, values)) if is_logarithmic else list(values)
    nearest = min(map(sub, places[1:], places))
    return nearest >= _ROOM * (places[-1] - places[0])
