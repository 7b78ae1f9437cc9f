"""Whether a run compiles its transformer layers."""

from __future__ import annotations

from neox.config.neox_config import NeoXConfig


def compile_obstacle(config: NeoXConfig) -> tuple[str, str] | None:
    """Return the key whose value keeps layers from being compiled, and why; None if nothing does."""
    if config.training.deterministic:
        return "deterministic", "as the compiler may choose other kernels in another run; remove one of them"
    if config.deepspeed.zero_optimization.stage == 3:
        return "zero_optimization.stage", "which gathers weights inside the layers; use a lower stage"
    if config.model.apply_query_key_layer_scaling:
        reason = "as layers share one compiled graph, and each would have a scale of its own; remove one of them"
        return "apply_query_key_layer_scaling", reason
    if config.training.mlp_tile_size is not None:
        return "mlp_tile_size", "as the compiler chooses what of a layer is computed again; remove one of them"
    if config.training.checkpoint_activations and config.training.normalized_granularity != "full":
        return "recompute_granularity", "as the compiler chooses what of a layer is computed again; remove one of them"
    return None


def compiles_layers(config: NeoXConfig, *, on_gpu: bool) -> bool:
    """Return whether layers are compiled on such a device: `auto` compiles on GPUs, and if a budget needs it."""
    asked = config.training.compile_layers
    if isinstance(asked, bool):
        return asked
    is_useful = on_gpu or config.training.activation_memory_budget is not None
    return is_useful and compile_obstacle(config) is None
