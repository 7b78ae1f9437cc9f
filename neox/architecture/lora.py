"""Low-rank adapters on paper (LoRA, arXiv:2106.09685): their numbers and parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

from neox.architecture.parameter import ZEROS, ParameterSpec, Uniform

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

    def adapts(self, parameter: ParameterSpec) -> bool:
        """Return whether a block's parameter is the weight of a linear layer that gets an adapter."""
        module, _, name = parameter.name.rpartition(".")
        is_linear = name == "weight" and len(parameter.shape) == 2
        return is_linear and module.rpartition(".")[2] in self.targets


def adapter_parameters(weight: ParameterSpec, rank: int) -> tuple[ParameterSpec, ParameterSpec]:
    """Return A [rank, I] and B [O, rank] of a weight [O, I].

    Tensor ranks split one of them as they split the weight: B if the weight is split by its outputs, else A.
    """
    module = weight.name.removesuffix(".weight")
    outputs, inputs = weight.shape
    bound = inputs**-0.5
    down = ParameterSpec(f"{module}{ADAPTER}lora_A", (rank, inputs), 1, init=Uniform(-bound, bound))
    up = ParameterSpec(f"{module}{ADAPTER}lora_B", (outputs, rank), None, init=ZEROS)
    if weight.partition_dim == 0:
        down = replace(down, partition_dim=None)
        up = ParameterSpec(up.name, up.shape, 0, init=ZEROS, sections=weight.sections)
    return down, up
