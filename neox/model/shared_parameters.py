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
    shared: set[tuple[int, str]] = set()
    for layer in layers:
        for spec in layer.parameters:
            if spec.shared_with is not None:
                shared.add((spec.shared_with, spec.name))
    found: dict[tuple[int, str], nn.Parameter] = {}
    for index, module in modules:
        for spec in layers[index].parameters:
            key = (layers.owner(index, spec.name), spec.name)
            if key not in shared:
                continue
            path, _, name = spec.name.rpartition(".")
            holder = module.get_submodule(path)
            if key not in found:
                found[key] = holder.get_parameter(name)
            holder.register_parameter(name, found[key])
    return [found[key] for key in sorted(found)]
