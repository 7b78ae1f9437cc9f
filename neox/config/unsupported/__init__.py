"""gpt-neox's keys that belong to no section here: known by name, each with the reason and the way that works here.

`refused`: an error unless the value means off. `dormant`: read by gpt-neox only with another feature, which is refused;
`no effect`: gpt-neox's way of doing something that happens differently here. Both load, with a note unless the value is
gpt-neox's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from neox.config.unsupported.kernels import kernels_and_numbers
from neox.config.unsupported.key import UnsupportedKey
from neox.config.unsupported.network import network_shapes, positions_and_norms
from neox.config.unsupported.program import deepspeed, logging, set_by_the_program
from neox.config.unsupported.run import data, optimizer_and_schedule, training

__all__ = ["UNSUPPORTED", "UnsupportedKey"]

_TABLES = (
    positions_and_norms,
    network_shapes,
    kernels_and_numbers,
    optimizer_and_schedule,
    training,
    data,
    logging,
    set_by_the_program,
    deepspeed,
)

UNSUPPORTED: Mapping[str, UnsupportedKey] = MappingProxyType({key.name: key for table in _TABLES for key in table()})
