"""Table of attention modules by kind."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from neox.architecture import SPARSITY
from neox.model.attention import SelfAttention, SparseSelfAttention, WindowedSelfAttention
from neox.model.latent_attention import LatentSelfAttention

ATTENTION: Mapping[str, type[SelfAttention]] = MappingProxyType(
    {
        "global": SelfAttention,
        "sliding_window": WindowedSelfAttention,
        "latent": LatentSelfAttention,
        **dict.fromkeys(SPARSITY, SparseSelfAttention),
    }
)
"""Kind of attention (`Architecture.attention`) -> module."""
