"""Names and order of the adapters of experts in the files of the package `peft` (`target_parameters`).

The experts of a block are two parameters of one module of transformers, `gate_up_proj` and `down_proj`. A and B of all
experts are one matrix each. Rows of A go by expert, and columns of B by rank (peft#3009):

    ours                        theirs
    A [experts, r, inputs]      A [experts x r, inputs]
    B [experts, outputs, r]     B [outputs, r x experts]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from neox.architecture import ADAPTED_LAYERS, Architecture, LayerPlan
from neox.convert.layouts import from_hf_layout, to_hf_layout
from neox.families import Family, TensorMapping, TensorSource


def expert_stacks(layers: LayerPlan, family: Family) -> Iterator[TensorMapping]:
    """Yield the weights of the experts of each block, and of each module of multi-token prediction."""
    for mapping in family.mappings(layers):
        layer = layers[mapping.layer]
        spec = next((spec for spec in layer.parameters if spec.name == mapping.name), None)
        if spec is not None and layer.kind in ADAPTED_LAYERS and spec.experts and spec.name.endswith(".weight"):
            yield mapping


def expert_parameter(mapping: TensorMapping, layers: LayerPlan) -> str:
    """Return the name of transformers' parameter that holds the weights of a block's experts."""
    name = "down_proj"
    if mapping.name.endswith("dense_h_to_4h.weight"):
        name = "gate_up_proj"
    return f"model.layers.{layers.block_number(mapping.layer)}.mlp.experts.{name}"


def expert_module(parameter: str, adapted: Collection[str]) -> str:
    """Return the module of the adapters of a parameter of experts: peft wraps the module once for each parameter.

    Args:
        parameter: Name of the parameter.
        adapted: Names of all parameters with adapters.
    """
    module, _, name = parameter.rpartition(".")
    if name == "gate_up_proj" and f"{module}.down_proj" in adapted:
        return f"{module}.base_layer"
    return module


def expert_b_to_peft(b: Tensor, source: TensorSource, architecture: Architecture) -> Tensor:
    """Return peft's B [outputs, r x experts] of ours [experts, outputs, r]."""
    if source.layout == "experts":
        rows = torch.cat(b.tensor_split(len(source.modules), dim=1)[::-1], dim=1)  # gate, then up
    else:
        rows = to_hf_layout(b, source, architecture)[0].transpose(1, 2)
    return rows.permute(1, 2, 0).flatten(1).contiguous()


def expert_b_from_peft(b: Tensor, experts: int, source: TensorSource, architecture: Architecture) -> Tensor:
    """Return our B [experts, outputs, r] of peft's [outputs, r x experts]."""
    rows = b.unflatten(1, (-1, experts)).permute(2, 0, 1)  # [experts, outputs, r]
    if source.layout == "experts":
        return torch.cat(rows.tensor_split(len(source.modules), dim=1)[::-1], dim=1)
    return from_hf_layout([rows.transpose(1, 2).contiguous()], source, architecture)
