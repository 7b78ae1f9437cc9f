"""Parameters that several layers use as one, in training."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from neox.architecture import LayerPlan


def share_parameters(modules: Iterable[tuple[int, nn.Module]], layers: LayerPlan) -> list[nn.Parameter]:
    """Let layers on this rank that hold copies of one parameter (`ParameterSpec.shared_with`) use one tensor.

    Args:
        modules: Index in the layer plan and module of the layers on this rank, in ascending order.
        layers: The network's layers.

    Returns:
        The shared parameters, in the same order on every stage.
    """
    shared = {(p.shared_with, p.name) for layer in layers for p in layer.parameters if p.shared_with is not None}
    found: dict[tuple[int, str], nn.Parameter] = {}
    for index, module in modules:
        for spec in layers[index].parameters:
            if (key := (layers.owner(index, spec.name), spec.name)) in shared:
                path, _, name = spec.name.rpartition(".")
                holder = module.get_submodule(path)
                setattr(holder, name, found.setdefault(key, getattr(holder, name)))
    return [found[key] for key in sorted(found)]
