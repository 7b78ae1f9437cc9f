"""Attention by blocks of queries against dense masks: numbers, gradients, and what it never computes or keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from neox.architecture.sparsity import SPARSITY, settings_of, sparsity_of
from neox.ops import VisiblePairs, block_layout, core_attention, sparse_rule, window_rule
from neox.ops.blocked_attention import blocked_attention

LENGTH = 200
CPU = torch.device("cpu")


def starts(*lengths: int) -> Tensor:
    """Starts of documents of these lengths, for each token of a row."""
    firsts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return firsts.repeat_interleave(torch.tensor(lengths))


def described(kind: str) -> VisiblePairs:
    """Pairs of one kind in two rows of `LENGTH` tokens."""
    documents = torch.stack([starts(1, 70, 9, 120), starts(128, 72)])
    window = window_rule(33)
    if kind == "all":
        return VisiblePairs(LENGTH, CPU)
    if kind == "window":
        return VisiblePairs(LENGTH, CPU, rule=window, reach=33)
    if kind == "documents":
        return VisiblePairs(LENGTH, CPU, documents)
    if kind == "window in documents":
        return VisiblePairs(LENGTH, CPU, documents, window, 33)
    settings = settings_of(kind, sparsity_of({kind}, {"block": 8, "different_layout_per_head": True}))
    layout = block_layout(kind, settings, blocks=25, heads=range(4), layer=0)
    return VisiblePairs(LENGTH, CPU, documents, sparse_rule(layout, 8), rule_heads=layout.shape[0])


KINDS = ("all", "window", "documents", "window in documents", *SPARSITY)


def inputs(kv_heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, LENGTH, heads, 16) for heads in (4, kv_heads, kv_heads)]
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_give_the_numbers_and_gradients_of_the_dense_mask(kind: str) -> None:
    pairs = described(kind)
    kv_heads = 4 if kind == "window" else 2
    results = []
    for tensors, impl in ((inputs(kv_heads), "flash"), (inputs(kv_heads, torch.float64), "eager")):
        out = core_attention(*tensors, impl=impl, scale=0.3, softmax_scale=1.5, pairs=pairs)
        (out * torch.arange(LENGTH).view(1, -1, 1, 1)).sum().backward()
        results.append([out, *(x.grad for x in tensors)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(
            ours.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().mean())
        )


@pytest.mark.parametrize("kind", ["all", "window in documents", "bigbird"])
def test_a_part_of_the_queries_gets_its_rows_of_the_result(kind: str) -> None:
    pairs = described(kind)
    q, k, v = (x.detach().transpose(1, 2) for x in inputs(2))
    whole = blocked_attention(q, k, v, pairs, 0.25)
    part = blocked_attention(q[:, :, 90:171], k, v, pairs, 0.25, queries=[range(90, 171)])
    torch.testing.assert_close(part, whole[:, :, 90:171])


@pytest.mark.parametrize("kind", ["all", "window in documents", "bigbird"])
def test_dropout_drops_visible_weights_alike_in_both_passes(kind: str) -> None:
    """The output is linear in the values, so its gradient by them is the matrix of dropped weights of this pass."""
    pairs = described(kind)
    q, k, _ = (x.detach().transpose(1, 2) for x in inputs(4))
    values = torch.eye(LENGTH).expand(2, 4, LENGTH, LENGTH).clone().requires_grad_()
    torch.manual_seed(1)
    weights = blocked_attention(q, k, values, pairs, 0.25, dropout_p=0.5)
    seen = pairs.dense().expand(2, 4, LENGTH, LENGTH)
    assert not weights[~seen].any()
    assert 0.45 < float((weights[seen] == 0).float().mean()) < 0.55
    direction = torch.randn_like(weights)
    weights.backward(direction)
    torch.testing.assert_close(values.grad, weights.detach().transpose(-1, -2) @ direction)


def test_gradients_of_queries_and_keys_follow_dropped_weights() -> None:
    """Slopes of the output along random directions, by differences in fp64."""
    pairs = described("window in documents")
    q, k, v = (x.detach().transpose(1, 2).double() for x in inputs(2))

    def total(q: Tensor, k: Tensor) -> Tensor:
        torch.manual_seed(2)
        return (blocked_attention(q, k, v, pairs, 0.25, dropout_p=0.3) * torch.arange(16.0)).sum()

    leaves = [q.requires_grad_(), k.requires_grad_()]
    total(*leaves).backward()
    directions = [torch.randn_like(leaf) for leaf in leaves]
    with torch.no_grad():
        ahead = total(*(leaf + 1e-5 * direction for leaf, direction in zip(leaves, directions, strict=True)))
        behind = total(*(leaf - 1e-5 * direction for leaf, direction in zip(leaves, directions, strict=True)))
    expected = sum(float((leaf.grad * direction).sum()) for leaf, direction in zip(leaves, directions, strict=True))
    assert float(ahead - behind) / 2e-5 == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["documents", "window in documents", "bigbird"])
def test_another_token_of_one_document_changes_no_bit_of_the_next(kind: str) -> None:
    pairs = described(kind)
    q, k, v = inputs(2)
    before = core_attention(q, k, v, impl="flash", pairs=pairs)
    changed = [x.detach().clone() for x in (q, k, v)]
    for x in changed:
        x[0, 75] += 100.0  # in the third document of the first row, whose fourth begins at 80
    after = core_attention(*changed, impl="flash", pairs=pairs)
    assert torch.equal(after[0, 80:], before[0, 80:])
    assert torch.equal(after[0, :71], before[0, :71])
    assert torch.equal(after[1], before[1])
    assert not torch.equal(after[0, 75:80], before[0, 75:80])


class _Largest(TorchDispatchMode):
    """Remembers the most elements that one query of a result has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("kind", ["window", "documents", "window in documents"])
def test_no_tensor_has_all_pairs(kind: str) -> None:
    pairs = described(kind)
    tensors = [torch.randn(2, LENGTH, 1, 8, requires_grad=True) for _ in range(3)]
    with _Largest() as largest:
        core_attention(*tensors, impl="flash", pairs=pairs).sum().backward()
    assert largest.elements < LENGTH * LENGTH
