"""Low-rank adapters on paper: which parameters they add to a layer plan (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from neox.architecture.layers import LayerPlan
from neox.architecture.parameter import ParameterSpec

ADAPTER = ".adapter."
"""Part of the name of every parameter of an adapter: MODULE.adapter.lora_A and MODULE.adapter.lora_B."""


@dataclass(frozen=True)
class Lora:
    """Adapters of linear layers: y = W x + b + (alpha / rank) B A x, of which only A and B are trained.

    Attributes:
        rank: Rows of A and columns of B.
        alpha: Numerator of the scale.
        targets: Names of the linear layers in a block, such as `query_key_value`.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank


def adapter_parameters(weight: ParameterSpec, rank: int) -> tuple[ParameterSpec, ParameterSpec]:
    """Return A [rank, I] and B [O, rank] of a weight [O, I]: one is split over tensor ranks as the weight is."""
    module, (outputs, inputs) = weight.name.removesuffix(".weight"), weight.shape
    by_outputs = weight.partition_dim == 0
    return (
        ParameterSpec(f"{module}{ADAPTER}lora_A", (rank, inputs), None if by_outputs else 1, init="fan_in"),
        ParameterSpec(
            f"{module}{ADAPTER}lora_B",
            (outputs, rank),
            0 if by_outputs else None,
            init="zeros",
            sections=weight.sections if by_outputs else (),
        ),
    )


def add_adapters(layers: LayerPlan, lora: Lora) -> LayerPlan:
    """Return a layer plan with adapters in every block, and everything else frozen."""
    changed = []
    for layer in layers:
        parameters: list[ParameterSpec] = []
        for spec in layer.parameters:
            parameters.append(replace(spec, trained=False))
            if layer.kind == "block" and _module(spec) in lora.targets:
                parameters += adapter_parameters(spec, lora.rank)
        changed.append(replace(layer, parameters=tuple(parameters)))
    return replace(layers, layers=tuple(changed), lora=lora)


def _module(spec: ParameterSpec) -> str:
    """Return the last name of the module that a weight belongs to; nothing for other parameters."""
    module, _, name = spec.name.rpartition(".")
    return module.rpartition(".")[2] if name == "weight" and len(spec.shape) == 2 else ""
