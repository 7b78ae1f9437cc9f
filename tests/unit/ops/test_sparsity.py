"""Layouts of block-sparse attention against a definition block by block, and their independence of length and rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neox.architecture.sparsity import SPARSITY, settings_of, sparsity_of, sparsity_problem
from neox.ops.sparsity import block_layout, sparse_rule


def _full(kind: str, **given: Any) -> dict[str, Any]:
    return settings_of(kind, sparsity_of({kind}, given))


def _sees(kind: str, s: dict[str, Any], n: int, head: int, row: int, column: int) -> bool:
    """Whether a block of queries sees a block of keys, as DeepSpeed's unidirectional layouts are defined."""
    if column > row:
        return False
    if kind == "local":
        return column >= row - s["num_local_blocks"] // 2
    if kind == "sparse_fixed":
        window, width = s["num_local_blocks"], s["num_global_blocks"]
        if row // window == column // window:
            return True
        first = window - (1 + head % s["num_different_global_patterns"]) * width
        whole = n - n % window
        starts = list(range(first, whole, window))
        if whole < n:
            starts.append(min(whole + first, n - width))
        return any(start <= column < start + width for start in starts)
    if kind == "sparse_variable":
        edges, sizes = [0], list(s["local_window_blocks"])
        while edges[-1] <= row:
            edges.append(edges[-1] + (sizes.pop(0) if len(sizes) > 1 else sizes[0]))
        if column >= edges[-2]:
            return True
    elif column >= row - s["num_sliding_window_blocks"] // 2:
        return True
    if kind == "bigbird":
        return min(row, column) < s["num_global_blocks"]
    ends = s["global_block_end_indices"] or [i + 1 for i in s["global_block_indices"]]
    ranges = list(zip(s["global_block_indices"], ends, strict=True))
    where = (column,) if kind == "sparse_variable" else (row, column)
    return any(a <= block < b for a, b in ranges for block in where)


GIVEN = st.fixed_dictionaries(
    {
        "num_local_blocks": st.sampled_from([2, 4, 6]),
        "num_global_blocks": st.sampled_from([1, 2]),
        "num_different_global_patterns": st.sampled_from([1, 2]),
        "different_layout_per_head": st.booleans(),
        "num_random_blocks": st.just(0),
        "local_window_blocks": st.lists(st.integers(1, 4), min_size=1, max_size=3),
        "global_block_indices": st.lists(st.integers(0, 12), min_size=0, max_size=3),
        "num_sliding_window_blocks": st.integers(1, 6),
    }
)


@pytest.mark.parametrize("kind", SPARSITY)
@settings(max_examples=25)
@given(given=GIVEN, blocks=st.integers(2, 13))
def test_layouts_equal_the_definition(kind: str, given: dict[str, Any], blocks: int) -> None:
    s = _full(kind, **given)
    if sparsity_problem(kind, s) or blocks < s.get("num_global_blocks", 0):
        return
    layout = block_layout(kind, s, blocks=blocks, heads=range(3), layer=0)
    for head in range(3):
        here = layout[head if len(layout) > 1 else 0]
        pattern = head if s.get("different_layout_per_head") else 0
        expected = [[_sees(kind, s, blocks, pattern, i, j) for j in range(blocks)] for i in range(blocks)]
        assert here.tolist() == expected


@pytest.mark.parametrize("kind", ["sparse_variable", "bigbird"])
def test_random_blocks_depend_on_seed_layer_and_head_alone(kind: str) -> None:
    s = _full(kind, num_random_blocks=2, different_layout_per_head=True, local_window_blocks=[1])
    whole = block_layout(kind, s, blocks=24, heads=range(4), layer=1)
    assert torch.equal(whole[2:], block_layout(kind, s, blocks=24, heads=[2, 3], layer=1))
    assert torch.equal(whole[:, :9, :9], block_layout(kind, s, blocks=9, heads=range(4), layer=1))
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole, block_layout(kind, s, blocks=24, heads=range(4), layer=2))
    assert not torch.equal(whole, block_layout(kind, {**s, "random_seed": 1}, blocks=24, heads=range(4), layer=1))
    assert (whole.sum(-1) >= torch.tensor([min(2, row + 1) for row in range(24)])).all()


def test_pairs_follow_positions_of_padded_rows() -> None:
    s = _full("local", block=2, num_local_blocks=2)
    rule = sparse_rule(block_layout("local", s, blocks=4, heads=[0], layer=0), 2)
    head = torch.tensor(0)
    plain = rule(torch.arange(6).unsqueeze(1), torch.arange(6), head)
    assert plain[4].tolist() == [False, False, True, True, True, False]
    padded = torch.tensor([0, 0, 0, 1, 2, 3])
    shifted = rule(padded.unsqueeze(1), padded, head)
    assert torch.equal(shifted[2:, 2:], plain[:4, :4])


def test_settings_that_contradict_each_other_are_named() -> None:
    assert "num_global_blocks" in str(sparsity_problem("sparse_fixed", _full("sparse_fixed", num_global_blocks=3)))
    assert "different_layout" in str(
        sparsity_problem("sparse_fixed", _full("sparse_fixed", num_different_global_patterns=2))
    )
    ends = _full("bslongformer", global_block_indices=[1, 4], global_block_end_indices=[2, 4])
    assert "global_block_end_indices" in str(sparsity_problem("bslongformer", ends))
    ends = _full("bslongformer", global_block_indices=[1, 4], global_block_end_indices=[2])
    assert sparsity_problem("bslongformer", ends)
