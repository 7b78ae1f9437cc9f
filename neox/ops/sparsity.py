"""Masks of block-sparse attention.

A layout says which blocks of keys each block of queries sees. It depends only on the pattern and the position, not on
the length of the sequence. The last, incomplete window of `sparse_fixed` is the exception: there the layout is that of
the longest sequence.

Legend: N heads here, C blocks.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from neox.ops.visible_pairs import PairRule


def block_layout(kind: str, settings: Mapping[str, Any], *, blocks: int, heads: Sequence[int], layer: int) -> Tensor:
    """Return which blocks see each other: bool [N, C, C], or [1, C, C] if all heads have one layout; causal.

    Args:
        kind: `local`, `sparse_fixed`, `sparse_variable`, `bigbird` or `bslongformer`.
        settings: All settings of the pattern.
        blocks: Number of blocks C.
        heads: Numbers of this rank's heads among those of all tensor ranks.
        layer: Number of the layer, which random blocks depend on.
    """
    rows = torch.arange(blocks).unsqueeze(1)
    columns = torch.arange(blocks)
    own_layouts = settings.get("different_layout_per_head", False)
    own_layouts &= settings.get("num_random_blocks", 0) > 0 or settings.get("num_different_global_patterns", 1) > 1
    layouts = []
    for head in heads if own_layouts else [0]:
        if kind == "sparse_fixed":
            seen = rows // settings["num_local_blocks"] == columns // settings["num_local_blocks"]
            seen |= _fixed_global(settings, blocks, head)
        elif kind == "sparse_variable":
            window = _windows(settings["local_window_blocks"], blocks)
            seen = (window.unsqueeze(1) == window) | _global(settings, blocks)
        else:
            key = "num_local_blocks" if kind == "local" else "num_sliding_window_blocks"
            seen = rows - columns <= settings[key] // 2
        if kind == "bigbird":
            seen = _with_global(seen, columns < settings["num_global_blocks"])
        elif kind == "bslongformer":
            seen = _with_global(seen, _global(settings, blocks))
        layouts.append((seen | _random(settings, blocks, layer, head)).tril())
    return torch.stack(layouts)


def _with_global(seen: Tensor, everywhere: Tensor) -> Tensor:
    """Return a layout [C, C] to which blocks [C] are added that see all blocks and are seen by all."""
    return seen | everywhere | everywhere.unsqueeze(1)


def _fixed_global(settings: Mapping[str, Any], blocks: int, head: int) -> Tensor:
    """Return the blocks [C] that represent their windows, which all later blocks see."""
    window = settings["num_local_blocks"]
    width = settings["num_global_blocks"]
    first = window - (1 + head % settings["num_different_global_patterns"]) * width
    columns = torch.arange(blocks)
    whole = blocks // window * window
    chosen = (columns < whole) & (columns % window >= first) & (columns % window < first + width)
    if whole < blocks:  # the last window is shorter
        start = max(0, min(whole + first, blocks - width))
        chosen[start : start + width] = True
    return chosen


def _windows(sizes: Sequence[int], blocks: int) -> Tensor:
    """Return the number of each block's window [C]; the last size is repeated."""
    repeated = [*sizes, *[sizes[-1]] * (blocks // sizes[-1] + 1)]
    ends = torch.tensor(list(accumulate(repeated)))
    return torch.bucketize(torch.arange(blocks), ends, right=True)


def _global(settings: Mapping[str, Any], blocks: int) -> Tensor:
    """Return the blocks [C] that are given by number or by ranges."""
    starts = settings["global_block_indices"]
    ends = settings["global_block_end_indices"] or [start + 1 for start in starts]
    chosen = torch.zeros(blocks, dtype=torch.bool)
    for start, end in zip(starts, ends, strict=True):
        chosen[start:end] = True
    return chosen


def _random(settings: Mapping[str, Any], blocks: int, layer: int, head: int) -> Tensor:
    """Return blocks [C, C] that are drawn for each block of queries among itself and earlier ones."""
    chosen = torch.zeros(blocks, blocks, dtype=torch.bool)
    number = settings.get("num_random_blocks", 0)
    if number == 0:
        return chosen
    for row in range(blocks):
        generator = random.Random(f"{settings['random_seed']} {layer} {head} {row}")
        chosen[row, generator.sample(range(row + 1), min(number, row + 1))] = True
    return chosen


def sparse_rule(layout: Tensor, block: int) -> PairRule:
    """Return the rule of a layout: which pairs of positions, with the key not later, it allows for each head.

    Args:
        layout: Blocks that see each other, bool [N or 1, C, C].
        block: Number of tokens in a block.
    """

    def allows(queries: Tensor, keys: Tensor, heads: Tensor) -> Tensor:
        return layout[heads, queries // block, keys // block] & (keys <= queries)

    return allows
