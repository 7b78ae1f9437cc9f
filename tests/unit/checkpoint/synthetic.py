"""Small checkpoints with seeded weights, written without training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox.architecture import LayerPlan
from neox.checkpoint import write_client_state, write_full_layer
from tests.plans import SIZES, plan_of


def small_plan(**changes: Any) -> LayerPlan:
    """A layer plan of two small blocks."""
    sizes = {"num_layers": 2, "hidden_size": 16, "rotary_pct": 1, "padded_vocab_size": 64}
    kinds = {"gpt_j_residual": True, "no_weight_tying": True, "output_layer_parallelism": "column"}
    return plan_of(1, 50, **{**SIZES, **sizes, **kinds, **changes}).layers


def seeded_weights(
    layers: LayerPlan, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[tuple[int, str], Tensor]:
    """Full tensors of every parameter; norms near 1, everything else small."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in layers.weight_layers:
        for p in layer.parameters:
            value = torch.randn(p.shape, generator=generator) * 0.2
            if "norm." in p.name and p.name.endswith("weight"):
                value += 1
            weights[layer.index, p.name] = value.to(dtype)
    return weights


def write_checkpoint(
    directory: Path,
    layers: LayerPlan,
    weights: Mapping[tuple[int, str], Tensor],
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    client_state: Mapping[str, Any] | None = None,
) -> Path:
    """Write layer files and client states of a checkpoint into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for layer in layers.weight_layers:
        state = {p.name: weights[layer.index, p.name] for p in layer.parameters}
        write_full_layer(directory, layer, state, tp_size)
    for rank in range(tp_size * pp_size):
        write_client_state(directory, rank, {"iteration": 3, **(client_state or {})})
    return directory
