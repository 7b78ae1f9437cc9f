"""Addition of low-rank adapters to a layer plan."""

from __future__ import annotations

from dataclasses import replace

from neox.architecture.layers import ADAPTED_LAYERS, LayerEntry, LayerPlan
from neox.architecture.lora import Lora, adapter_parameters
from neox.architecture.parameter import ParameterSpec


def add_adapters(layers: LayerPlan, lora: Lora) -> LayerPlan:
    """Return a layer plan with adapters in every block, and everything else frozen.

    Modules of multi-token prediction have adapters in the same linear layers as blocks.
    """
    changed = tuple(_with_adapters(layer, lora) for layer in layers)
    return replace(layers, layers=changed, lora=lora)


def _with_adapters(layer: LayerEntry, lora: Lora) -> LayerEntry:
    """Return a layer with frozen parameters and, if it has a block, adapters. A score head is new, so it is trained."""
    if layer.kind == "score_head":
        return layer
    parameters: list[ParameterSpec] = []
    for spec in layer.parameters:
        parameters.append(replace(spec, trained=False))
        if layer.kind in ADAPTED_LAYERS and lora.adapts(spec):
            parameters += adapter_parameters(spec, lora.rank)
    return replace(layer, parameters=tuple(parameters))
