"""Initial weights: NeoX's distributions, drawn so that they depend on (seed, layer index, parameter name) alone.

Each full tensor is drawn in fp32 from a generator of its own and then sliced, so that every layout of pipe, tensor and
data ranks starts from the same model, and at most one full tensor is in memory. It is drawn on the CPU, whose numbers
are the same everywhere; for big networks on the GPU, whose numbers are those of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from neox.architecture import LayerEntry
from neox.model.positions import reset_buffers
from neox.parallel import ParallelGrid, derive_seed, mark_decay, mark_hidden, mark_lr_factor, mark_split, shard


def draw(
    method: str, shape: tuple[int, ...], generator: torch.Generator, *, std: float, layers: int, hidden: float
) -> Tensor:
    """Draw a weight [out, in] in fp32 on the generator's device by one of NeoX's methods.

    std: `init_method_std`; layers: number of blocks; hidden: hidden size. small_init: arXiv:1910.05895; wang_init:
    Mesh-Transformer-JAX; scaled_normal: GPT-2; xavier: Glorot and Bengio 2010; orthogonal: arXiv:1312.6120.
    """
    weight = torch.empty(shape, dtype=torch.float32, device=generator.device)
    deviations = {
        "normal": std,
        "scaled_normal": std / math.sqrt(2.0 * layers),
        "small_init": math.sqrt(2.0 / (5.0 * hidden)),
        "wang_init": 2.0 / layers / math.sqrt(hidden),
    }
    if method in deviations:
        return weight.normal_(0.0, deviations[method], generator=generator)
    if method == "fan_in":
        return weight.uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
    others: dict[str, Callable[[], Tensor]] = {
        "xavier_uniform": lambda: nn.init.xavier_uniform_(weight, generator=generator),
        "xavier_normal": lambda: nn.init.xavier_normal_(weight, generator=generator),
        "orthogonal": lambda: nn.init.orthogonal_(weight, math.sqrt(2.0), generator=generator),
        "scaled_orthogonal": lambda: nn.init.orthogonal_(weight, math.sqrt(2.0 / layers), generator=generator),
    }
    if method not in others:
        raise ValueError(f"unknown init method {method!r}; known: {', '.join([*deviations, *others])}")
    return others[method]()


@torch.no_grad()
def initialize_layer(
    layer: nn.Module,
    entry: LayerEntry,
    grid: ParallelGrid,
    *,
    seed: int,
    init_method: str,
    output_layer_init_method: str,
    std: float,
    layers: int,
    hidden: int,
    width_multiplier: float = 1.0,
    scale: float = 1.0,
    prompt_range: float = 0.5,
    on_device: bool = False,
) -> None:
    """Fill this rank's part of every parameter of `layer`; norms get ones and zeros, biases zeros.

    Args:
        layer: The module.
        entry: Its entry in the layer plan.
        grid: Process groups.
        seed: Of the run.
        init_method: Method of weights that read hidden states, and of the embedding.
        output_layer_init_method: Method of weights that write into the residual.
        std: Deviation of `normal` and `scaled_normal`.
        layers: Number of blocks.
        hidden: Hidden size.
        width_multiplier: muP's m. Deviations are those of a hidden size m times smaller, and blocks' matrices get
            1 / sqrt(m) of them, and 1 / m of the learning rate.
        scale: Factor of everything drawn.
        prompt_range: A soft prompt is uniform up to it on both sides of zero.
        on_device: Draw on the parameters' device.
    """
    parameters = dict(layer.named_parameters())
    for spec in entry.parameters:
        target = parameters[spec.name]
        # Again here: `to_empty` makes new parameters, without the mark of the constructor.
        mark_split(target, spec.partition_dim is not None and grid.tp_size > 1)
        target.requires_grad_(spec.trained)
        mark_decay(target, spec.is_matrix)
        mark_hidden(target, entry.is_hidden(spec))
        if spec.init in ("ones", "zeros"):
            target.fill_(1.0 if spec.init == "ones" else 0.0)
            continue
        generator = torch.Generator(target.device if on_device else "cpu").manual_seed(
            derive_seed(seed, "weights", spec.shared_with or entry.index, spec.name)
        )
        if spec.init == "prompt":
            target.copy_(
                torch.empty(spec.shape, device=generator.device).uniform_(
                    -prompt_range, prompt_range, generator=generator
                )
            )
            continue
        methods = {"weight": init_method, "output_weight": output_layer_init_method}
        method = methods.get(spec.init, spec.init)
        full = draw(method, spec.shape, generator, std=std, layers=layers, hidden=hidden / width_multiplier)
        if width_multiplier != 1.0 and entry.is_hidden(spec):
            full *= width_multiplier**-0.5
            mark_lr_factor(target, 1.0 / width_multiplier)
        if scale != 1.0:
            full *= scale
        target.copy_(shard(full, spec, grid.tp_rank, grid.tp_size))
    reset_buffers(layer)
