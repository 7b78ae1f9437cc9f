"""Picture of what changes over a run: learning rate, batch size, sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from neox.errors import ConfigError
from neox.files import atomic_write
from neox.plan import RunPlan
from neox.plan.schedule import schedule_of

_POINTS = 2000  # of the learning rate


def draw_schedules(plan: RunPlan, picture: Path) -> None:
    """Draw the learning rate over the iterations as PNG, and the batch size and the sequence length that change.

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
    figure = Figure(figsize=(8, 2 + 2.5 * len(curves)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(curves), sharex=True, squeeze=False)[:, 0]
    for axes, (label, at, values) in zip(rows, curves, strict=True):
        axes.plot(at, values, drawstyle="default" if axes is rows[0] else "steps-post")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    rows[-1].set_xlabel("iteration")
    try:
        with atomic_write(picture) as file:
            figure.savefig(file, format="png")
    except OSError as error:
        raise ConfigError(f"--plot {picture}: cannot be written: {error.strerror}; choose another file") from None


def _curves(plan: RunPlan, steps: int) -> list[tuple[str, Sequence[int], Sequence[float]]]:
    """Return label, iterations and values of each curve; the learning rate is the first."""
    schedule, segments = schedule_of(plan.config), list(plan.batch_schedule.segments(steps))
    at = sorted({*range(0, steps, max(1, steps // _POINTS)), steps - 1})
    curves: list[tuple[str, Sequence[int], Sequence[float]]] = [
        ("learning rate", at, [schedule.lr(step) for step in at])
    ]
    edges = [*(segment.first for segment in segments), steps]
    for label, values in (
        ("batch size (samples)", [segment.batch_size for segment in segments]),
        ("sequence length (tokens)", [segment.seq_length for segment in segments]),
    ):
        if len(set(values)) > 1:
            curves.append((label, edges, [*values, values[-1]]))
    return curves
