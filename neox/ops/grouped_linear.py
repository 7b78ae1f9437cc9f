"""Products of the tokens of each expert with its weights, and the orders of tokens before and after them.

Tokens are sorted by expert, so that each expert's tokens are neighbours. Experts without tokens cost nothing.

How many choices an expert's capacity drops is a number on the device, and shapes are known to the host. So there are as
many rows as choices may be kept, and those behind the last expert's are spare:

    | rows of expert 0 | rows of expert 1 | ... | rows of expert E-1 | spare |      R rows
                                                                      no expert computes them, and nobody reads them

Legend: T tokens, K experts of a token, R rows (choices of an expert by a token, and spare ones), E experts, H hidden,
I input features, O output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neox.architecture import FP8_MULTIPLE
from neox.ops.fast_paths import has_fast_path
from neox.ops.fp8 import E4M3, Fp8Recipe, fp8_scale, scaled_grouped_product, to_fp8
from neox.ops.linear import Product, linear
from neox.ops.routing import tokens_per_expert

_ALIGNMENT = 8
"""Features of bf16 that `torch._grouped_mm` needs a multiple of (16 bytes)."""


@dataclass(frozen=True)
class ExpertOrder:
    """The order of rows that puts the tokens of each expert one after another.

    Attributes:
        choice_of_row: The choice, of T x K, that each row computes [R]; any for spare rows.
        row_of_choice: The row of each choice [T x K]; R for those without a row.
        rows_per_expert: Number of rows of each expert [E].
        top_k: Number of choices of a token K.
        is_exact: Whether each choice has a row, and none is spare.
    """

    choice_of_row: Tensor
    row_of_choice: Tensor
    rows_per_expert: Tensor
    top_k: int
    is_exact: bool

    @property
    def token_of_row(self) -> Tensor:
        """Token of each row [R]."""
        return self.choice_of_row // self.top_k

    @property
    def has_row(self) -> Tensor:
        """Whether each choice has a row [T, K]."""
        return (self.row_of_choice < self.choice_of_row.numel()).unflatten(0, (-1, self.top_k))


def sort_by_expert(
    experts: Tensor, num_experts: int, capacity: int | None = None, computed: Tensor | None = None
) -> ExpertOrder:
    """Sort the choices of experts; an expert's tokens keep their order.

    Args:
        experts: Experts of each token [..., K], of T tokens in all.
        num_experts: Number of experts E.
        capacity: Largest number of tokens of one expert. Later ones are dropped. None for no limit.
        computed: Which choices experts compute, bool [..., K], or [..., 1] if they compute all or none of a token's;
            all if None. No expert computes padding.
    """
    # What is not computed chooses expert E, one more than there are. It comes last and has no rows.
    if computed is not None:
        experts = experts.masked_fill(~computed, num_experts)
    experts = experts.flatten(0, -2)  # [T, K]
    expert_of_choice = experts.flatten()  # [T x K]
    choices = expert_of_choice.numel()
    counts = tokens_per_expert(experts, num_experts + 1)
    by_expert = expert_of_choice.argsort(stable=True)  # all choices, also those without a row
    number = torch.arange(choices, device=experts.device)
    row_of_choice = torch.empty_like(by_expert)
    if capacity is None and computed is None:
        row_of_choice[by_expert] = number
        return ExpertOrder(by_expert, row_of_choice, counts[:num_experts], experts.shape[1], is_exact=True)

    expert_of_sorted = expert_of_choice[by_expert]
    is_kept = expert_of_sorted < num_experts
    rows = choices
    if capacity is not None:
        first = counts.cumsum(0) - counts  # [E + 1]
        is_kept &= number - first[expert_of_sorted] < capacity
        counts = counts.clamp(max=capacity)
        rows = min(choices, num_experts * capacity)
    # Kept choices move up in their order; the row behind the last one stands for none.
    row_of_sorted = (is_kept.cumsum(0) - 1).masked_fill_(~is_kept, rows)
    row_of_choice[by_expert] = row_of_sorted
    choice_of_row = by_expert.new_zeros(rows + 1)
    choice_of_row[row_of_sorted] = by_expert
    return ExpertOrder(choice_of_row[:rows], row_of_choice, counts[:num_experts], experts.shape[1], is_exact=False)


def gather_rows(x: Tensor, order: ExpertOrder) -> Tensor:
    """Copy each token to the rows of its experts: [T, H] -> [R, H]."""
    rows: Tensor = _GatherRows.apply(x, order)
    return rows


def combine_rows(rows: Tensor, weights: Tensor, order: ExpertOrder) -> Tensor:
    """Add up the outputs of each token's experts, weighted: [R, H] and weights [T, K] -> [T, H].

    Choices without a row add nothing.
    """
    total: Tensor = _CombineRows.apply(rows, weights.to(rows.dtype), order)
    return total


def _by_choice(rows: Tensor, order: ExpertOrder) -> Tensor:
    """Return rows [R, H] in the order of the choices [T, K, H], with zeros for those without a row."""
    if not order.is_exact:
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return rows[order.row_of_choice].unflatten(0, (-1, order.top_k))


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: ExpertOrder) -> Tensor:
        ctx.order = order
        return x[order.token_of_row]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _by_choice(grad, ctx.order).sum(1), None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: ExpertOrder) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(rows, weights)
        return torch.bmm(weights.unsqueeze(1), _by_choice(rows, order)).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weights = ctx.saved_tensors
        order = ctx.order
        grad_rows = grad[order.token_of_row] * weights.flatten()[order.choice_of_row].unsqueeze(1)
        grad_weights = torch.bmm(_by_choice(rows, order), grad.unsqueeze(2)).squeeze(2)
        return grad_rows, grad_weights, None


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor, fp8: Fp8Recipe | None = None) -> Tensor:
    """Multiply the rows of each expert with its weight: rows [R, I], weight [E, O, I] -> [R, O].

    Args:
        rows: Inputs, sorted by expert. Results of rows beyond those of the experts, and their gradients, mean nothing.
        weight: Weights of the experts.
        counts: Number of rows of each expert [E].
        fp8: How operands become fp8 if gradients are recorded; evaluations stay bf16. None for products in bf16.
    """
    result: Tensor
    if fp8 is not None and torch.is_grad_enabled():
        if has_fast_path("scaled_grouped_product", rows.device) and len(rows):
            result = _ScaledGroupedProduct.apply(rows, weight, counts)
        else:
            result = _LoopedProduct.apply(rows, weight, counts.tolist(), fp8.product, fp8.of_gradient)
    elif _has_grouped_product(rows, weight):
        result = _GroupedProduct.apply(rows, weight, counts)
    else:
        result = _LoopedProduct.apply(rows, weight, counts.tolist(), linear, linear)
    return result


def _has_grouped_product(rows: Tensor, weight: Tensor) -> bool:
    """Return whether one kernel of the device multiplies all groups."""
    is_aligned = weight.shape[1] % _ALIGNMENT == 0 and weight.shape[2] % _ALIGNMENT == 0
    return has_fast_path("grouped_product", rows.device) and rows.dtype == torch.bfloat16 and is_aligned


class _LoopedProduct(torch.autograd.Function):
    """One product for each expert that has rows.

    `product` multiplies inputs and weights; `of_gradient` multiplies the gradient of the output and one of these.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, counts: list[int], product: Product, of_gradient: Product
    ) -> Tensor:
        ctx.counts = counts
        ctx.of_gradient = of_gradient
        ctx.save_for_backward(rows, weight)
        result = rows.new_empty(rows.shape[0], weight.shape[1])
        result[sum(counts) :] = 0.0
        for expert, part in _parts(counts):
            result[part] = product(rows[part], weight[expert], None)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = None
        grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = torch.empty_like(rows)
            grad_rows[sum(ctx.counts) :] = 0.0
            for expert, part in _parts(ctx.counts):
                grad_rows[part] = ctx.of_gradient(grad[part], weight[expert].t(), None)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight)
            for expert, count in enumerate(ctx.counts):
                if count == 0:
                    grad_weight[expert] = 0.0
            for expert, part in _parts(ctx.counts):
                grad_weight[expert] = ctx.of_gradient(grad[part].t(), rows[part].t(), None)
        return grad_rows, grad_weight, None, None, None


def _parts(counts: list[int]) -> list[tuple[int, slice]]:
    """Return the number of each expert that has rows, and the range of these."""
    parts = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            parts.append((expert, slice(start, start + count)))
        start += count
    return parts


class _GroupedProduct(torch.autograd.Function):
    """All products in one kernel, without a wait of the host for the numbers of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        ctx.save_for_backward(rows, weight, ends, counts)
        return torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, ends, counts = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = None
        grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = torch._grouped_mm(grad, weight, offs=ends)
        if ctx.needs_input_grad[1]:
            grad_weight = torch._grouped_mm(grad.t(), rows, offs=ends)  # [E, O, I]
            # On Blackwell the kernel leaves what was in memory for an expert without rows (pytorch#172439).
            grad_weight.masked_fill_((counts == 0).view(-1, 1, 1), 0.0)
        return grad_rows, grad_weight, None


class _ScaledGroupedProduct(torch.autograd.Function):
    """All products in fp8 in one kernel, of operands in e4m3. The numbers of a sum share a scale.

    product              left                          right                       scales
    output   [R, O]      rows [R, I]                   weights [E, O, I]           of a row; of an output, [E, O]
    of rows  [R, I]      gradients [R, O]              weights [E, I, O]           of a row; of an input, [E, I]
    of weights           gradients of an expert's      rows of the expert          of an output in the expert, [E, O];
      [E, O, I]            rows [O, R']                  [I, R']                     of an input in it, [E, I]

    So the products are those that `_LoopedProduct` has with a recipe of scales for rows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        return _scaled_rows(rows, weight, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, counts = ctx.saved_tensors
        grad_rows = None
        grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = _scaled_rows(grad, weight.transpose(1, 2), counts)
        if ctx.needs_input_grad[1]:
            filled = _FilledRows.of(counts, len(rows))
            left, left_scale = filled.to_fp8(grad)  # [O, R'], [E, O]
            right, right_scale = filled.to_fp8(rows)  # [I, R'], [E, I]
            scales = (left_scale.flatten(), right_scale.flatten())
            grad_weight = scaled_grouped_product(left, right.t(), *scales, filled.ends)  # [E, O, I]
            # The kernel leaves what was in memory for an expert without rows.
            grad_weight.masked_fill_((counts == 0).view(-1, 1, 1), 0.0)
        return grad_rows, grad_weight, None


def _scaled_rows(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return the product of each expert's rows [R, K] with its weight [E, N, K], any strides -> [R, N]."""
    row_scale = fp8_scale(rows.abs().amax(1), E4M3)  # [R]
    weight_scale = fp8_scale(weight.abs().amax(2), E4M3)  # [E, N]
    left = to_fp8(rows, row_scale.unsqueeze(1), E4M3)
    right = to_fp8(weight, weight_scale.unsqueeze(2), E4M3)
    ends = counts.cumsum(0).to(torch.int32)
    return scaled_grouped_product(left, right.transpose(1, 2), row_scale, weight_scale, ends)


@dataclass(frozen=True)
class _FilledRows:
    """Rows of each expert with zeros after them, up to a multiple of 16, for sums over an expert's rows.

        rows      aaabbbbbbbb...            each sum begins at 16 bytes, which the kernel needs
        filled    aaa0000000000000bbbb...   R' = R + 15 E, rounded up: the host does not know where the last one ends

    Attributes:
        place: Place of each row [R].
        expert_of_block: Expert of each block of 16 rows [R' / 16]; E after the last expert's.
        blocks: Number of blocks of each expert, and of those after the last one's [E + 1].
        ends: End of each expert's rows with its zeros [E], int32.
    """

    place: Tensor
    expert_of_block: Tensor
    blocks: Tensor
    ends: Tensor

    @staticmethod
    def of(counts: Tensor, rows: int) -> _FilledRows:
        """Lay out `rows` rows, of which each expert has some [E]; those of none come last."""
        experts = len(counts)
        number = -(-(rows + (FP8_MULTIPLE - 1) * experts) // FP8_MULTIPLE)
        blocks = (counts + FP8_MULTIPLE - 1) // FP8_MULTIPLE
        blocks = torch.cat([blocks, number - blocks.sum(0, keepdim=True)])
        counts = torch.cat([counts, rows - counts.sum(0, keepdim=True)])
        ends = blocks.cumsum(0) * FP8_MULTIPLE
        shift = ends - blocks * FP8_MULTIPLE - (counts.cumsum(0) - counts)  # [E + 1]
        place = torch.arange(rows, device=counts.device) + shift.repeat_interleave(counts, output_size=rows)
        numbers = torch.arange(experts + 1, device=counts.device)
        expert_of_block = numbers.repeat_interleave(blocks, output_size=number)
        return _FilledRows(place, expert_of_block, blocks, ends[:-1].to(torch.int32))

    def to_fp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows [R, N] in e4m3 with an expert's rows next to each other, [N, R'], and their scales [E, N]."""
        filled = x.new_zeros(len(self.expert_of_block) * FP8_MULTIPLE, x.shape[1])
        blocks = filled.index_copy_(0, self.place, x).unflatten(0, (-1, FP8_MULTIPLE))  # [R' / 16, 16, N]
        largest = torch.segment_reduce(blocks.abs().amax(1), "max", lengths=self.blocks, axis=0, unsafe=True)
        scale = fp8_scale(largest, E4M3)  # [E + 1, N]; an expert without rows has the smallest
        of_block = scale[self.expert_of_block].unsqueeze(1)
        return to_fp8(blocks, of_block, E4M3).flatten(0, 1).t().contiguous(), scale[:-1]
