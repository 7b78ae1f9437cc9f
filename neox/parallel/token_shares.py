"""Sequence parallelism: between layers that split features, each tensor rank computes a share of the tokens.

See Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn

from neox.parallel.collectives import all_reduce
from neox.parallel.grid import ParallelGrid


class TokenShares(nn.Module):
    """A module that can take or return this rank's share of the tokens in training.

    Attributes:
        grid: Process groups.
        divides_tokens: Whether it does so in training (`divide_tokens`).
    """

    grid: ParallelGrid
    divides_tokens = False

    @property
    def shares(self) -> int:
        """Number of shares into which tokens are divided now: the tensor ranks, or 1. Always 1 outside of training."""
        if self.divides_tokens and self.training:
            return self.grid.tp_size
        return 1

    def parameters_on_shares(self) -> Iterable[nn.Parameter]:
        """Return the parameters that every rank holds whole, but that only see this rank's share of the tokens."""
        return ()


def divide_tokens(layer: nn.Module) -> None:
    """Let a layer of the network divide tokens in training, if the run does.

    Parameters that see only a share of the tokens get a part of their gradient on each rank. The parts are summed as
    they arrive.
    """
    for module in layer.modules():
        if isinstance(module, TokenShares) and module.grid.topology.sequence_parallel:
            module.divides_tokens = True
            for parameter in module.parameters_on_shares():
                parameter.register_hook(partial(all_reduce, grid=module.grid))
