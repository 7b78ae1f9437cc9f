"""Picture of a step: when each pipeline stage computes, waits and reduces gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from neox.devices import GPUS
from neox.plan import RunPlan
from neox.plan.time.simulation import Timeline, simulate
from neox.plan.time.step import StepModel, ranges_of_stage, unsupported_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN_FOR_EACH_STAGE = 4
"""Micro batches for each stage that a picture has at most."""
_FORWARD = "tab:blue"
_BACKWARD = "tab:orange"
_GRADIENTS = "tab:red"
_WAITING = "0.9"
_HEIGHT = 0.8
_LATER_RANGE = 0.55
"""Opacity of passes through the second and later ranges of a stage."""
_MOST_NUMBERED = 40
"""Passes of a stage up to which each has the number of its micro batch."""


class StepPicture(NamedTuple):
    """What each pipeline stage does in a step.

    Attributes:
        timeline: Passes of each stage.
        micro_batches: Number of micro batches that the timeline has; the step may have more.
        gradients: Time of reducing gradients after the last pass.
        unit: Unit of all times.
    """

    timeline: Timeline
    micro_batches: int
    gradients: float
    unit: str


def step_picture(plan: RunPlan) -> StepPicture:
    """Return what each pipeline stage does in a step, by simulation.

    Times are estimated if `gpu_type` and the network allow it. Otherwise a forward pass through a stage takes 1, and a
    backward pass 2.
    """
    run = plan.workload
    layout = run.layout
    shown = min(layout.accumulation_steps, _SHOWN_FOR_EACH_STAGE * layout.pp_size)
    kind = plan.config.runner.gpu_type
    if kind is None or unsupported_time(run):
        ranges = ranges_of_stage(run)
        forward = [[1 / ranges] * ranges] * layout.pp_size
        backward = [[2 / ranges] * ranges] * layout.pp_size
        timeline = simulate(layout.pipeline_schedule, forward, backward, shown)
        return StepPicture(timeline, shown, 0.0, "forward passes of a stage")
    model = StepModel(plan.workload_on(GPUS[kind].family), GPUS[kind])
    passes = model.stage_passes()
    timeline = simulate(layout.pipeline_schedule, passes.forward, passes.backward, shown, passes.handoff)
    return StepPicture(timeline, shown, model.estimate().gradients, f"seconds, estimated for {kind}")


def draw_step(plan: RunPlan, axes: Axes) -> None:
    """Draw what each pipeline stage does in a step: a row for each stage, the first one on top.

    Args:
        plan: A plan with several stages.
        axes: Where to draw.
    """
    picture = step_picture(plan)
    end = picture.timeline.length + picture.gradients
    stages = len(picture.timeline.passes)
    for stage in range(stages):
        axes.broken_barh([(0, end)], (stage - _HEIGHT / 2, _HEIGHT), facecolors=_WAITING)
        _draw_stage(picture, stage, axes)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.set_xlabel(picture.unit)
    axes.set_title(_title(plan, picture))
    _add_legend(axes, picture)


def _draw_stage(picture: StepPicture, stage: int, axes: Axes) -> None:
    passes = picture.timeline.passes[stage]
    place = (stage - _HEIGHT / 2, _HEIGHT)
    for timed in passes:
        axes.broken_barh(
            [(timed.start, timed.end - timed.start)],
            place,
            facecolors=_BACKWARD if timed.work.backward else _FORWARD,
            alpha=_LATER_RANGE if timed.work.chunk else 1.0,
            edgecolor="white",
            linewidth=0.5,
        )
        if len(passes) <= _MOST_NUMBERED:
            middle = (timed.start + timed.end) / 2
            axes.text(middle, stage, str(timed.work.micro_batch + 1), ha="center", va="center", fontsize=7)
    if picture.gradients:
        axes.broken_barh([(passes[-1].end, picture.gradients)], place, facecolors=_GRADIENTS)


def _title(plan: RunPlan, picture: StepPicture) -> str:
    schedule = plan.config.parallelism.pipeline_schedule
    total = plan.batch.gradient_accumulation_steps
    shown = f"{total} micro batches"
    if picture.micro_batches < total:
        shown = f"{picture.micro_batches} of {total} micro batches"
    return f"{schedule}: {shown}, waiting {picture.timeline.bubble:.0%}"


def _add_legend(axes: Axes, picture: StepPicture) -> None:
    from matplotlib.patches import Patch

    kinds = [("forward", _FORWARD), ("backward", _BACKWARD), ("waiting", _WAITING)]
    if picture.gradients:
        kinds.append(("gradients between data ranks", _GRADIENTS))
    handles = [Patch(facecolor=color, label=label) for label, color in kinds]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(handles), frameon=False)
