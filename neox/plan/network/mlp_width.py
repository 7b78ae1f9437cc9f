"""Inner width of the MLP, by the rules of gpt-neox v2.0, of later gpt-neox, or as given."""

from __future__ import annotations

from typing import Final

from neox.architecture import ACTIVATIONS
from neox.config.gated_widths import geglu_width_of_v2, round_up, width_of_each_half

MLP_SIZES: Final = ("intermediate_size", "expansion_factor", "mlp_multiple_of", "mlp_width")
"""Keys that the width follows from, next to `hidden_size` and `activation`."""


def mlp_width(
    hidden: int,
    activation: str,
    intermediate_size: int | None,
    expansion_factor: float | None,
    multiple_of: int | None,
    width: int | None,
) -> int:
    """Return the width after the activation.

    Later gpt-neox takes `intermediate_size`, by default 4 x hidden, as the width of an MLP without a gate. A gated MLP
    should have as many parameters, so two thirds of it are divided between the two halves of the first product: 32768
    with multiples of 256 gives 11008. gpt-neox v2.0 has one gated activation, `geglu`, each half of which is two thirds
    of 4 x hidden wide. That holds for `geglu` if none of the later keys is given.

    Args:
        hidden: Width of the hidden states.
        activation: Key of `ACTIVATIONS`.
        intermediate_size: Later gpt-neox's key.
        expansion_factor: Later gpt-neox's key: the same, as a multiple of `hidden`.
        multiple_of: Later gpt-neox's key `mlp_multiple_of`.
        width: The width itself, which decides if it is given.
    """
    if width:
        return width
    if activation == "geglu" and not (intermediate_size or expansion_factor or multiple_of):
        return geglu_width_of_v2(hidden)
    if intermediate_size:
        size = intermediate_size
    elif expansion_factor:
        size = int(expansion_factor * hidden)
    else:
        size = 4 * hidden
    if ACTIVATIONS[activation].width_factor == 2:
        size = width_of_each_half(size)
    return round_up(size, multiple_of or 1)
