"""Picture of what changes over a run: learning rate, batch size, sequence length; and of a step of pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neox.errors import ConfigError
from neox.files import atomic_shared_write
from neox.plan import RunPlan
from neox.plan.schedule import schedule_of
from neox.preflight.plot_step import draw_step

_POINTS = 2000  # of the learning rate


@dataclass(frozen=True)
class _Curve:
    """A quantity over the iterations.

    Attributes:
        label: Name of the quantity, with its unit.
        at: Iterations.
        values: Value at each iteration.
        has_steps: Whether a value holds until the next iteration of `at`.
    """

    label: str
    at: Sequence[int]
    values: Sequence[float]
    has_steps: bool = False


def draw_schedules(plan: RunPlan, picture: Path) -> None:
    """Draw the learning rate over the iterations as PNG, and the batch size and the sequence length that change.

    With pipeline stages a step comes last: what each stage does.

    Args:
        plan: The plan of a training.
        picture: File to write; an older one is replaced.

    Raises:
        ConfigError: `train_iters` is missing, or the file cannot be written.
    """
    steps = plan.config.training.train_iters
    if not steps:
        raise ConfigError("--plot draws the iterations of a run: `train_iters` is missing")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second of imports
    from matplotlib.figure import Figure

    curves = _curves(plan, steps)
    stages = plan.grid.pp_size
    heights = [2.5] * len(curves)
    if stages > 1:
        heights.append(1.5 + 0.4 * stages)
    figure = Figure(figsize=(8, 2 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    all_rows = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    rows = all_rows[: len(curves)]
    if stages > 1:
        draw_step(plan, all_rows[-1])
    for axes, curve in zip(rows, curves, strict=True):
        axes.plot(curve.at, curve.values, drawstyle="steps-post" if curve.has_steps else "default")
        axes.set_ylabel(curve.label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.sharex(rows[0])
    rows[-1].set_xlabel("iteration")
    try:
        with atomic_shared_write(picture) as file:
            figure.savefig(file, format="png")
    except OSError as error:
        raise ConfigError(f"--plot {picture}: cannot be written: {error.strerror}; choose another file") from None


def _curves(plan: RunPlan, steps: int) -> list[_Curve]:
    """Return the learning rate, and the batch size and the sequence length if they change."""
    schedule = schedule_of(plan.config)
    points = sorted({*range(0, steps, max(1, steps // _POINTS)), steps - 1})
    curves = [_Curve("learning rate", points, list(map(schedule.lr, points)))]
    edges: list[int] = []
    sizes: list[int] = []
    lengths: list[int] = []
    for segment in plan.batch_schedule.segments(steps):
        edges.append(segment.first)
        sizes.append(segment.batch_size)
        lengths.append(segment.seq_length)
    edges.append(steps)
    for label, values in (("batch size (samples)", sizes), ("sequence length (tokens)", lengths)):
        if len(set(values)) > 1:
            curves.append(_Curve(label, edges, [*values, values[-1]], has_steps=True))
    return curves
