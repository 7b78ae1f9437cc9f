"""Prediction of a ladder: as text, JSON, a picture, and a YAML file with the target's settings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from neox.config import NeoXConfig
from neox.files import atomic_shared_write, write_text
from neox.metrics import add_legend, logarithmic
from tools.ladder.family import RunSize, short
from tools.ladder.fits import FEWEST_RATES, SAME_RATIO, LossFit, Range, RateFit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULT = "ladder.json"
PICTURE = "ladder.png"
TARGET_FILE = "target.yml"
_FEW = 3  # degrees of freedom below which Student's t is far wider than a normal range
_POINTS = 100  # of each curve
_BEYOND = 10.0  # the range of the learning rate is drawn up to this factor beyond the rates
_FIRST_SIZE = 4  # colour of the smallest size; those before it are of the ratios of tokens and parameters


@dataclass(frozen=True)
class TrainedRun:
    """A small run that was trained.

    Attributes:
        name: Its name.
        size: Its place in the ladder.
        loss: Its final loss; infinite if it has diverged.
        is_best: Whether no other learning rate gave its size and tokens a smaller loss.
    """

    name: str
    size: RunSize
    loss: float
    is_best: bool


@dataclass(frozen=True)
class Prediction:
    """What the small runs say of the target.

    Attributes:
        parameters: Parameters of the target, without the embedding.
        tokens: Tokens for which its loss is predicted.
        configured_tokens: Tokens that its configuration trains.
        loss: Its loss.
        rate: Its best learning rate.
        rate_low: Lower end of the learning rate's range; NaN if nothing is known of it.
        rate_high: Upper end of that range; NaN likewise.
        configured_rate: Learning rate in its configuration.
        configured_min_lr: `min_lr` in its configuration; 0 if it has none.
        fit: Fit of the losses.
        rates: Fit of the learning rates.
        runs: The small runs.
        largest: The largest of them.
        largest_predicted: Its loss as the smaller ones predict it; None if they cannot.
        unchecked: Why they cannot; empty if they can.
        rate_curve: The rule's learning rate of each size.
        batch: Keys that keep the target's batch on any number of ranks.
    """

    parameters: int
    tokens: float
    configured_tokens: float
    loss: Range
    rate: float
    rate_low: float
    rate_high: float
    configured_rate: float
    configured_min_lr: float
    fit: LossFit
    rates: RateFit
    runs: tuple[TrainedRun, ...]
    largest: TrainedRun
    largest_predicted: Range | None
    unchecked: str
    rate_curve: tuple[tuple[int, float], ...]
    batch: Mapping[str, int | None] = field(default_factory=dict)

    def target_values(self) -> dict[str, float | None]:
        """Return the target's values of keys: its batch, the predicted learning rate, and `min_lr` in its old share."""
        rate = float(f"{self.rate:.4g}")
        values: dict[str, float | None] = {**self.batch, "optimizer.params.lr": rate}
        if self.configured_min_lr:
            values["min_lr"] = float(f"{self.configured_min_lr * rate / self.configured_rate:.4g}")
        return values


def format_prediction(prediction: Prediction, directory: Path) -> str:
    """Format a prediction for a terminal."""
    fit = prediction.fit
    formula = f"L = {fit.irreducible:.4f} + {fit.of_parameters[0]:.4g} / N^{fit.of_parameters[1]:.3f}"
    if fit.of_tokens is not None:
        formula += f" + {fit.of_tokens[0]:.4g} / D^{fit.of_tokens[1]:.3f}"
    loss = prediction.loss
    target = f"{short(prediction.parameters)} parameters (without the embedding) and {short(prediction.tokens)} tokens"
    if loss.is_known:
        lines = [
            f"fit       {formula}; the runs deviate by {100 * fit.deviation:.2g} %",
            f"loss      {loss.value:.4f} (90 % range, of {_freedom(fit.freedom)}: {loss.low:.4f} to {loss.high:.4f}) "
            f"for {target}",
        ]
    else:
        lines = [
            f"fit       {formula}",
            f"loss      {loss.value:.4f} for {target}",
            "note      there are as many runs as numbers to fit, so no range is known; give more sizes",
        ]
    for found in fit.at_bounds():
        lines.append(f"note      {found}")
    if fit.ratio is not None and not math.isclose(prediction.tokens, prediction.configured_tokens, rel_tol=0.05):
        lines.append(
            f"note      the configuration trains {short(prediction.configured_tokens)} tokens; with one value of "
            "tokens_per_parameter only its own ratio can be predicted"
        )
    if prediction.largest_predicted is None:
        lines.append(
            f"check     none: {prediction.largest.name} cannot be predicted from the smaller sizes, because "
            f"there are {prediction.unchecked}; another size gives the check"
        )
    else:
        predicted = prediction.largest_predicted.value
        error = 100 * (predicted / prediction.largest.loss - 1)
        lines.append(
            f"check     {prediction.largest.name}: {predicted:.4f} predicted from the smaller sizes, "
            f"{prediction.largest.loss:.4f} trained: {error:+.2f} %"
        )
    lines += _rate_lines(prediction)
    lines.append(f"          {directory / RESULT}  {directory / PICTURE}  {directory / TARGET_FILE}")
    return "\n".join(lines)


def _rate_lines(prediction: Prediction) -> Iterator[str]:
    """Yield the lines of the learning rate, and how much so few sizes can tell of it."""
    rates = prediction.rates
    searched = len(rates.factors)
    configured = f"the configuration has {prediction.configured_rate:.3g}"
    sizes = len(prediction.rate_curve)
    wanted = max(FEWEST_RATES, searched + 1)
    if wanted <= sizes:
        more = f"raise learning_rate.searched to {wanted} or more"
    else:
        more = f"give more `sizes`, and search {wanted} or more of them (learning_rate.searched)"
    shown = ""
    if rates.has_range:
        range_ = f"{prediction.rate_low:.3g} to {prediction.rate_high:.3g}"
        shown = f" (90 % range, of {_freedom(rates.freedom)}: {range_})"
    yield f"lr        {prediction.rate:.3g}{shown}; {configured}"
    yield from _edge_lines(rates)
    if rates.freedom > 0 and not rates.slope and not rates.at_edge:
        held = "; the range holds those that they do not exclude" if rates.has_range else ""
        yield (
            f"note      {searched} searched sizes show no trend of the best rate beside the rule's, so none is "
            f"assumed{held}"
        )
    if searched < FEWEST_RATES:
        told = "no range" if rates.freedom > 0 else "neither a trend nor a range"
        yield f"note      {searched} searched size(s) tell {told} of the rate; {more}"
    elif rates.has_range and rates.freedom < _FEW:
        yield f"note      {searched} searched sizes are few: a narrower range needs more; {more}"


def _edge_lines(rates: RateFit) -> Iterator[str]:
    """Yield the sizes whose best learning rate may lie beyond those tried, and which factors to try next."""
    by_factors: dict[tuple[float, ...], list[int]] = {}
    for parameters, beyond in rates.at_edge.items():
        by_factors.setdefault(beyond, []).append(parameters)
    for beyond, sizes in by_factors.items():
        edge = rates.factors[sizes[0]]
        which = "largest" if beyond[0] > edge else "smallest"
        values = " and ".join(f"{factor:g}" for factor in beyond)
        yield (
            f"note      {', '.join(map(short, sizes))}: the best learning rate is the {which} that was tried, {edge:g} "
            f"times the rule's; add {values} to learning_rate.factors"
        )
    if rates.at_edge:
        yield (
            f"note      {len(rates.at_edge)} of {len(rates.factors)} searched sizes have their best rate at the edge, "
            "so the rate above is a guess without a trend over sizes and a range, and the losses are not the lowest"
        )


def _freedom(count: int) -> str:
    """Return degrees of freedom in words."""
    return f"{count} degree{'s' if count > 1 else ''} of freedom"


def write_prediction(directory: Path, prediction: Prediction, target: NeoXConfig) -> None:
    """Write the prediction as JSON and as a picture, and the target's keys as YAML. Raises OSError."""
    found = asdict(prediction)
    found["fit"].pop("influence")
    found["fit"]["at_bounds"] = list(prediction.fit.at_bounds())
    write_text(directory / RESULT, json.dumps(_finite(found), indent=2, allow_nan=False) + "\n")
    optimizer = target.to_flat()["optimizer"]
    settings: dict[str, object] = dict(prediction.target_values())
    parameters = {**optimizer.get("params", {}), "lr": settings.pop("optimizer.params.lr")}
    settings["optimizer"] = {**optimizer, "params": parameters}
    text = "# The learning rate that the ladder predicts, and the batch that it is for, over the target's files.\n"
    write_text(directory / TARGET_FILE, text + yaml.safe_dump({"overrides": settings}, sort_keys=False))
    _draw(directory / PICTURE, prediction)


def _finite(value: Any) -> Any:
    """Return a value with None for numbers that are not finite, which JSON lacks: diverged losses, unknown ranges."""
    if isinstance(value, dict):
        return dict(zip(value, map(_finite, value.values()), strict=True))
    if isinstance(value, list | tuple):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _draw(picture: Path, prediction: Prediction) -> None:
    """Draw loss against parameters up to the target, and loss against the learning rate of each size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second of imports
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_losses(left, prediction)
    _draw_rates(right, prediction)
    with atomic_shared_write(picture) as file:
        figure.savefig(file, format="png", dpi=110)


def _draw_losses(axes: Axes, prediction: Prediction) -> None:
    """Draw the best runs, the fit at each ratio of tokens and parameters, and the target with its range."""
    for number, (ratio, runs) in enumerate(_by_ratio(prediction.runs)):
        color = f"C{number}"
        smallest = min(run.size.parameters for run in runs)
        for run in runs:
            axes.plot(run.size.parameters, run.loss, "o", color=color)
        step = (prediction.parameters / smallest) ** (1 / _POINTS)
        places = [smallest * step**point for point in range(_POINTS + 1)]
        predicted = [prediction.fit.predict(place, place * ratio) for place in places]
        axes.plot(places, [found.value for found in predicted], color=color, label=f"{ratio:.2g} tokens a parameter")
        axes.fill_between(
            places, [found.low for found in predicted], [found.high for found in predicted], color=color, alpha=0.2
        )
    loss = prediction.loss
    reach = [[loss.value - loss.low], [loss.high - loss.value]] if loss.is_known else None
    axes.errorbar([prediction.parameters], [loss.value], yerr=reach, fmt="*k", markersize=10, label="target, predicted")
    axes.set_xscale("log")
    shown = {prediction.parameters}
    for run in prediction.runs:
        shown.add(run.size.parameters)
    axes.set_xticks(sorted(shown), list(map(short, sorted(shown))), fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("parameters without the embedding")
    axes.set_ylabel("final loss")
    axes.grid(alpha=0.3)
    add_legend(axes)


def _by_ratio(runs: Sequence[TrainedRun]) -> list[tuple[float, list[TrainedRun]]]:
    """Return the best runs of each ratio of tokens and parameters, ascending, after their mean ratio.

    Whole steps make ratios that were asked for a little larger, most of all those of short runs.
    """
    groups: list[list[TrainedRun]] = []
    for run in sorted(runs, key=lambda run: run.size.ratio):
        if not run.is_best:
            continue
        if groups and run.size.ratio < SAME_RATIO * groups[-1][0].size.ratio:
            groups[-1].append(run)
        else:
            groups.append([run])
    named = []
    for group in groups:
        total = sum(run.size.ratio for run in group)
        named.append((total / len(group), group))
    return named


def _draw_rates(axes: Axes, prediction: Prediction) -> None:
    """Draw the losses of the searched sizes against their learning rates, and the predicted rate of the target."""
    by_size: dict[int, list[TrainedRun]] = {}
    for run in prediction.runs:
        if math.isfinite(run.loss) and run.size.parameters in prediction.rates.factors:
            by_size.setdefault(run.size.parameters, []).append(run)
    rule: Mapping[int, float] = dict(prediction.rate_curve)
    for number, (parameters, runs) in enumerate(sorted(by_size.items())):
        color = f"C{(_FIRST_SIZE + number) % 10}"
        runs.sort(key=lambda run: run.size.rate)
        first = min(run.size.tokens for run in runs)
        shown = [run for run in runs if run.size.tokens < 1.1 * first]
        rates = [run.size.rate for run in shown]
        axes.plot(
            rates, [run.loss for run in shown], "o-", color=color, label=f"{short(parameters)} (dotted: its best)"
        )
        axes.axvline(rule[parameters] * prediction.rates.factors[parameters], color=color, linestyle=":")
    label = "target, predicted"
    if math.isfinite(prediction.rate_low):
        trained = [run.size.rate for runs in by_size.values() for run in runs]
        lowest = min([*trained, prediction.rate]) / _BEYOND
        highest = max([*trained, prediction.rate]) * _BEYOND
        is_cut = prediction.rate_low < lowest or prediction.rate_high > highest
        axes.axvspan(max(prediction.rate_low, lowest), min(prediction.rate_high, highest), color="0.9", zorder=0)
        label += " (grey: range, which goes on)" if is_cut else " (grey: range)"
    axes.axvline(prediction.rate, color="k", label=label)
    logarithmic(axes)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("final loss")
    axes.grid(alpha=0.3)
    add_legend(axes)
