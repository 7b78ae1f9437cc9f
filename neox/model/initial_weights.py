"""Initial weights by NeoX's distributions.

They depend on seed, layer index and parameter name only: each full tensor is drawn in fp32 from a stream of its own,
and then sliced. So every layout of ranks starts from the same model, and at most one full tensor is in memory. Tensors
are drawn on the CPU, because an accelerator's numbers depend on its kind: CUDA deals them out to as many threads as its
multiprocessors run. Tensors of big networks are drawn in pieces by all threads of the rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neox.architecture import (
    ADAPTER,
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

_PIECE = 2**22
"""Elements of a piece: 16 MiB of fp32, drawn in about 20 ms."""


@dataclass(frozen=True)
class Stream:
    """Random numbers of one tensor on the CPU: the same on all processors that have AVX2, and nearly so on others.

    Attributes:
        seed: Seed of the tensor.
        in_pieces: Whether each piece of a tensor has a generator of its own, so that threads draw them together. The
            numbers depend on it, but not on the number of threads.
    """

    seed: int
    in_pieces: bool = False

    def normal(self, values: Tensor, std: float) -> Tensor:
        """Fill a CPU tensor with normal numbers of mean 0, in place, and return it."""
        return self._fill(values, lambda piece, generator: piece.normal_(0.0, std, generator=generator))

    def uniform(self, values: Tensor, low: float, high: float) -> Tensor:
        """Fill a CPU tensor with uniform numbers, in place, and return it."""
        return self._fill(values, lambda piece, generator: piece.uniform_(low, high, generator=generator))

    def _fill(self, values: Tensor, fill: Callable[[Tensor, torch.Generator], Tensor]) -> Tensor:
        if not self.in_pieces:
            return fill(values, torch.Generator().manual_seed(self.seed))

        def fill_piece(number: int, piece: Tensor) -> None:
            fill(piece, torch.Generator().manual_seed(derive_seed(self.seed, "piece", number)))

        pieces = values.view(-1).split(_PIECE)
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # torch lets other threads run meanwhile
            list(threads.map(fill_piece, range(len(pieces)), pieces))
        return values


def draw(method: str, shape: tuple[int, ...], stream: Stream, *, std: float, layers: int, hidden: float) -> Tensor:
    """Draw a weight [out, in] in fp32 by one of NeoX's methods.

    small_init: arXiv:1910.05895; wang_init: Mesh-Transformer-JAX; scaled_normal: GPT-2; xavier: Glorot and Bengio 2010;
    orthogonal: arXiv:1312.6120.

    Args:
        method: Name of the method.
        shape: Shape of the full weight.
        stream: Random numbers of this weight.
        std: Standard deviation of `normal`, and of the scaled ones before scaling (`init_method_std`).
        layers: Number of blocks.
        hidden: Hidden size.

    Raises:
        ValueError: If there is no such method.
    """
    weight = torch.empty(shape, dtype=torch.float32)
    deviations = {
        "normal": std,
        "scaled_normal": std / math.sqrt(2.0 * layers),
        "single_residual_scaled_normal": std / math.sqrt(layers),
        "small_init": math.sqrt(2.0 / (5.0 * hidden)),
        "wang_init": 2.0 / layers / math.sqrt(hidden),
        "xavier_normal": math.sqrt(2.0 / sum(shape)),
    }
    if method in deviations:
        return stream.normal(weight, deviations[method])
    if method == "xavier_uniform":
        bound = math.sqrt(6.0 / sum(shape))
        return stream.uniform(weight, -bound, bound)
    gains = {"orthogonal": math.sqrt(2.0), "scaled_orthogonal": math.sqrt(2.0 / layers)}
    if method in gains:
        return nn.init.orthogonal_(weight, gains[method], generator=torch.Generator().manual_seed(stream.seed))
    raise ValueError(f"unknown init method {method!r}; known: {', '.join([*deviations, 'xavier_uniform', *gains])}")


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
        in_pieces: Whether weights are drawn in pieces, by several threads.
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
    in_pieces: bool = False

    @torch.no_grad()
    def fill(self, layer: nn.Module, entry: LayerEntry, grid: ParallelGrid, *, only_adapters: bool = False) -> None:
        """Fill this rank's part of every parameter of a layer.

        Args:
            layer: The module.
            entry: Its entry in the layer plan.
            grid: Process groups.
            only_adapters: Whether all other parameters are read from a checkpoint instead.
        """
        parameters = dict(layer.named_parameters())
        for spec in entry.parameters:
            if only_adapters and ADAPTER not in spec.name:
                continue
            target = parameters[spec.name]
            if isinstance(spec.init, Constant):
                target.fill_(spec.init.value)
                continue
            full = self.full(spec, entry)
            target.copy_(own_experts(shard(full, spec, grid.tp_rank, grid.tp_size), target))

    def full(self, spec: ParameterSpec, entry: LayerEntry) -> Tensor:
        """Return the full tensor of a randomly initialized parameter, on the CPU.

        Args:
            spec: The parameter.
            entry: Its layer.
        """
        seeded = ("weights", spec.shared_with or entry.index, spec.name)
        if spec.init is FromKey.PROMPT_RANGE:
            return self._draw(spec.init, spec.shape, *seeded)
        if isinstance(spec.init, ByChannel):
            block = min(entry.index - BLOCK_OFFSET, self.layers - 1)  # one behind the network starts as the last one
            return self._by_channel(spec.init, spec.shape, block)
        if spec.experts:
            full = torch.empty(spec.shape)
            for expert in range(spec.experts):
                full[expert] = self._draw(spec.init, spec.shape[1:], *seeded, expert)
        else:
            full = self._draw(spec.init, spec.shape, *seeded)
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

    def _draw(self, init: InitialValues, shape: tuple[int, ...], *seeded: str | int) -> Tensor:
        """Draw initial values in fp32.

        Args:
            init: What to draw.
            shape: Shape of the tensor.
            *seeded: What the seed depends on next to the run's.
        """
        stream = Stream(derive_seed(self.seed, *seeded), self.in_pieces)
        values = torch.empty(shape, dtype=torch.float32)
        match init:
            case Constant(value):
                return values.fill_(value)
            case Normal(std):
                return stream.normal(values, std)
            case Uniform(low, high):
                return stream.uniform(values, low, high)
            case LogUniform(low, high):
                return stream.uniform(values, low, high).log_()
            case LogCounts():
                return values.copy_(torch.arange(1, shape[-1] + 1)).log_()
            case StepSizes(low, high):
                steps = stream.uniform(values, math.log(low), math.log(high)).exp_()
                return steps + torch.log(-torch.expm1(-steps))  # softplus of this is `steps`
            case FromKey.PROMPT_RANGE:
                return stream.uniform(values, -self.prompt_range, self.prompt_range)
            case FromKey.METHOD:
                method = self.init_method
            case FromKey.OUTPUT_METHOD:
                method = self.output_layer_init_method
        width = self.hidden / self.width_multiplier
        return draw(method, shape, stream, std=self.std, layers=self.layers, hidden=width)
