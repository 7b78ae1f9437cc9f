"""Position encodings by name: vectors added to the tokens', rotations of queries and keys, or biases of scores.

Legend: B batch, S sequence, T keys (tokens seen before, and the S new ones), N heads here, D head dim, R rotary dims,
H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.architecture import ROPE_SCALINGS, Architecture
from neox.ops import (
    alibi_slopes,
    relative_buckets,
    rotary_divisors,
    rotary_factor,
    rotary_inv_freq,
    rotary_tables,
    rotate,
)
from neox.parallel import ParallelGrid, mark_split

Tables = tuple[Tensor, ...]
"""What a position encoding computes from the tokens' positions once for all blocks."""


class PositionEncoding(nn.Module):
    """What positions do in the attention of one block.

    Attributes:
        name: Name of the module inside the attention, as in gpt-neox's checkpoints.
        by_length: Whether tables depend on the lengths of sequences.
    """

    name: str
    by_length = False

    def reset(self) -> None:
        """Compute the buffers again, after a module made on the meta device got memory."""

    def tables(
        self,
        positions: Tensor,
        keys: int,
        dtype: torch.dtype,
        slots: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tables:
        """Return what `forward` and `score_bias` need, computed once for all blocks.

        Args:
            positions: Positions of the new tokens, [S] or [B, S].
            keys: Number of keys, T.
            dtype: Type of the hidden states.
            slots: Indices of the new tokens among the keys, [S]; the last ones if None.
            lengths: Length of each new token's sequence, [1] or [B, S], for encodings `by_length`; T if None.
        """
        raise NotImplementedError

    def forward(self, queries_keys: Tensor, tables: Tables) -> Tensor:
        """Encode queries and keys side by side: [B, S, N, 2, D] -> the same shape."""
        return queries_keys

    def score_bias(self, tables: Tables) -> Tensor | None:
        """Return what is added to scaled scores, [1, N, S, T], with -inf for later keys; None for nothing."""
        return None


class RotaryEmbedding(PositionEncoding):
    """Rotary positions (RoFormer, arXiv:2104.09864). Holds the buffer `inv_freq` [R/2], fp32, as NeoX's files do.

    With a scaling `by_length` the buffer holds the frequencies of short sequences, and `divisors` (`rotary_divisors`)
    those from which the frequencies of a batch follow.
    """

    name = "rotary_emb"
    inv_freq: Tensor
    divisors: Tensor

    def __init__(
        self, architecture: Architecture, grid: ParallelGrid, device: torch.device | str | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.rotary_ndims = architecture.rotary_ndims
        self.base = architecture.rotary_base
        self.scaling = dict(architecture.rope_scaling)
        self.factor = rotary_factor(self.scaling)
        self.by_length = ROPE_SCALINGS[self.scaling.get("rope_type", "default")].by_length
        self.register_buffer("inv_freq", rotary_inv_freq(self.rotary_ndims, self.base, device, self.scaling))
        self.register_buffer("divisors", rotary_divisors(self.scaling, device), persistent=False)

    def reset(self) -> None:
        """Compute the buffers again, after a module made on the meta device got memory."""
        self.inv_freq.copy_(rotary_inv_freq(self.rotary_ndims, self.base, self.inv_freq.device, self.scaling))
        self.divisors.copy_(rotary_divisors(self.scaling))

    def tables(
        self,
        positions: Tensor,
        keys: int,
        dtype: torch.dtype,
        slots: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tables:
        """Return cosines and sines for positions [S] or [B, S]: [S, 1, 1, R] or [B, S, 1, 1, R]."""
        inv_freq = self.inv_freq
        if self.by_length:
            if lengths is None:
                lengths = torch.full((1,), keys, device=positions.device)
            inv_freq = rotary_inv_freq(
                self.rotary_ndims, self.base, positions.device, self.scaling, lengths, self.divisors
            )
        cos, sin = rotary_tables(inv_freq, positions, dtype, self.factor)
        return cos.unsqueeze(-2), sin.unsqueeze(-2)

    def forward(self, queries_keys: Tensor, tables: Tables) -> Tensor:
        """Rotate queries and keys side by side: [B, S, N, 2, D] -> the same shape."""
        return rotate(queries_keys, *tables)


class AlibiEmbedding(PositionEncoding):
    """Scores fall linearly with the distance (ALiBi, arXiv:2108.12409). Holds the buffer `slopes` [N], fp32.

    Distances are counted in the row; documents and padding do not change them.
    """

    name = "alibi_embed"
    slopes: Tensor

    def __init__(
        self, architecture: Architecture, grid: ParallelGrid, device: torch.device | str | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.heads = architecture.num_attention_heads
        self.grid = grid
        self.register_buffer("slopes", self._slopes_here(device))

    def _slopes_here(self, device: torch.device | str | None) -> Tensor:
        slopes = torch.tensor(alibi_slopes(self.heads), dtype=torch.float32, device=device)
        return slopes.chunk(self.grid.tp_size)[self.grid.tp_rank].clone()

    def reset(self) -> None:
        """Compute the buffer again, after a module made on the meta device got memory."""
        self.slopes.copy_(self._slopes_here(self.slopes.device))

    def tables(
        self,
        positions: Tensor,
        keys: int,
        dtype: torch.dtype,
        slots: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tables:
        """Return the bias [1, N, S, T] itself."""
        distance = _distances(positions, keys, slots)
        bias = self.slopes.float().view(1, -1, 1, 1) * -distance
        return (bias.masked_fill(distance < 0, -math.inf).to(dtype),)

    def score_bias(self, tables: Tables) -> Tensor:
        """Return the bias [1, N, S, T]."""
        return tables[0]


class RelativePositions(PositionEncoding):
    """A learned bias for each head and bucket of distances (T5, arXiv:1910.10683), times sqrt(D) as in gpt-neox.

    All blocks use one table, `weight` [buckets, N]. Each holds a copy, and training keeps them equal
    (`neox.model.share_parameters`).
    """

    name = "rpe"

    def __init__(
        self,
        architecture: Architecture,
        grid: ParallelGrid,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.buckets = architecture.rpe_buckets
        self.max_distance = architecture.rpe_max_distance
        self.scale = math.sqrt(architecture.head_dim)
        shape = (self.buckets, architecture.num_attention_heads // grid.tp_size)
        self.weight = mark_split(nn.Parameter(torch.empty(shape, device=device, dtype=dtype)), grid.tp_size > 1)

    def tables(
        self,
        positions: Tensor,
        keys: int,
        dtype: torch.dtype,
        slots: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tables:
        """Return each pair's bucket and whether its key is later, [S, T] each."""
        distance = _distances(positions, keys, slots)
        buckets = relative_buckets(distance.clamp(min=0), self.buckets, self.max_distance)
        return buckets, distance < 0

    def score_bias(self, tables: Tables) -> Tensor:
        """Return the bias [1, N, S, T]."""
        buckets, later = tables
        bias = F.embedding(buckets, self.weight * self.scale).permute(2, 0, 1)
        return bias.masked_fill(later, -math.inf).unsqueeze(0)


def _distances(positions: Tensor, keys: int, own: Tensor | None) -> Tensor:
    """Return how many tokens each key lies before each query in the row, [S, T]; negative for later keys."""
    slots = torch.arange(keys, device=positions.device)
    if own is None:
        own = slots[keys - positions.shape[-1] :]
    return own.unsqueeze(1) - slots


class LearnedPositions(nn.Module):
    """A trained vector for each position: `weight` [max_positions, H], whose first `learned_offset` rows are unused."""

    def __init__(
        self,
        architecture: Architecture,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.offset = architecture.learned_offset
        shape = (architecture.max_positions, architecture.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

    def forward(self, positions: Tensor) -> Tensor:
        """Look up positions [...] -> [..., H].

        Positions after the last row get its vector. They only occur in sequences that have ended, while others of the
        batch go on.
        """
        return F.embedding((positions + self.offset).clamp_(max=self.weight.shape[0] - 1), self.weight)


class SinusoidalPositions(nn.Module):
    """Sines and cosines of each position (arXiv:1706.03762); all sines come first, as in gpt-neox.

    Holds the buffer `inv_freq` [H/2], fp32.
    """

    inv_freq: Tensor

    def __init__(
        self,
        architecture: Architecture,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = architecture.hidden_size
        self.register_buffer("inv_freq", rotary_inv_freq(self.hidden_size, _SINUSOIDAL_BASE, device))

    def reset(self) -> None:
        """Compute the buffer again, after a module made on the meta device got memory."""
        self.inv_freq.copy_(rotary_inv_freq(self.hidden_size, _SINUSOIDAL_BASE, self.inv_freq.device))

    def forward(self, positions: Tensor) -> Tensor:
        """Compute positions [...] -> [..., H], fp32."""
        angles = positions.unsqueeze(-1) * self.inv_freq.float()
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


_SINUSOIDAL_BASE = 10_000.0


class Encoding(NamedTuple):
    """How positions of one name are computed.

    Attributes:
        attention: Constructor (architecture, grid, device=, dtype=) of the module in each block's attention.
        embedding: Constructor (architecture, device=, dtype=) of the module whose vectors are added to the tokens'.
    """

    attention: Callable[..., PositionEncoding] | None = None
    embedding: Callable[..., nn.Module] | None = None


POSITIONS: Mapping[str, Encoding] = MappingProxyType(
    {
        "rotary": Encoding(attention=RotaryEmbedding),
        "none": Encoding(),
        "learned": Encoding(embedding=LearnedPositions),
        "sinusoidal": Encoding(embedding=SinusoidalPositions),
        "rpe": Encoding(attention=RelativePositions),
        "alibi": Encoding(attention=AlibiEmbedding),
    }
)


def reset_buffers(layer: nn.Module) -> None:
    """Compute the buffers of a layer that was made on the meta device and got memory.

    Raises:
        TypeError: A module has buffers and cannot compute them again.
    """
    for module in layer.modules():
        reset = getattr(module, "reset", None)
        if reset is not None:
            reset()
        elif next(module.buffers(recurse=False), None) is not None:
            raise TypeError(f"{type(module).__name__} has buffers that nothing computes again")
