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
        is_linear = name == "weight" and (len(parameter.shape) == 2 or parameter.experts > 0)
        return is_linear and module.rpartition(".")[2] in self.targets


def adapter_parameters(weight: ParameterSpec, rank: int) -> tuple[ParameterSpec, ParameterSpec]:
    """Return A [rank, I] and B [O, rank] of a weight [O, I]; of a stack of experts [E, O, I] a stack of each.

    Tensor ranks split one of them as they split the weight: B if the weight is split by its outputs, A if it is by its
    inputs, and neither if every rank has the whole weight.
    """
    module = weight.name.removesuffix(".weight")
    *stack, outputs, inputs = weight.shape
    rows = len(stack)  # dimension of the outputs
    bound = inputs**-0.5
    of_experts = ParameterSpec("", (), experts=weight.experts, active_experts=weight.active_experts)
    down = replace(
        of_experts, name=f"{module}{ADAPTER}lora_A", shape=(*stack, rank, inputs), init=Uniform(-bound, bound)
    )
    up = replace(of_experts, name=f"{module}{ADAPTER}lora_B", shape=(*stack, outputs, rank), init=ZEROS)
    if weight.partition_dim is None:
        return down, up
    if weight.partition_dim == rows:
        return down, replace(up, partition_dim=rows, sections=weight.sections)
    return replace(down, partition_dim=rows + 1), up
