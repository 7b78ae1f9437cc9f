"""Experts in gpt-neox's layer files, as parameters of this program.

E experts over T tensor ranks, F inner features, H hidden. gpt-neox puts whole experts on tensor ranks, and keeps them
as rows of one matrix:

    mlp.router.layer.weight  [E, H]          on every tensor rank; only that of rank 0 is used and trained
    mlp.experts.mlp.w1       [E / T * F, H]  first product
    mlp.experts.mlp.w2       [E / T * F, H]  second product, transposed
    mlp.experts.mlp.w3       [E / T * F, H]  what the activation of the first product is multiplied by, if it has a gate

Here each tensor rank has a part of the inner features of all experts.

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
    """Return whether a layer's tensors hold experts in gpt-neox's form."""
    return ROUTER in state


def with_own_experts(states: Sequence[Mapping[str, Tensor]], tp_rank: int, where: str) -> dict[str, Tensor]:
    """Return a layer's tensors on one tensor rank, with experts in the form of this program.

    Args:
        states: Tensors of the layer in the files of all tensor ranks.
        tp_rank: The tensor rank.
        where: Name of the files, for messages.

    Raises:
        CheckpointError: If the matrices do not fit the number of experts.
    """
    own = {name: tensor for name, tensor in states[tp_rank].items() if name != ROUTER and _EXPERTS not in name}
    router = states[0][ROUTER]
    own["mlp.router.weight"] = router
    experts = router.shape[0]

    def part(name: str) -> Tensor:
        """Return the rank's part of the inner features of all experts [E, F / T, H]."""
        of_ranks = []
        for state in states:
            here = experts // len(states)
            matrix = state[_EXPERTS + name]
            if experts % len(states) or matrix.shape[0] % (here * len(states)):
                raise CheckpointError(
                    f"{where}: {_EXPERTS}{name} has {matrix.shape[0]} rows, which {experts} experts over "
                    f"{len(states)} tensor ranks cannot divide; it was not written by gpt-neox, or its width is odd"
                )
            of_ranks.append(matrix.unflatten(0, (here, -1)).chunk(len(states), dim=1)[tp_rank])
        return of_ranks[0] if len(of_ranks) == 1 else torch.cat(of_ranks)

    first = part("w1")
    if _EXPERTS + "w3" in states[0]:
        first = torch.cat([part("w3"), first], dim=1)  # the value, then the gate
    own["mlp.experts.dense_h_to_4h.weight"] = first
    own["mlp.experts.dense_4h_to_h.weight"] = part("w2").transpose(1, 2)
    return own
