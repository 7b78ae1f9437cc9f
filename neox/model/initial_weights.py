"""Initial weights by NeoX's distributions.

They depend on seed, layer index and parameter name only: each full tensor is drawn in fp32 from a generator of its own,
and then sliced. So every layout of ranks starts from the same model, and at most one full tensor is in memory. Tensors
are drawn on the CPU, whose numbers are the same everywhere; for big networks on the GPU, whose numbers depend on its
kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neox.architecture import (
    BLOCK_OFFSET,
    ByChannel,
    Constant,
    FromKey,
    InitialValues,
    LayerEntry,
    LogCounts,
    LogUniform,
    Normal,
    ParameterSpec,
    StepSizes,
    Uniform,
)
from neox.parallel import ParallelGrid, derive_seed, own_experts, shard


def draw(
    method: str, shape: tuple[int, ...], generator: torch.Generator, *, std: float, layers: int, hidden: float
) -> Tensor:
    """Draw a weight [out, in] in fp32 on the generator's device by one of NeoX's methods.

    small_init: arXiv:1910.05895; wang_init: Mesh-Transformer-JAX; scaled_normal: GPT-2; xavier: Glorot and Bengio 2010;
    orthogonal: arXiv:1312.6120.

    Args:
        method: Name of the method.
        shape: Shape of the full weight.
        generator: Source of random numbers.
        std: Standard deviation of `normal`, and of the scaled ones before scaling (`init_method_std`).
        layers: Number of blocks.
        hidden: Hidden size.

    Raises:
        ValueError: If there is no such method.
    """
    weight = torch.empty(shape, dtype=torch.float32, device=generator.device)
    deviations = {
        "normal": std,
        "scaled_normal": std / math.sqrt(2.0 * layers),
        "single_residual_scaled_normal": std / math.sqrt(layers),
        "small_init": math.sqrt(2.0 / (5.0 * hidden)),
        "wang_init": 2.0 / layers / math.sqrt(hidden),
    }
    if method in deviations:
        return weight.normal_(0.0, deviations[method], generator=generator)
    others: dict[str, Callable[[], Tensor]] = {
        "xavier_uniform": lambda: nn.init.xavier_uniform_(weight, generator=generator),
        "xavier_normal": lambda: nn.init.xavier_normal_(weight, generator=generator),
        "orthogonal": lambda: nn.init.orthogonal_(weight, math.sqrt(2.0), generator=generator),
        "scaled_orthogonal": lambda: nn.init.orthogonal_(weight, math.sqrt(2.0 / layers), generator=generator),
    }
    if method not in others:
        raise ValueError(f"unknown init method {method!r}; known: {', '.join([*deviations, *others])}")
    return others[method]()


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """How the weights of a network are drawn.

    Attributes:
        seed: Seed of the run.
        init_method: Method of weights that read hidden states, and of the embedding.
        output_layer_init_method: Method of weights that write into the residual stream.
        std: Standard deviation of `normal` and `scaled_normal`.
        layers: Number of blocks.
        hidden: Hidden size.
        width_multiplier: muP's m. Deviations are those of a hidden size m times smaller. Matrices of blocks get
            1 / sqrt(m) of them, and 1 / m of the learning rate.
        scale: Factor of everything that is drawn.
        prompt_range: Largest absolute value of a soft prompt, which is uniform.
        on_device: Whether weights are drawn on the parameters' device, not on the CPU.
    """

    seed: int
    init_method: str
    output_layer_init_method: str
    std: float
    layers: int
    hidden: int
    width_multiplier: float = 1.0
    scale: float = 1.0
    prompt_range: float = 0.0
    on_device: bool = False

    @torch.no_grad()
    def fill(self, layer: nn.Module, entry: LayerEntry, grid: ParallelGrid) -> None:
        """Fill this rank's part of every parameter of a layer.

        Args:
            layer: The module.
            entry: Its entry in the layer plan.
            grid: Process groups.
        """
        parameters = dict(layer.named_parameters())
        for spec in entry.parameters:
            target = parameters[spec.name]
            if isinstance(spec.init, Constant):
                target.fill_(spec.init.value)
                continue
            full = self.full(spec, entry, target.device)
            target.copy_(own_experts(shard(full, spec, grid.tp_rank, grid.tp_size), target))

    def full(self, spec: ParameterSpec, entry: LayerEntry, device: torch.device | None = None) -> Tensor:
        """Return the full tensor of a randomly initialized parameter.

        Args:
            spec: The parameter.
            entry: Its layer.
            device: Device of the parameter, for weights that are generated there.
        """
        generator = torch.Generator(device if self.on_device and device is not None else "cpu")
        seeded = ("weights", spec.shared_with or entry.index, spec.name)
        generator.manual_seed(derive_seed(self.seed, *seeded))
        if spec.init is FromKey.PROMPT_RANGE:
            return self._draw(spec.init, spec.shape, generator)
        if isinstance(spec.init, ByChannel):
            block = min(entry.index - BLOCK_OFFSET, self.layers - 1)  # one behind the network starts as the last one
            return self._by_channel(spec.init, spec.shape, block)
        if spec.experts:
            full = torch.empty(spec.shape, device=generator.device)
            for expert in range(spec.experts):
                generator.manual_seed(derive_seed(self.seed, *seeded, expert))
                full[expert] = self._draw(spec.init, spec.shape[1:], generator)
        else:
            full = self._draw(spec.init, spec.shape, generator)
        if entry.is_hidden(spec) and self.width_multiplier != 1.0:
            full *= self.width_multiplier**-0.5
        if self.scale != 1.0:
            full *= self.scale
        return full

    def _by_channel(self, init: ByChannel, shape: tuple[int, ...], block: int) -> Tensor:
        """Return a formula's values for one block in fp32."""
        channels = math.prod(shape)
        values = [init.value(channel, channels, block, self.layers) for channel in range(channels)]
        return torch.tensor(values, dtype=torch.float32).view(shape)

    def _draw(self, init: InitialValues, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw initial values in fp32 on the generator's device."""
        values = torch.empty(shape, dtype=torch.float32, device=generator.device)
        match init:
            case Constant(value):
                return values.fill_(value)
            case Normal(std):
                return values.normal_(0.0, std, generator=generator)
            case Uniform(low, high):
                return values.uniform_(low, high, generator=generator)
            case LogUniform(low, high):
                return values.uniform_(low, high, generator=generator).log_()
            case LogCounts():
                return values.copy_(torch.arange(1, shape[-1] + 1, device=values.device)).log_()
            case StepSizes(low, high):
                steps = values.uniform_(math.log(low), math.log(high), generator=generator).exp_()
                return steps + torch.log(-torch.expm1(-steps))  # softplus of this is `steps`
            case FromKey.PROMPT_RANGE:
                return values.uniform_(-self.prompt_range, self.prompt_range, generator=generator)
            case FromKey.METHOD:
                method = self.init_method
            case FromKey.OUTPUT_METHOD:
                method = self.output_layer_init_method
        width = self.hidden / self.width_multiplier
        return draw(method, shape, generator, std=self.std, layers=self.layers, hidden=width)
