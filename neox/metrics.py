"""Metrics files: reading, curves of one or several runs, and their picture."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from neox.run_events import interruptions, of_newest_run, read_events, rollbacks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRICS_FILE = "metrics.jsonl"
PICTURE = "loss.png"
STABILITY = "stability"
"""Beginning of the names of numbers by layer: `stability/QUANTITY/LAYER`."""
STABILITY_PICTURE = "stability.png"
_POINTS_WITHOUT_SMOOTHING = 50
_LEGEND_LINES = 3
_LEGEND_LINE = 0.17
"""Lines of a legend that a picture has room for, and inches of each further one."""
_LONG_LABEL = 60
"""Characters of a label that leaves no room for a second one next to it."""
_MARKERS = "osD^vP*X"
_TRAINED_GROUPS = ("train", "validation", "test", "validation_ema", "test_ema")
"""Groups of scalars that have the trained loss."""

AMOUNTS = ("tokens", "pairs")
"""Ends of the names of what an evaluation has counted: labels of losses per token, or pairs of answers."""

Goal = Literal["min", "max"]
"""Which values of a scalar are the better ones: the smaller or the larger ones."""
_SMALLER_IS_BETTER = ("loss", "ppl", "perplexity", "bits_per_byte", "brier_score", "likelihood_diff", "ter", "wer")
_LARGER_IS_BETTER = (
    *("acc", "acc_norm", "acc_mutual_info", "acc_bytes", "acc_all", "accuracy", "accuracies"),
    *("exact_match", "exact", "em", "f1", "mcc", "likelihood", "margin", "margins"),
    *("bleu", "chrf", "chrf++", "rouge1", "rouge2", "rougeL", "rougeLsum"),
)
_AT_THE_END = re.compile(rf"(?:^|[/_])(?:{'|'.join(map(re.escape, _SMALLER_IS_BETTER))})$")
_BEFORE_A_FILTER = re.compile(rf"(?:^|[/_])(?:{'|'.join(map(re.escape, _LARGER_IS_BETTER))}|pass@\d+)(?:_[^/]+)?$")

Rows = Sequence[Mapping[str, Any]]
"""Rows of a metrics file (`read_metrics`), for what would read it several times."""
Curves = dict[str, dict[int, float]]
"""Values by name and iteration."""
TaskCurves = dict[str, dict[int, tuple[float, float]]]
"""Scores of tasks with their standard errors by name and iteration."""
_ERROR = "_stderr"
Value = TypeVar("Value")
Measure = Literal["tokens", "seconds"]
"""How far a run has come: trained tokens, or seconds of training steps."""
Against = Literal["iteration", Measure]
"""Horizontal axis of a picture."""
AGAINST: tuple[Against, ...] = get_args(Against)
_FACTORS: Mapping[Measure, Sequence[str]] = {
    "tokens": ("train/batch_size", "train/seq_length"),
    "seconds": ("runtime/iteration_time",),
}
"""The scalars of a step whose product is what the step adds to a measure."""


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file. A last line that was cut off is left out.

    Each row has `iteration`, `kind` and the scalars of that kind: `step`, `validation`, `test`, `tasks` or `save`, and
    for the average of the weights `validation_ema` and `test_ema`. Files of version 0.1 have no kinds. Each iteration
    has one row of kind `step`. The trained loss is the first scalar of a step (`train/NAME`) and of an evaluation
    (`validation/NAME`, `test/NAME`). That of a validation set with a name is `validation/SET/NAME`. A score of which
    nothing was counted, such as the loss of a step without labels, is None (null in the file).
    """
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            if line.endswith("\n"):
                yield json.loads(line)


def goal_of(scalar: str) -> Goal | None:
    """Return which values of a scalar are better, by its name; None if the name does not say it.

    Losses, perplexities and bits per byte are better if they are smaller; accuracies, exact matches and scores such as
    F1 if they are larger, also with the name of a filter behind (`exact_match_strict-match`).
    """
    if _AT_THE_END.search(scalar):
        return "min"
    if _BEFORE_A_FILTER.search(scalar):
        return "max"
    return None


def _rows_of(metrics: Path | Rows) -> Iterable[Mapping[str, Any]]:
    return read_metrics(metrics) if isinstance(metrics, Path) else metrics


def curves(metrics: Path | Rows, names: Collection[str] = ()) -> Curves:
    """Return values of a metrics file. Those that are not finite, or null (nothing was counted), are left out.

    A training step of an iteration that is there already is a resume from an earlier checkpoint. Everything that the
    file holds from that iteration on was trained again, and does not count.

    Args:
        metrics: Metrics file, or its rows.
        names: Names of scalars; empty means the trained loss of training and of each evaluation.
    """
    result: Curves = {}
    last = 0
    for row in _rows_of(metrics):
        iteration = row["iteration"]
        if is_step(row):
            if iteration <= last:
                result = _before(iteration, result)
            last = iteration
        for name in names or _trained_loss(row):
            value = row.get(name)
            if isinstance(value, float):
                result.setdefault(name, {})[iteration] = value
    return result


def ends_finite(metrics: Path | Rows, name: str) -> bool:
    """Return whether the last value of a scalar in a metrics file is finite, or whether there is none."""
    last: Any = 0.0
    for row in _rows_of(metrics):
        value = row.get(name)
        if value is not None:
            last = value
    return isinstance(last, float | int)


def last_evaluation_is_missing(metrics: Path | Rows) -> bool:
    """Return whether a run was evaluated on validation data, but not after its last step."""
    last: int | None = None
    evaluated: int | None = None  # last evaluated iteration; -1 if its step was trained again
    for row in _rows_of(metrics):
        iteration = row["iteration"]
        if is_step(row):
            last = iteration
            if evaluated is not None and iteration <= evaluated:
                evaluated = -1
        if any(name.startswith("validation/") for name in row):
            evaluated = iteration
    return last is not None and evaluated is not None and evaluated < last


def is_step(row: Mapping[str, Any]) -> bool:
    """Return whether a row is that of a training step."""
    kind = row.get("kind")
    if kind is None:
        return "train/lm_loss" in row  # a file of version 0.1
    return bool(kind == "step")


def _trained_loss(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the trained loss in a row, that of each set after that of all; none if it has no loss."""
    losses = [name for name in row if name.partition("/")[0] in _TRAINED_GROUPS]
    if not losses:
        return []
    group, _, score = losses[0].partition("/")
    of_sets = [name for name in losses[1:] if name.startswith(f"{group}/") and name.endswith(f"/{score}")]
    return [losses[0], *of_sets]


def _before(iteration: int, all_curves: Mapping[str, dict[int, Value]]) -> dict[str, dict[int, Value]]:
    """Return the values of earlier iterations."""
    kept = {}
    for name, points in all_curves.items():
        kept[name] = {at: value for at, value in points.items() if at < iteration}
    return kept


def draw(runs: Mapping[str, Path], picture: Path, names: Collection[str] = (), against: Against = "iteration") -> bool:
    """Draw curves of one or several runs as PNG: training as lines, evaluations with points of different forms.

    Scores of tasks that are shares, such as accuracies, have a panel of their own with their standard errors, unless
    names are given.

    Curves of one run have a colour each; that of an average of the weights is dashed, in the colour of the weights.
    Several runs have a colour each.

    Args:
        runs: Metrics files by label; the label of a single run is not shown.
        picture: File to write.
        names: Names of scalars, as for `curves`.
        against: The horizontal axis. Runs whose metrics do not tell their tokens or seconds are left out.

    Returns:
        Whether there was something to draw.
    """
    found = {label: curves(path, names) for label, path in runs.items()}
    if against != "iteration":
        found = {label: lines for label, lines in found.items() if trained(runs[label], against)[0]}
    if not any(found.values()):
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second of imports
    from matplotlib.figure import Figure

    amounts = {label: evaluated_amounts(runs[label]) for label in found}
    tasks: dict[str, TaskCurves] = {}
    for label in found:
        if not names and (scores := task_curves(runs[label])):
            tasks[label] = scores
    figure = Figure(figsize=(8, 8 if tasks else 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes, *below = figure.subplots(1 + bool(tasks), squeeze=False)[:, 0]
    for number, (run, lines) in enumerate(found.items()):
        kinds = list(dict.fromkeys(map(_of_weights, lines)))
        for name, points in lines.items():
            style = _style(name, kinds.index(_of_weights(name)))
            group = name.rpartition("/")[0]
            if group in amounts[run]:
                style["label"] += f" ({amounts[run][group]} a point)"
            if len(found) > 1:
                style["label"] = f"{run}: {style['label']}"
                style["color"] = f"C{number % 10}"
            places = places_of(runs[run], sorted(points), against)
            values = [points[iteration] for iteration in sorted(points)]
            draw_curve(axes, places, values, style, smooths=not _is_evaluation(name))
    axes.set_xlabel(against)
    axes.set_ylabel(" ".join(names) or "loss")
    axes.grid(alpha=0.3)
    if len(runs) == 1 and against == "iteration":
        for path in runs.values():
            _add_interruptions(axes, path)
            _add_token_axis(axes, path)
    lines_of_legend = len(axes.get_legend_handles_labels()[1])
    figure.set_figheight(figure.get_figheight() + _LEGEND_LINE * max(0, lines_of_legend - _LEGEND_LINES))
    add_legend(axes)
    if tasks:
        below[0].sharex(axes)
        _draw_tasks(below[0], tasks, {label: runs[label] for label in found}, against)
    figure.savefig(picture, format="png")
    return True


def evaluated_amounts(path: Path) -> dict[str, str]:
    """Return what the last evaluations counted, such as `1,024 tokens`, by group: `validation`, and those of sets."""
    found: dict[str, str] = {}
    for row in read_metrics(path):
        for name, value in row.items():
            group, _, unit = name.rpartition("/")
            if unit in AMOUNTS and group.partition("/")[0] in _TRAINED_GROUPS:
                found[group] = f"{value:,.0f} {unit}"
    return found


def task_curves(path: Path) -> TaskCurves:
    """Return the scores of tasks that are shares, with their standard errors, by name and iteration.

    Args:
        path: Metrics file. Scores of steps that were trained again after a resume do not count, as in `curves`.
    """
    found: TaskCurves = {}
    last = 0
    for row in read_metrics(path):
        if is_step(row):
            if row["iteration"] <= last:
                found = _before(row["iteration"], found)
            last = row["iteration"]
        for name, value in row.items():
            if not name.startswith("eval/") or name.endswith(_ERROR) or not isinstance(value, float):
                continue
            error = row.get(f"{name}{_ERROR}")
            if 0 <= value <= 1 and isinstance(error, float):
                found.setdefault(name, {})[row["iteration"]] = (value, error)
    return found


def _draw_tasks(axes: Axes, tasks: Mapping[str, TaskCurves], runs: Mapping[str, Path], against: Against) -> None:
    """Draw the scores of tasks, each with its standard error to both sides.

    A task has a marker. With one run it has a colour, too; several runs have a colour each, as in the panel of losses.
    """
    names = list(dict.fromkeys(name for scores in tasks.values() for name in scores))
    colors = {run: f"C{number % 10}" for number, run in enumerate(runs)}
    for run, scores in tasks.items():
        for name, points in scores.items():
            iterations = sorted(points)
            values = [points[iteration][0] for iteration in iterations]
            errors = [points[iteration][1] for iteration in iterations]
            label = f"{run}: {name}"
            color = colors[run]
            if len(runs) == 1:
                label = name
                color = f"C{names.index(name) % 10}"
            places = places_of(runs[run], iterations, against)
            marker = _MARKERS[names.index(name) % len(_MARKERS)]
            axes.errorbar(places, values, errors, label=label, marker=marker, color=color, capsize=3)
    axes.set_xlabel(against)
    axes.set_ylabel("score (with standard error)")
    axes.grid(alpha=0.3)
    add_legend(axes)


def logarithmic(axes: Axes) -> None:
    """Make the horizontal axis logarithmic, with ticks at 1, 2 and 5, whose labels have room in a small panel."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def add_legend(axes: Axes) -> None:
    """Add a legend below the axes, where it covers no curve: two columns, or one if labels are long."""
    longest = max(map(len, axes.get_legend_handles_labels()[1]))
    columns = 2 if longest < _LONG_LABEL else 1
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=columns, fontsize=8, frameon=False)


def _add_interruptions(axes: Axes, path: Path) -> None:
    """Mark the steps at which a run was interrupted and restarted, and at which it went back after a loss spike."""
    events = of_newest_run(read_events(path.parent))
    _add_lines(axes, interruptions(events), "interruption", color="0.5", linestyle=":")
    _add_lines(axes, rollbacks(events), "rollback", color="C3", linestyle="--")


def _add_lines(axes: Axes, events: Iterable[Mapping[str, Any]], kind: str, **style: Any) -> None:
    """Draw a vertical line at the step of each event of one kind. The legend names the kind once."""
    steps = [event["step"] for event in events if event.get("step") is not None]
    for number, step in enumerate(steps):
        label = kind if number == 0 else "_"
        axes.axvline(step, linewidth=1, zorder=0, gid=kind, label=label, **style)


def stability_names(path: Path) -> dict[str, list[int]]:
    """Return the quantities by layer in a metrics file, each with its layers in ascending order."""
    found: dict[str, set[int]] = {}
    for row in read_metrics(path):
        for name in row:
            group, _, rest = name.partition("/")
            if group == STABILITY:
                quantity, _, layer = rest.rpartition("/")
                found.setdefault(quantity, set()).add(int(layer))
    return {quantity: sorted(layers) for quantity, layers in found.items()}


def draw_stability(path: Path, picture: Path) -> bool:
    """Draw the numbers of `log_stability_every` as PNG: for each quantity a map of layers over iterations.

    Colours are logarithmic. A value that is not above 0, or that a step did not have, is left white.

    Args:
        path: Metrics file.
        picture: File to write.

    Returns:
        Whether there was something to draw.
    """
    quantities = stability_names(path)
    if not quantities:
        return False
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second of imports
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.6 * len(quantities)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(quantities), sharex=True, squeeze=False)[:, 0]
    for axes, (quantity, layers) in zip(panels, quantities.items(), strict=True):
        names = [f"{STABILITY}/{quantity}/{layer}" for layer in layers]
        found = curves(path, names)
        iterations = sorted(set().union(*found.values()))
        values = np.full((len(layers), len(iterations)), np.nan)
        for row, name in enumerate(names):
            for iteration, value in found.get(name, {}).items():
                if value > 0:
                    values[row, iterations.index(iteration)] = value
        if not np.isfinite(values).any():
            continue
        norm = LogNorm(np.nanmin(values), max(np.nanmax(values), np.nanmin(values) * 1.01))
        shown = axes.pcolormesh(range(len(iterations) + 1), range(len(layers) + 1), values, norm=norm)
        figure.colorbar(shown, ax=axes)
        axes.set_title(quantity.replace("_", " "), fontsize=9)
        axes.set_ylabel("layer")
        _label_cells(axes.yaxis, layers)
        _label_cells(axes.xaxis, iterations)
    panels[-1].set_xlabel("iteration")
    figure.savefig(picture, format="png")
    return True


def _label_cells(axis: Any, labels: Sequence[int]) -> None:
    """Label at most about ten cells of an axis in their middle."""
    step = -(-len(labels) // 10)
    shown = range(0, len(labels), step)
    axis.set_ticks([cell + 0.5 for cell in shown], [str(labels[cell]) for cell in shown])


def _is_evaluation(name: str) -> bool:
    return not name.startswith(("train/", "runtime/", "timers/"))


def _of_weights(name: str) -> str:
    """Return the name that a scalar of the average of the weights has for the weights themselves."""
    group, slash, rest = name.partition("/")
    return group.removesuffix("_ema") + slash + rest


def _style(name: str, number: int) -> dict[str, Any]:
    """Return how a curve is drawn, given its number among the curves of a run."""
    style: dict[str, Any] = {"label": name, "color": f"C{number % 10}"}
    if _is_evaluation(name):
        style["marker"] = _MARKERS[number % len(_MARKERS)]
    if _of_weights(name) != name:
        style["linestyle"] = "--"
    return style


def draw_curve(
    axes: Axes, places: Sequence[float], values: Sequence[float], style: Mapping[str, Any], *, smooths: bool
) -> None:
    """Draw a curve; one of many points as a pale line with a smoothed one over it.

    Args:
        axes: Where to draw.
        places: Places of the points on the horizontal axis.
        values: Their values.
        style: Keywords of matplotlib.
        smooths: Whether a curve of many points is smoothed.
    """
    if not smooths or len(values) <= _POINTS_WITHOUT_SMOOTHING:
        axes.plot(places, values, **style)
        return
    (line,) = axes.plot(places, smoothed(values), zorder=3, **style)
    axes.plot(places, values, color=line.get_color(), alpha=0.25, linewidth=0.8)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of the points around each point: a fiftieth of all to each side, and fewer at the ends.

    There are as many on each side, so that a straight line stays one.
    """
    widest = max(1, len(values) // 50)
    means = []
    for position in range(len(values)):
        reach = min(widest, position, len(values) - 1 - position)
        window = values[position - reach : position + reach + 1]
        means.append(sum(window) / len(window))
    return means


def trained(metrics: Path | Rows, measure: Measure) -> tuple[list[int], list[float]]:
    """Return how far a run had come after each iteration of its metrics file.

    Steps that were trained again count once. Evaluations, saves and restarts are no part of the seconds.

    Args:
        metrics: Metrics file, or its rows.
        measure: Tokens, or seconds of steps.

    Returns:
        The iterations, from 0, and the measure after each; empty if the file does not have it.
    """
    factors = _FACTORS[measure]
    found = curves(metrics, factors)
    steps = sorted(found.get(factors[0], {}))
    if not steps or any(found.get(name, {}).keys() != set(steps) for name in factors):
        return [], []
    iterations = [0]
    amounts = [0.0]
    for iteration in steps:
        since = iteration - iterations[-1]  # steps without a row were like this one
        amount = math.prod(found[name][iteration] for name in factors)
        iterations.append(iteration)
        amounts.append(amounts[-1] + since * amount)
    return iterations, amounts


def places_of(metrics: Path | Rows, iterations: Sequence[int], against: Against) -> list[float]:
    """Return the places of iterations on the horizontal axis. The metrics must have the measure (`trained`)."""
    if against == "iteration":
        return list(map(float, iterations))
    known, amounts = trained(metrics, against)
    import numpy as np  # with matplotlib

    return np.interp(iterations, known, amounts).tolist()


def _add_token_axis(axes: Axes, path: Path) -> None:
    """Add an axis of trained tokens above the picture of a run, if its metrics have them."""
    iterations, tokens = trained(path, "tokens")
    if not iterations:
        return
    last_step = (tokens[-1] - tokens[-2]) / (iterations[-1] - iterations[-2])
    iterations = [-1_000 * iterations[1], *iterations, 2 * iterations[-1]]  # with the picture's margins
    tokens = [-1_000 * tokens[1], *tokens, tokens[-1] + last_step * iterations[-2]]
    import numpy as np  # with matplotlib

    def to_tokens(values: Any) -> Any:
        return np.interp(values, iterations, tokens)

    def to_iterations(values: Any) -> Any:
        return np.interp(values, tokens, iterations)

    axes.secondary_xaxis("top", functions=(to_tokens, to_iterations)).set_xlabel("tokens")
