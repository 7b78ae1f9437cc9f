"""Norms by name: modules over the last dimension whose parameters are those of `neox.architecture.NORMS`.

Legend: H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.architecture import NORMS as NORMS_ON_PAPER
from neox.architecture import Architecture


class RMSNorm(nn.Module):
    """scale * x / sqrt(mean(x^2) + eps), over the last dimension (arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, *, eps: float, **options: Any) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(hidden_size, **options))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise: [..., H] -> [..., H]."""
        return F.rms_norm(x, self.scale.shape, self.scale, self.eps)


class RMSNormFromZero(RMSNorm):
    """(1 + scale) * x / sqrt(mean(x^2) + eps), with a scale that begins at 0 (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise: [..., H] -> [..., H]."""
        return F.rms_norm(x, self.scale.shape, 1.0 + self.scale, self.eps)


class RMSNormOuterEpsilon(RMSNorm):
    """scale * x / (sqrt(mean(x^2)) + eps): gpt-neox v2.0's form."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise: [..., H] -> [..., H]."""
        x32 = x.float()
        root = x32.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5  # its gradient at 0 is 0; that of sqrt is infinite
        return (self.scale * (x32 / (root + self.eps))).to(x.dtype)


class ScaleNorm(nn.Module):
    """g * x / max(|x|, eps), with one scalar g (arXiv:1910.05895; without its factor sqrt(H), as in gpt-neox)."""

    def __init__(self, hidden_size: int, *, eps: float, **options: Any) -> None:
        super().__init__()
        self.eps = eps
        self.g = nn.Parameter(torch.ones(1, **options))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise: [..., H] -> [..., H]."""
        x32 = x.float()
        return (self.g * (x32 / x32.norm(dim=-1, keepdim=True).clamp(min=self.eps))).to(x.dtype)


NORMS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "layernorm": nn.LayerNorm,
        "rmsnorm": RMSNorm,
        "rmsnorm_1p": RMSNormFromZero,
        "layernorm_no_bias": partial(nn.LayerNorm, bias=False),
        "rmsnorm_v2.0": RMSNormOuterEpsilon,
        "scalenorm": ScaleNorm,
        "non_parametric_layernorm": partial(nn.LayerNorm, elementwise_affine=False),
    }
)
"""Name -> constructor (hidden size, eps=, device=, dtype=); without `eps` if the entry on paper has no epsilon."""


def build_norm(architecture: Architecture, size: int | None = None, **options: Any) -> nn.Module:
    """Return one of the network's norms.

    Args:
        architecture: The network.
        size: Width of what is normalised; the hidden size if None.
        **options: Device and type of the parameters.
    """
    size = size or architecture.hidden_size
    if NORMS_ON_PAPER[architecture.norm].epsilon_key is None:
        return NORMS[architecture.norm](size, **options)
    return NORMS[architecture.norm](size, eps=architecture.norm_epsilon, **options)
