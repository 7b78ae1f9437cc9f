"""Conversion of experts in gpt-neox's layer files to this program's parameters.

gpt-neox places whole experts on tensor ranks, and stacks them in one matrix:

    mlp.router.layer.weight  [E, H]          on every tensor rank; only that of rank 0 is used and trained
    mlp.experts.mlp.w1       [E / T * F, H]  up projection; with a gate, the gate projection
    mlp.experts.mlp.w2       [E / T * F, H]  down projection, transposed
    mlp.experts.mlp.w3       [E / T * F, H]  up projection, if the activation has a gate

Here each tensor rank has a slice of the FFN dimension of all experts.

Legend: E experts, T tensor ranks, F width of an expert's MLP, H hidden.

Source: gpt-neox, megatron/model/moe.py, moe_mlp.py and router.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from neox.errors import CheckpointError

ROUTER = "mlp.router.layer.weight"
_EXPERTS = "mlp.experts.mlp."


def has_experts(state: Mapping[str, Tensor]) -> bool:
    """Return whether a layer's tensors include experts in gpt-neox's format."""
    return ROUTER in state


def convert_experts(states: Sequence[Mapping[str, Tensor]], tp_rank: int, where: str) -> dict[str, Tensor]:
    """Return a layer's tensors on one tensor rank, with experts in this program's format.

    Args:
        states: Tensors of the layer in the files of all tensor ranks.
        tp_rank: The tensor rank.
        where: Name of the file, for messages.

    Raises:
        CheckpointError: If the shape of a matrix does not match the number of experts.
    """
    own = {name: tensor for name, tensor in states[tp_rank].items() if name != ROUTER and _EXPERTS not in name}
    tp_size = len(states)
    router = states[0][ROUTER]
    own["mlp.router.weight"] = router
    experts = router.shape[0]

    def shard(name: str) -> Tensor:
        """Return this tensor rank's slice of all experts [E, F / T, H]."""
        slices = []
        for state in states:
            experts_here = experts // tp_size
            matrix = state[_EXPERTS + name]
            if experts % tp_size or matrix.shape[0] % (experts_here * tp_size):
                raise CheckpointError(
                    f"{where}: the {matrix.shape[0]} rows of {_EXPERTS}{name} cannot be divided into {experts} experts "
                    f"on {tp_size} tensor ranks. The file was not written by gpt-neox, or the width of the experts is "
                    f"not a multiple of {tp_size}"
                )
            slices.append(matrix.unflatten(0, (experts_here, -1)).chunk(tp_size, dim=1)[tp_rank])
        if len(slices) == 1:
            return slices[0]
        return torch.cat(slices)

    first = shard("w1")
    if _EXPERTS + "w3" in states[0]:
        first = torch.cat([shard("w3"), first], dim=1)  # up projection, then gate
    own["mlp.experts.dense_h_to_4h.weight"] = first
    own["mlp.experts.dense_4h_to_h.weight"] = shard("w2").transpose(1, 2)
    return own
