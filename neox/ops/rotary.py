"""Rotary position embedding on the first dimensions of each head (RoFormer, arXiv:2104.09864; half-split as in NeoX).

Legend: B batch, S sequence, N heads, D head dim, R rotary dims (even, <= D).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


def rotary_inv_freq(
    rotary_ndims: int,
    base: float,
    device: torch.device | str | None = None,
    scaling: Mapping[str, Any] = MappingProxyType({}),
    lengths: Tensor | None = None,
    divisors: Tensor | None = None,
) -> Tensor:
    """Return the angular frequencies base^(-2i/R), fp32 [R/2], or [..., R/2] if they depend on lengths [...].

    Args:
        rotary_ndims: Number of rotated dimensions R.
        base: Base of the powers.
        device: Device of the result.
        scaling: Settings of one of `neox.architecture.ROPE_SCALINGS`, which change the frequencies.
        lengths: Sequence lengths in tokens, on the same device. Only scalings `by_length` use them; None means at most
            the length in training.
        divisors: `rotary_divisors` of the same scaling, if it has any. A forward pass gives those that it holds: made
            here, they would be copied from the host, which waits for the device and cannot be recorded in a CUDA graph.
    """
    exponents = torch.arange(0, rotary_ndims, 2, dtype=torch.float32, device=device) / rotary_ndims
    kind = scaling.get("rope_type", "default")
    if kind in _BY_LENGTH:
        if lengths is None:
            lengths = torch.ones((), device=device)
        if divisors is None:
            divisors = rotary_divisors(scaling, device)
        return _BY_LENGTH[kind](exponents, base, scaling, lengths.unsqueeze(-1), divisors)
    wavelengths = base**exponents
    return _SCALINGS[kind](wavelengths, base, scaling)


def rotary_divisors(scaling: Mapping[str, Any], device: torch.device | str | None = None) -> Tensor:
    """Return what LongRoPE divides the frequencies of short and of long sequences by, [2, R/2]; [2, 0] for others."""
    return torch.tensor(
        [scaling.get("short_factor", ()), scaling.get("long_factor", ())], dtype=torch.float32, device=device
    )


def rotary_factor(scaling: Mapping[str, Any]) -> float:
    """Return the factor of cosines and sines, which is not 1 for YaRN (arXiv:2309.00071, section 3.4) and LongRoPE."""
    kind = scaling.get("rope_type")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])

    length_factor = scaling["factor"]
    if kind == "longrope":
        return math.sqrt(1 + math.log(length_factor) / math.log(scaling["original_max_position_embeddings"]))
    weight = scaling.get("mscale")
    other_weight = scaling.get("mscale_all_dim")
    if weight and other_weight:
        return _yarn_factor(length_factor, weight) / _yarn_factor(length_factor, other_weight)
    return _yarn_factor(length_factor, 1.0)


def _yarn_factor(length_factor: float, weight: float) -> float:
    """Return YaRN's factor for sequences that are `length_factor` times as long as the trained ones."""
    if length_factor <= 1:
        return 1.0
    return 0.1 * weight * math.log(length_factor) + 1.0


def _linear(wavelengths: Tensor, base: float, scaling: Mapping[str, Any]) -> Tensor:
    """Divide all frequencies by one factor (position interpolation, arXiv:2306.15595)."""
    return (1.0 / wavelengths) / scaling["factor"]


def _llama3(wavelengths: Tensor, base: float, scaling: Mapping[str, Any]) -> Tensor:
    """Divide frequencies that make few turns in the trained length by a factor, and keep the others (Llama 3.1)."""
    frequencies = 1.0 / wavelengths
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling["factor"] + kept * frequencies


def _yarn(wavelengths: Tensor, base: float, scaling: Mapping[str, Any]) -> Tensor:
    """Do the same with a ramp that is linear in the dimension (YaRN, arXiv:2309.00071)."""
    rotary_ndims = 2 * wavelengths.numel()
    trained = scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """Return the dimension that makes this number of turns in the trained length."""
        return rotary_ndims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = dimension(scaling.get("beta_fast", 32))
    last = dimension(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, rotary_ndims - 1)
    width = last - first
    if width == 0:
        width = 0.001
    steps = torch.arange(wavelengths.numel(), dtype=torch.float32, device=wavelengths.device) - first
    kept = 1 - (steps / width).clamp(0, 1)
    return (1.0 / (scaling["factor"] * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept


def _dynamic(exponents: Tensor, base: float, scaling: Mapping[str, Any], lengths: Tensor, divisors: Tensor) -> Tensor:
    """Increase the base with the length, so that the slowest dimension is interpolated (transformers' `dynamic`)."""
    rotary_ndims = 2 * exponents.numel()
    factor = scaling["factor"]
    trained = scaling["original_max_position_embeddings"]
    growth = factor * lengths.clamp(min=trained) / trained - (factor - 1)
    bases = base * growth ** (rotary_ndims / (rotary_ndims - 2))
    return 1.0 / bases**exponents


def _longrope(exponents: Tensor, base: float, scaling: Mapping[str, Any], lengths: Tensor, divisors: Tensor) -> Tensor:
    """Divide each frequency by its own factor, which differs for long and short sequences (arXiv:2402.13753)."""
    short, long = divisors.unbind()
    factors = torch.where(lengths > scaling["original_max_position_embeddings"], long, short)
    return 1.0 / (factors * base**exponents)


_BY_LENGTH: Mapping[str, Callable[[Tensor, float, Mapping[str, Any], Tensor, Tensor], Tensor]] = MappingProxyType(
    {"dynamic": _dynamic, "longrope": _longrope}
)
"""Scaling -> function of exponents [R/2], base, settings, lengths [..., 1] and divisors [2, R/2 or 0] that returns
frequencies [..., R/2]."""


_SCALINGS: Mapping[str, Callable[[Tensor, float, Mapping[str, Any]], Tensor]] = MappingProxyType(
    {
        "default": lambda wavelengths, base, scaling: 1.0 / wavelengths,
        "linear": _linear,
        "llama3": _llama3,
        "yarn": _yarn,
    }
)


def rotary_tables(
    inv_freq: Tensor, positions: Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return what `rotate` multiplies with, computed in fp32 and cast to `dtype`.

    Args:
        inv_freq: Angular frequencies [R/2], or [..., R/2] with leading dimensions that broadcast with positions.
        positions: Positions of the tokens, [S], or [B, S] if rows differ.
        dtype: Type of the tables.
        factor: Factor of cosines and sines (`rotary_factor`).

    Returns:
        [cos, cos] and [-sin, sin] of position x frequency: [S, 1, R], or [B, S, 1, R] (they broadcast over heads).
    """
    angles = (positions.to(torch.float32).unsqueeze(-1) * inv_freq.float()).unsqueeze(-2)
    cos = angles.cos()
    sin = angles.sin()
    if factor != 1.0:
        cos = cos * factor
        sin = sin * factor
    cos = cos.to(dtype)
    sin = sin.to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dims of each head, in pairs (i, i + R/2); the other dims pass unchanged.

    Args:
        x: Queries or keys [B, S, N, D].
        cos: First table of `rotary_tables`.
        sin: Second table of `rotary_tables`.
    """
    width = cos.shape[-1]
    rotated, rest = x.split((width, x.shape[-1] - width), dim=-1)
    # All R dims at once: on a CPU, two products over halves of a few dims take twice as long.
    return torch.cat((rotated * cos + rotated.roll(width // 2, -1) * sin, rest), dim=-1)
