"""Memory of one GPU: weights, gradients, optimizer states exactly, activations by formula."""

from __future__ import annotations

from neox.config.layer_plan import LayerPlan
from neox.config.plan import BatchPlan, GridPlan, MemoryPlan, Precision, StagePlan
from neox.config.sections import NeoXConfig
from neox.config.stages import held_parameters


def estimate_memory(
    config: NeoXConfig,
    layers: LayerPlan,
    stages: tuple[StagePlan, ...],
    grid: GridPlan,
    batch: BatchPlan,
    precision: Precision,
    recompute: bool | None = None,
) -> MemoryPlan:
    """Return bytes on the fullest GPU; `recompute` overrides checkpoint_activations."""
    plans = [
        stage_memory(config, layers, stage, i, grid, batch, precision, recompute) for i, stage in enumerate(stages)
    ]
    return max(plans, key=lambda plan: plan.total)


def stage_memory(
    config: NeoXConfig,
    layers: LayerPlan,
    stage: StagePlan,
    index: int,
    grid: GridPlan,
    batch: BatchPlan,
    precision: Precision,
    recompute: bool | None = None,
) -> MemoryPlan:
    """Return bytes on one GPU of a stage."""
    zero = config.deepspeed.zero_optimization.stage
    held = 0
    for layer in layers.layers[stage.first : stage.last]:
        held += held_parameters(layers, layer, grid.mp)
    half = precision != "fp32"
    weights = (2 if half else 4) * held // (grid.dp if zero >= 3 else 1)
    gradients = (2 if half else 4) * held // (grid.dp if zero >= 2 else 1)
    # Adam's two moments in fp32, and the fp32 copy of the weights in mixed precision.
    optimizer = (12 if half else 8) * held // (grid.dp if zero >= 1 else 1)
    return MemoryPlan(weights, gradients, optimizer, 0)
