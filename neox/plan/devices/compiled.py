"""Whether a run compiles its transformer layers: the answer that the engine, the report, memory and time share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neox.config.neox_config import NeoXConfig
from neox.devices import DeviceFamily, family_has

if TYPE_CHECKING:
    from neox.plan.layout import Layout


def compile_obstacle(config: NeoXConfig, layout: Layout | None = None) -> tuple[str, str] | None:
    """Return the key whose value keeps layers from being compiled, and why; None if nothing does.

    Args:
        config: The configuration.
        layout: A layout that a search tries, whose fields count instead of their keys.
    """
    training = config.training
    zero_stage: int = config.deepspeed.zero_optimization.stage
    tile_tokens = training.mlp_tile_size or 0
    recomputes = training.checkpoint_activations
    recomputed_part = training.normalized_granularity
    if layout is not None:
        zero_stage = layout.zero_stage
        tile_tokens = layout.tile_tokens
        recomputes = layout.recomputes
        recomputed_part = layout.recomputed_part

    if training.deterministic:
        return "deterministic", "as the compiler may choose other kernels in another run; remove one of them"
    if zero_stage == 3:
        return "zero_optimization.stage", "which gathers weights inside the layers; use a lower stage"
    if config.model.apply_query_key_layer_scaling:
        reason = "as layers share one compiled graph, and each would have a scale of its own; remove one of them"
        return "apply_query_key_layer_scaling", reason
    if tile_tokens:
        return "mlp_tile_size", "as the compiler chooses what of a layer is computed again; remove one of them"
    if recomputes and recomputed_part != "full":
        return "recompute_granularity", "as the compiler chooses what of a layer is computed again; remove one of them"
    return None


def compiles(config: NeoXConfig, family: DeviceFamily | None, layout: Layout | None = None) -> bool:
    """Return whether layers are compiled: as `compile_layers` says; `auto` on GPUs, or if a memory budget needs it.

    Args:
        config: The configuration.
        family: Kind of device; None for one that has no fast path.
        layout: A layout that a search tries, whose fields count instead of their keys.
    """
    asked = config.training.compile_layers
    if isinstance(asked, bool):
        return asked
    is_useful = family_has(family, "compiled_layers") or config.training.activation_memory_budget is not None
    return is_useful and compile_obstacle(config, layout) is None
