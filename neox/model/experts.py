"""Mixture of experts in place of a block's MLP: each token is computed by some experts, which a router chooses.

Every tensor rank routes all tokens and holds a part of each expert's inner features, as of a dense MLP. The sum over
tensor ranks comes after the experts. So routes and losses do not depend on the number of tensor ranks.

With `expert_model_parallel_size` data ranks hold different experts, and tokens travel to them (`Exchange`).

Legend: B batch, S sequence, H hidden, E experts, K experts of a token, T tensor ranks, P ranks that divide experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from neox.architecture import ACTIVATIONS as ACTIVATION_SPECS
from neox.architecture import BALANCE_LOSS, DROPPED, LARGEST_SHARE, Z_LOSS, Architecture
from neox.model.context import Aux, BlockContext
from neox.model.mlp import MLP
from neox.ops import (
    ACTIVATIONS,
    ExpertOrder,
    Routes,
    balance_loss,
    from_experts,
    grouped_linear,
    linear,
    route,
    sort_by_expert,
    to_experts,
    tokens_per_expert,
    z_loss,
)
from neox.parallel import (
    Exchange,
    ParallelGrid,
    Summand,
    TensorOptions,
    TokenShares,
    copy_to_tensor_ranks,
    gather_tokens,
    mark_divided_experts,
    mark_split,
    reduce_over_tensor_ranks,
    reduce_scatter_tokens,
    shard_size,
)


class Router(nn.Module):
    """Scores of experts in fp32, whatever the precision of training.

    Args:
        network: The network.
        **options: Device and type of the weight.

    Attributes:
        bias: Bias of each expert's logit [E]; None without biases.
        selection_bias: Number of each expert that is added to its scores for the choice; None for none.
        counts: Tokens of each expert since the last update of the bias [E]; None without a bias.
    """

    counts: Tensor | None

    def __init__(self, network: Architecture, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.network = network
        self.weight = nn.Parameter(torch.empty(network.num_experts, network.hidden_size, **options))
        self.bias: nn.Parameter | None = None
        if network.router_logit_bias:
            self.bias = nn.Parameter(torch.empty(network.num_experts, **options))
        self.selection_bias: nn.Parameter | None = None
        counts = None
        if network.router_bias:
            bias = torch.empty(network.num_experts, device=options.get("device"), dtype=torch.float32)
            self.selection_bias = nn.Parameter(bias, requires_grad=False)
            counts = torch.zeros(network.num_experts, device=options.get("device"), dtype=torch.int64)
        self.register_buffer("counts", counts, persistent=False)

    def reset(self) -> None:
        """Start to count anew."""
        if self.counts is not None:
            self.counts.zero_()

    def forward(self, x: Tensor, experts: Tensor | None, is_text: Tensor | None = None) -> tuple[Tensor, Routes]:
        """Return logits [B, S, E] and routes of tokens [B, S, H].

        Args:
            x: Hidden states [B, S, H].
            experts: Experts of the tokens if they were chosen before [B, S, K].
            is_text: Which tokens are not padding, bool [B, S]; all if None.
        """
        x = x.float()
        jitter = self.network.router_jitter
        if self.training and jitter:
            x = x * torch.empty_like(x).uniform_(1.0 - jitter, 1.0 + jitter)
        logits = linear(x, self.weight.float())
        if self.bias is not None:
            logits = logits + self.bias.float()
        routes = route(
            logits,
            self.network,
            bias=self.selection_bias,
            training=self.training,
            experts=experts,
            is_text=is_text,
        )
        is_first_pass = experts is None
        if self.counts is not None and self.training and is_first_pass:
            self.counts += _text_per_expert(routes, self.network.num_experts, is_text)
        return logits, routes


class GroupedLinear(nn.Module):
    """Linear layer of each expert on this rank: weight [E/P, O, I], bias [E/P, O]. Sorted rows [R, I] -> [R, O].

    Args:
        experts: Number of experts E over all ranks that divide them.
        outputs: Output features on this tensor rank.
        inputs: Input features on this tensor rank.
        grid: Process groups.
        bias: Whether to add a bias.
        is_summand: Whether the results of tensor ranks are added up. Then each rank holds the whole bias and adds 1/T
            of it.
        **options: Device and type of the weight.
    """

    def __init__(
        self,
        experts: int,
        outputs: int,
        inputs: int,
        grid: ParallelGrid,
        *,
        bias: bool,
        is_summand: bool,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        here = shard_size(experts, grid.ep_size, "number of experts")
        weight = nn.Parameter(torch.empty(here, outputs, inputs, **options))
        self.weight = mark_divided_experts(mark_split(weight, grid.tp_size > 1), grid)
        self.grid = grid
        self.is_summand = is_summand
        self.bias: nn.Parameter | None = None
        if bias:
            biases = nn.Parameter(torch.empty(here, outputs, **options))
            self.bias = mark_divided_experts(mark_split(biases, grid.tp_size > 1 and not is_summand), grid)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Multiply; `counts` [E] is the number of rows of each expert."""
        product = grouped_linear(rows, self.weight, counts)
        if self.bias is None:
            return product
        bias: Tensor = self.bias
        if self.is_summand and self.grid.tp_size > 1:
            bias = copy_to_tensor_ranks(bias, self.grid) / self.grid.tp_size
        return product + bias.to(product.dtype).repeat_interleave(counts, dim=0, output_size=len(rows))


class Experts(nn.Module):
    """The experts: two linear layers with an activation in between. Inner features are split over tensor ranks.

    Args:
        network: The network.
        grid: Process groups.
        **options: Device and type of the parameters.
    """

    def __init__(self, network: Architecture, grid: ParallelGrid, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        number = network.num_experts
        hidden = network.hidden_size
        width = shard_size(network.expert_width, grid.tp_size, "inner width of an expert")
        factor = ACTIVATION_SPECS[network.activation].width_factor
        self.grid = grid
        self.activation = ACTIVATIONS[network.activation]
        bias = network.expert_bias
        self.dense_h_to_4h = GroupedLinear(number, factor * width, hidden, grid, bias=bias, is_summand=False, **options)
        self.dense_4h_to_h = GroupedLinear(number, hidden, width, grid, bias=bias, is_summand=True, **options)

    def forward(self, x: Tensor, weights: Tensor, order: ExpertOrder) -> Tensor:
        """Return this tensor rank's summand of the experts' weighted outputs [N, H].

        Args:
            x: Tokens [N, H].
            weights: Factors of the outputs [N, K].
            order: Order of the rows of experts.
        """
        rows = to_experts(x, order)
        if self.grid.ep_size == 1:
            return from_experts(self._outputs(rows, order.counts), weights, order)
        exchange = Exchange.plan(order.counts, self.grid)
        outputs = self._outputs(exchange.to_experts(rows), exchange.counts)
        return from_experts(exchange.from_experts(outputs), weights, order)

    def _outputs(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the output of each row's expert [R, H] for rows [R, H] that are sorted by expert."""
        inner = self.activation(self.dense_h_to_4h(rows, counts))
        outputs: Tensor = self.dense_4h_to_h(inner, counts)
        return outputs


class ExpertMLP(TokenShares):
    """A router, its experts, and a shared expert that computes every token.

    Args:
        network: The network.
        number: Number of the block, from 0.
        grid: Process groups.
        **options: Device and type of the parameters.
    """

    def __init__(
        self, network: Architecture, number: int, grid: ParallelGrid, **options: Unpack[TensorOptions]
    ) -> None:
        super().__init__()
        self.grid = grid
        self.network = network
        self.number = number
        self.router = Router(network, **options)
        self.experts = Experts(network, grid, **options)
        self.shared_expert: MLP | None = None
        self.shared_expert_gate: nn.Linear | None = None
        if network.shared_expert_width:
            dense = replace(network, mlp_width=network.shared_expert_width, mlp_bias=False)
            self.shared_expert = MLP(dense, number, grid, **options)
        if network.shared_expert_gate:
            self.shared_expert_gate = nn.Linear(network.hidden_size, 1, bias=False, **options)

    def forward(self, x: Tensor, context: BlockContext) -> tuple[Tensor, Aux]:
        """Return the output [B, S, H] for x [B, S, H], and what the experts report.

        With sequence parallelism x and the output are this rank's share of the tokens.
        """
        partial, aux = self._partial(x, context)
        if self.shares > 1:
            return reduce_scatter_tokens(partial, self.grid), aux
        return reduce_over_tensor_ranks(partial, self.grid), aux

    def summand(self, x: Tensor, context: BlockContext) -> tuple[Summand, Aux]:
        """Return what `forward` does, before the sum over tensor ranks."""
        partial, aux = self._partial(x, context)
        return Summand(partial, None), aux

    # The number of rows of each expert is known on the host only. torch.compiler.disable imports the compiler at once.
    @_disable_dynamo
    def _partial(self, x: Tensor, context: BlockContext) -> tuple[Tensor, Aux]:
        """Return this tensor rank's summand for all tokens [B, S, H], and what the experts report.

        The router computes the same on every tensor rank. What its results are multiplied with differs, so gradients
        are summed where they leave the experts: of their inputs and of their weights.
        """
        whole = gather_tokens(x, self.grid) if self.shares > 1 else x
        known = None
        if context.routes is not None:
            known = context.routes.get(self.number)
        is_text = context.is_text
        logits, routes = self.router(whole, known, is_text)
        if context.routes is not None:
            context.routes[self.number] = routes.experts
        order = self._order(routes.experts.flatten(0, 1), None if is_text is None else is_text.flatten())
        tokens = copy_to_tensor_ranks(whole, self.grid).flatten(0, 1)
        weights = copy_to_tensor_ranks(routes.weights, self.grid).flatten(0, 1)
        partial = self.experts(tokens, weights, order).view_as(whole)
        if self.shared_expert is not None:
            partial = partial + self._shared(self.shared_expert, x, whole)
        aux: Aux = {}
        if context.cache is None:
            aux = self._report(logits, routes, order, is_text)
        return partial, aux

    def _order(self, experts: Tensor, is_text: Tensor | None) -> ExpertOrder:
        """Return the order of rows for experts [N, K] of tokens, some of which are text, bool [N].

        Tokens beyond an expert's capacity are dropped in training. It is a share of the text.
        """
        most = None
        if self.network.expert_capacity and self.training:
            tokens = len(experts) if is_text is None else int(is_text.sum())
            share = tokens * experts.shape[1] / self.network.num_experts
            most = max(1, int(self.network.expert_capacity * share))
        return sort_by_expert(experts, self.network.num_experts, most, is_text)

    def _shared(self, expert: MLP, x: Tensor, whole: Tensor) -> Tensor:
        """Return this tensor rank's summand of the shared expert [B, S, H]."""
        partial = expert.partial(x)
        if self.shared_expert_gate is None:
            return partial
        gate = linear(whole, self.shared_expert_gate.weight).sigmoid()
        return partial * copy_to_tensor_ranks(gate, self.grid)

    def _report(self, logits: Tensor, routes: Routes, order: ExpertOrder, is_text: Tensor | None) -> Aux:
        """Return the losses, multiplied by their coefficients, and statistics, as means over blocks with experts."""
        network = self.network
        blocks = len(network.expert_blocks)
        aux = {}
        if network.balance_coefficient:
            balance = balance_loss(
                routes.shares, routes.experts, per_sample=network.balance_per_sample, is_text=is_text
            )
            aux[BALANCE_LOSS] = network.balance_coefficient * balance
        if network.z_coefficient:
            aux[Z_LOSS] = network.z_coefficient * z_loss(logits, is_text)
        counts = _text_per_expert(routes, network.num_experts, is_text)
        choices = counts.sum().clamp(min=1)
        aux[LARGEST_SHARE] = counts.max() / (choices * blocks)
        if network.expert_capacity:
            aux[DROPPED] = (counts.sum() - order.slots.numel()) / (choices * blocks)
        return aux


def _text_per_expert(routes: Routes, num_experts: int, is_text: Tensor | None) -> Tensor:
    """Return the number of choices of each expert by tokens that are not padding [E]."""
    if is_text is not None:
        is_text = is_text.flatten()
    return tokens_per_expert(routes.experts.flatten(0, 1), num_experts, is_text)


def biased_routers(model: nn.Module) -> Iterator[Router]:
    """Yield the routers of a model whose choice has a bias."""
    for module in model.modules():
        if isinstance(module, Router) and module.selection_bias is not None:
            yield module


@torch.no_grad()
def move_selection_biases(model: nn.Module, grid: ParallelGrid) -> None:
    """Move the bias of each expert towards equal shares after a step, and start new counts.

    An expert with fewer tokens than the mean gets a larger bias, one with more a smaller one (arXiv:2408.15664). The
    bias of a frozen router stays. All data ranks call it together.
    """
    for router in biased_routers(model):
        assert router.counts is not None
        assert router.selection_bias is not None
        if not router.weight.requires_grad:
            continue
        if grid.dp_size > 1:
            dist.all_reduce(router.counts, group=grid.dp_group)
        counts = router.counts.float()
        router.selection_bias.add_((counts.mean() - counts).sign(), alpha=router.network.router_bias_rate)
        router.counts.zero_()
