"""Mixture-of-experts layer that replaces a block's MLP: a router chooses some experts for each token.

    x [B, S, H]
      |--> router ---------------------> experts, weights of each token [B, S, K]
      |                                                |
      |--> gather_rows: a row for each choice, sorted by expert [R, H]
      |        (Exchange: to the data ranks that hold the experts)
      |      dense_h_to_4h, activation, dense_4h_to_h  [R, H]
      |        (Exchange: back)
      |    combine_rows: weighted sum over the choices of a token [B, S, H]
      |                                                |
      '--> shared expert ----------------------------> + --> all-reduce over tensor ranks

Every tensor rank routes all tokens and holds a shard of each expert's inner features, as of a dense MLP. The all-reduce
over tensor ranks comes after the experts. So routes and losses do not depend on the number of tensor ranks.

With `expert_model_parallel_size` data ranks hold different experts, and tokens travel to them (`Exchange`).

With context ranks each routes its own tokens, and S counts those. Fractions of tokens, in losses and in what is
reported, are of all tokens of a sample (`SampleTokens`); so are Sinkhorn's assignment and the tokens that an expert's
capacity keeps.

Legend: B batch, S sequence, H hidden, E experts, K experts of a token, R rows (choices of an expert by a token),
I, O input and output features on this rank, T tensor ranks, P ranks that divide experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from neox.architecture import ACTIVATIONS as ACTIVATION_SPECS
from neox.architecture import BALANCE_LOSS, CHOICES, DROPPED, LARGEST_SHARE, Z_LOSS, Architecture
from neox.model.context import Aux, BlockContext
from neox.model.mlp import MLP
from neox.ops import (
    ACTIVATIONS,
    WHOLE_SAMPLES,
    ExpertOrder,
    Fp8Recipe,
    Routes,
    SampleTokens,
    balance_loss,
    combine_rows,
    gather_rows,
    grouped_linear,
    linear,
    route,
    sort_by_expert,
    tokens_per_expert,
    z_loss,
)
from neox.parallel import (
    Exchange,
    LowRankAdapter,
    ParallelGrid,
    Summand,
    TensorOptions,
    TokenShares,
    copy_to_tensor_ranks,
    gather_tokens,
    join_context,
    mark_divided_experts,
    mark_split,
    own_context,
    reduce_over_tensor_ranks,
    reduce_scatter_tokens,
    shard_size,
    sum_over_context_ranks,
)


class Router(nn.Module):
    """Scores of experts in fp32, whatever the precision of training.

    Args:
        network: The network.
        **options: Device and type of the weight.

    Attributes:
        bias: Bias of each expert's logit [E]; None without biases.
        selection_bias: Per-expert bias, added to the scores when experts are chosen, not when they are weighted [E];
            None for none.
        token_counts: Tokens of each expert since the last update of `selection_bias` [E]; None without one.
    """

    token_counts: Tensor | None

    def __init__(self, network: Architecture, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.network = network
        self.weight = nn.Parameter(torch.empty(network.num_experts, network.hidden_size, **options))
        self.bias: nn.Parameter | None = None
        if network.router_logit_bias:
            self.bias = nn.Parameter(torch.empty(network.num_experts, **options))
        self.selection_bias: nn.Parameter | None = None
        token_counts = None
        if network.router_bias:
            bias = torch.empty(network.num_experts, device=options.get("device"), dtype=torch.float32)
            self.selection_bias = nn.Parameter(bias, requires_grad=False)
            token_counts = torch.zeros(network.num_experts, device=options.get("device"), dtype=torch.int64)
        self.register_buffer("token_counts", token_counts, persistent=False)

    def reset(self) -> None:
        """Reset the counts of tokens."""
        if self.token_counts is not None:
            self.token_counts.zero_()

    def forward(
        self,
        x: Tensor,
        experts: Tensor | None,
        is_text: Tensor | None = None,
        samples: SampleTokens = WHOLE_SAMPLES,
    ) -> tuple[Tensor, Routes]:
        """Return logits [B, S, E] and routes of tokens [B, S, H].

        Args:
            x: Hidden states [B, S, H].
            experts: Experts of the tokens if they were chosen before [B, S, K].
            is_text: Which tokens are not padding, bool [B, S]; all if None.
            samples: Which ranks hold the other tokens of the samples.
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
            samples=samples,
        )
        is_first_pass = experts is None  # recomputation must not count tokens again
        if self.token_counts is not None and self.training and is_first_pass:
            self.token_counts += text_tokens_per_expert(routes, self.network.num_experts, is_text)
        return logits, routes


class ExpertAdapter(LowRankAdapter):
    """Summand scale * B A rows of the linear layer of each expert on this rank.

    The expert with number e has its own A and B: lora_A [E/P, rank, I], lora_B [E/P, O, rank].

    Args:
        weight: Weight of the experts on this rank [E/P, O, I], which gives sizes, device and type.
        grid: Process groups.
        rank: Rank of the products.
        scale: Factor of the products.
        split_outputs: Whether tensor ranks divide the outputs; otherwise the inputs.
    """

    def __init__(self, weight: Tensor, grid: ParallelGrid, rank: int, scale: float, *, split_outputs: bool) -> None:
        super().__init__()
        experts, outputs, inputs = weight.shape
        self.grid = grid
        self.scale = scale
        self.split_outputs = split_outputs
        self.lora_A = nn.Parameter(torch.empty(experts, rank, inputs, device=weight.device, dtype=weight.dtype))
        self.lora_B = nn.Parameter(torch.empty(experts, outputs, rank, device=weight.device, dtype=weight.dtype))

    def forward(self, rows: Tensor, rows_per_expert: Tensor) -> Tensor:
        """Return the result [R, O/T] for rows [R, I], or a summand of [R, O] for rows [R, I/T].

        The gradient of the rows is summed over tensor ranks where tokens were copied to them. So the factor that they
        do not divide passes through a copy of its own, whose gradient is summed, too.
        """
        a: Tensor = self.lora_A
        b: Tensor = self.lora_B
        if self.split_outputs:
            a = copy_to_tensor_ranks(a, self.grid)
        else:
            b = copy_to_tensor_ranks(b, self.grid)
        inner = grouped_linear(rows, a, rows_per_expert)  # [R, rank]
        return self.scale * grouped_linear(inner, b, rows_per_expert)


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

    Attributes:
        fp8: How operands become fp8; None for products in the type of the weight. Adapters stay in that.
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
        local_experts = shard_size(experts, grid.ep_size, "number of experts")
        weight = nn.Parameter(torch.empty(local_experts, outputs, inputs, **options))
        self.weight = mark_divided_experts(mark_split(weight, grid.tp_size > 1), grid)
        self.grid = grid
        self.is_summand = is_summand
        self.bias: nn.Parameter | None = None
        if bias:
            biases = nn.Parameter(torch.empty(local_experts, outputs, **options))
            self.bias = mark_divided_experts(mark_split(biases, grid.tp_size > 1 and not is_summand), grid)
        self.adapter: ExpertAdapter | None = None
        self.fp8: Fp8Recipe | None = None

    def add_adapter(self, rank: int, scale: float) -> None:
        """Add a low-rank adapter to each expert, uninitialised."""
        self.adapter = ExpertAdapter(self.weight, self.grid, rank, scale, split_outputs=not self.is_summand)

    def forward(self, rows: Tensor, rows_per_expert: Tensor, *, has_spare_rows: bool = False) -> Tensor:
        """Multiply rows [R, I] that are sorted by expert; `rows_per_expert` is [E/P]."""
        product = grouped_linear(rows, self.weight, rows_per_expert, self.fp8)
        if self.adapter is not None:
            product = product + self.adapter(rows, rows_per_expert)
        if self.bias is None:
            return product
        bias: Tensor = self.bias
        if self.is_summand and self.grid.tp_size > 1:
            bias = copy_to_tensor_ranks(bias, self.grid) / self.grid.tp_size
        bias = bias.to(product.dtype)
        if has_spare_rows:
            bias = F.pad(bias, (0, 0, 0, 1))  # of no expert, and without a gradient
            spare = len(rows) - rows_per_expert.sum(0, keepdim=True)
            rows_per_expert = torch.cat((rows_per_expert, spare))
        return product + bias.repeat_interleave(rows_per_expert, dim=0, output_size=len(rows))


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
        rows = gather_rows(x, order)  # [R, H]
        rows_per_expert = order.rows_per_expert
        has_spare_rows = not order.is_exact  # which are not sent to other ranks
        exchange: Exchange | None = None
        if self.grid.ep_size > 1:
            exchange = Exchange.plan(rows_per_expert, self.grid)
            rows = exchange.to_experts(rows[: exchange.rows])  # now those of this rank's experts, from all ranks
            rows_per_expert = exchange.counts
            has_spare_rows = False
        inner = self.activation(self.dense_h_to_4h(rows, rows_per_expert, has_spare_rows=has_spare_rows))  # [R, W/T]
        outputs = self.dense_4h_to_h(inner, rows_per_expert, has_spare_rows=has_spare_rows)  # [R, H]
        if exchange is not None:
            outputs = exchange.from_experts(outputs)
            if not order.is_exact:
                outputs = F.pad(outputs, (0, 0, 0, len(order.choice_of_row) - exchange.rows))  # spare rows again
        return combine_rows(outputs, weights, order)


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
        self._samples = WHOLE_SAMPLES  # in training with context ranks
        if grid.cp_size > 1:
            self._samples = SampleTokens(
                ranks=grid.cp_size,
                gather=partial(join_context, grid=grid),
                own=partial(own_context, grid=grid),
                total=partial(sum_over_context_ranks, grid=grid),
            )
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

    # Not compiled: some devices read each expert's number of rows on the host. (`torch.compiler.disable` would import
    # the compiler at once, which takes seconds.)
    @_disable_dynamo
    def _partial(self, x: Tensor, context: BlockContext) -> tuple[Tensor, Aux]:
        """Return this tensor rank's summand for all tokens [B, S, H], and what the experts report."""
        # Sequence parallelism gives each tensor rank a share of the tokens; the router needs all of them.
        tokens = x  # [B, S, H]
        if self.shares > 1:
            tokens = gather_tokens(x, self.grid)  # [B, S/T, H] -> [B, S, H]

        # Recomputation in the backward pass takes the experts of the forward pass, so that both compute the same.
        chosen_before = None
        if context.routes is not None:
            chosen_before = context.routes.get(self.number)
        samples = self._samples if context.divided else WHOLE_SAMPLES
        logits, routes = self.router(tokens, chosen_before, context.is_text, samples)
        if context.routes is not None:
            context.routes[self.number] = routes.experts

        # Routing is replicated, but each tensor rank multiplies it with a different shard. Therefore gradients w.r.t.
        # the experts' inputs and weights are all-reduced over tensor ranks (`copy_to_tensor_ranks`).
        order = self._sort_choices(routes.experts, context.is_text, samples)
        inputs = copy_to_tensor_ranks(tokens, self.grid).flatten(0, 1)  # [B x S, H]
        weights = copy_to_tensor_ranks(routes.weights, self.grid).flatten(0, 1)  # [B x S, K]
        output = self.experts(inputs, weights, order).view_as(tokens)  # [B, S, H]

        if self.shared_expert is not None:
            shared = self.shared_expert.partial(x)  # gathers tokens by itself
            if self.shared_expert_gate is not None:
                gate = linear(tokens, self.shared_expert_gate.weight).sigmoid()  # [B, S, 1]
                shared = shared * copy_to_tensor_ranks(gate, self.grid)
            output = output + shared

        if context.cache is not None:
            return output, {}  # generation has no losses
        return output, self._report(logits, routes, order, context.is_text, samples)

    def _sort_choices(self, experts: Tensor, is_text: Tensor | None, samples: SampleTokens) -> ExpertOrder:
        """Return the order of rows for the experts of tokens [B, S, K], some of which are text, bool [B, S].

        Tokens beyond an expert's capacity are dropped in training. It is a multiple of an equal share of the text.
        """
        number = self.network.num_experts
        computed = None if is_text is None else is_text.unsqueeze(2)  # [B, S, 1]
        if self.network.expert_capacity and self.training:
            # The first tokens of a micro batch have a place, whichever context rank holds them.
            every = samples.gather(experts)  # [B, S of all context ranks, K]
            text = None if computed is None else samples.gather(computed)
            tokens = every[..., 0].numel() if text is None else int(text.sum())
            equal_share = tokens * experts.shape[-1] / number
            capacity = max(1, int(self.network.expert_capacity * equal_share))
            order = sort_by_expert(every, number, capacity, text)
            if samples is WHOLE_SAMPLES:
                return order
            computed = samples.own(order.has_row.view_as(every))  # [B, S, K]
        return sort_by_expert(experts, number, computed=computed)

    def _report(
        self, logits: Tensor, routes: Routes, order: ExpertOrder, is_text: Tensor | None, samples: SampleTokens
    ) -> Aux:
        """Return the losses, multiplied by their coefficients, and statistics.

        The numbers of all blocks are added up. Statistics are numbers of choices, which are divided by `CHOICES` when
        those of a step are added up.
        """
        network = self.network
        aux = {}
        if network.balance_coefficient:
            balance = balance_loss(
                routes.probabilities,
                routes.experts,
                per_sample=network.balance_per_sample,
                is_text=is_text,
                samples=samples,
            )
            aux[BALANCE_LOSS] = network.balance_coefficient * balance
        if network.z_coefficient:
            aux[Z_LOSS] = network.z_coefficient * z_loss(logits, is_text, samples)
        choices_per_expert = samples.total(text_tokens_per_expert(routes, network.num_experts, is_text))  # [E]
        choices = choices_per_expert.sum()
        aux[CHOICES] = choices.float()
        aux[LARGEST_SHARE] = choices_per_expert.max().float()
        if network.expert_capacity:
            rows = samples.total(order.rows_per_expert.sum())
            aux[DROPPED] = (choices - rows).float()
        return aux


def text_tokens_per_expert(routes: Routes, num_experts: int, is_text: Tensor | None) -> Tensor:
    """Count the tokens of each expert that are not padding [E]."""
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
        assert router.token_counts is not None
        assert router.selection_bias is not None
        if not router.weight.requires_grad:
            continue
        if grid.dp_size > 1:
            dist.all_reduce(router.token_counts, group=grid.dp_group)
        counts = router.token_counts.float()
        router.selection_bias.add_((counts.mean() - counts).sign(), alpha=router.network.router_bias_rate)
        router.token_counts.zero_()
