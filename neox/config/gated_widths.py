"""Inner widths of gated MLPs, as gpt-neox derived them over the years from the hidden size.

A gated MLP has three matrices instead of two. With 2/3 of the usual width, 4 x hidden, it has as many parameters:

    until 2024-09   `geglu`              8/3 x hidden
                    `mlp_type: llama`    8/3 x hidden, in multiples of 256
    since 2024-09   all                  2/3 of `intermediate_size` (4 x hidden) for both halves of the first product
                                         together, so 4/3 x hidden, in multiples of `mlp_multiple_of` (256 at first)
"""

from __future__ import annotations

from math import ceil

LLAMA_MULTIPLE = 256
"""Widths were multiples of it before `mlp_multiple_of`."""


def round_up(width: int, multiple: int) -> int:
    """Return the smallest multiple that is not below a width."""
    return ceil(width / multiple) * multiple


def geglu_width_of_v2(hidden: int) -> int:
    """Return the width of `geglu` in gpt-neox v2.0."""
    return int(4 * 2 / 3 * hidden)


def llama_width(hidden: int) -> int:
    """Return the width of `mlp_type: llama`."""
    return round_up(int(2 * hidden * 4 / 3), LLAMA_MULTIPLE)


def width_of_each_half(intermediate_size: int) -> int:
    """Return the width of a gated MLP in gpt-neox since September 2024, before it is rounded up."""
    return ceil(int(intermediate_size * 2 / 3) / 2)
