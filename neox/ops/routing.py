"""Choice of the experts of each token, and the losses of that choice.

Padding is no text: wherever `is_text` is given, only its tokens count.

Legend: B samples, S sequence, E experts, K experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from neox.architecture import Architecture

_SINKHORN_TOLERANCE = 1e-4
"""Change of a factor's logarithm that ends the rounds."""
_SINKHORN_ROUNDS = 300
"""Most rounds. Logits of 256 tokens that lie within 170 of each other need 250."""
_SINKHORN_LOOK = 4
"""Rounds after which the host looks whether they have ended, for which it waits for an accelerator. Rounds after the
end change nothing."""
_SMALLEST_SUM = 1e-20
"""Added to sums of scores before a division by them, as in transformers and Megatron-LM. Sigmoids of all experts may
underflow to 0; sums above 1e-12 stay what they are in fp32."""


class Routes(NamedTuple):
    """Experts of the tokens.

    Attributes:
        experts: Numbers of each token's experts [B, S, K].
        weights: Factors of their outputs in fp32 [B, S, K].
        probabilities: Score of every expert, as a fraction of the token's scores, in fp32 [B, S, E]; for the balancing
            loss.
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class SampleTokens:
    """Tokens of samples of which other ranks may hold some; choices and losses are of all of them.

    Attributes:
        ranks: Number of ranks C that hold equal numbers of a sample's tokens.
        gather: Function that joins the tokens of all of them in order [B, S/C, ...] -> [B, S, ...], without gradients.
        own: Function that returns this rank's tokens [B, S, ...] -> [B, S/C, ...].
        total: Function that adds up a tensor over the ranks, without gradients.
    """

    ranks: int = 1
    gather: Callable[[Tensor], Tensor] = _same
    own: Callable[[Tensor], Tensor] = _same
    total: Callable[[Tensor], Tensor] = _same


WHOLE_SAMPLES = SampleTokens()
"""All tokens of a sample are here."""


def softmax_scores(logits: Tensor, top_k: int) -> Tensor:
    """Return the softmax over experts [B, S, E]."""
    return logits.softmax(-1)


def sigmoid_scores(logits: Tensor, top_k: int) -> Tensor:
    """Return the sigmoid of each logit [B, S, E]."""
    return logits.sigmoid()


def sinkhorn_scores(logits: Tensor, top_k: int) -> Tensor:
    """Return scores as gpt-neox's Sinkhorn router weights experts [B, S, E]: sigmoid for K = 1, else softmax."""
    if top_k == 1:
        return logits.sigmoid()
    return logits.softmax(-1)


def balanced_assignment(logits: Tensor, is_text: Tensor | None) -> Tensor:
    """Return `log_sinkhorn` over all tokens of text in a micro batch [B, S, E]."""
    if is_text is None:
        return log_sinkhorn(logits.flatten(0, 1)).view_as(logits)
    assignment = logits.clone()
    assignment[is_text] = log_sinkhorn(logits[is_text])
    return assignment


@dataclass(frozen=True)
class RouterFunctions:
    """How a router scores and chooses experts.

    Attributes:
        scores: Function of logits [B, S, E] and K that returns scores [B, S, E]. They weight the chosen experts, and
            the experts with the highest ones are chosen.
        training_choice: Function of logits and text [B, S] that returns other scores for the choice in training, which
            balance the experts; None to choose by `scores` then, too.
        normalizes_probabilities: Whether scores of a token have any sum, so that they are divided by it for the
            balancing loss.
    """

    scores: Callable[[Tensor, int], Tensor]
    training_choice: Callable[[Tensor, Tensor | None], Tensor] | None = None
    normalizes_probabilities: bool = False


ROUTERS: Mapping[str, RouterFunctions] = MappingProxyType(
    {
        "sinkhorn": RouterFunctions(sinkhorn_scores, training_choice=balanced_assignment),
        "topk": RouterFunctions(softmax_scores),
        "sigmoid": RouterFunctions(sigmoid_scores, normalizes_probabilities=True),
    }
)
"""Key of `neox.architecture.ROUTERS` -> functions."""


def route(
    logits: Tensor,
    network: Architecture,
    *,
    bias: Tensor | None = None,
    training: bool = False,
    experts: Tensor | None = None,
    is_text: Tensor | None = None,
    samples: SampleTokens = WHOLE_SAMPLES,
) -> Routes:
    """Choose and weight the experts of each token.

    Args:
        logits: Scores of the router in fp32 [B, S, E].
        network: The network, whose `router` fields are used.
        bias: Per-expert bias, added to the scores when experts are chosen, not when they are weighted [E].
        training: Whether to apply balancing that is only used in training (Sinkhorn).
        experts: Experts that were chosen before [B, S, K], which are only weighted again. None to choose.
        is_text: Which tokens are not padding, bool [B, S]; all if None. The others' experts mean nothing.
        samples: Which ranks hold the other tokens of the samples.
    """
    router = ROUTERS[network.router]
    scores = router.scores(logits, network.experts_per_token)  # [B, S, E]

    if experts is None:
        with torch.no_grad():
            choice = scores  # [B, S, E]
            if training and router.training_choice is not None:
                of_text = None if is_text is None else samples.gather(is_text)
                choice = samples.own(router.training_choice(samples.gather(logits), of_text))
            if bias is not None:
                choice = choice + bias
            if network.router_groups:
                choice = _in_best_groups(choice, network)
            experts = choice.topk(network.experts_per_token, dim=-1).indices  # [B, S, K], the best first

    weights = scores.gather(-1, experts)  # [B, S, K]
    if network.router_normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
    if network.router_scale != 1.0:
        weights = weights * network.router_scale

    probabilities = scores
    if router.normalizes_probabilities:
        probabilities = scores / (scores.sum(-1, keepdim=True) + _SMALLEST_SUM)
    return Routes(experts, weights, probabilities)


def _in_best_groups(scores: Tensor, network: Architecture) -> Tensor:
    """Return scores [B, S, E] with -inf outside of each token's best groups of neighbouring experts.

    A group's score is the sum of its `router_group_best` highest expert scores.
    """
    by_group = scores.unflatten(-1, (network.router_groups, -1))  # [B, S, groups, E / groups]
    group_scores = by_group.topk(network.router_group_best, dim=-1).values.sum(-1)  # [B, S, groups]
    best = group_scores.topk(network.router_top_groups, dim=-1).indices
    is_best = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best, True)
    return by_group.masked_fill(~is_best.unsqueeze(-1), float("-inf")).flatten(-2)


def sinkhorn(logits: Tensor) -> Tensor:
    """Return a soft assignment of tokens to experts [T, E] in which all experts have equal shares."""
    return log_sinkhorn(logits).exp()


def log_sinkhorn(logits: Tensor) -> Tensor:
    """Return the logarithm of `sinkhorn`'s assignment, in which an expert's share cannot underflow to 0.

    Rows and columns of exp(logits) are scaled alternately until the factors of the columns stay the same. gpt-neox does
    the same, but stops after three rounds, so its choices may differ if logits are far apart.

    Everything is a logarithm: exp(logits) overflows at 89, and the factors of experts that few tokens want underflow.
    Rounds are bounded because factors need not converge: if the choices of tokens leave no equal shares (a token for
    each expert, but all of them want one expert by far), each round moves them on.
    """
    tokens, experts = logits.shape
    if not tokens:
        return logits
    log_share = math.log(tokens / experts)  # tokens of an expert, where each token counts 1
    columns = torch.zeros_like(logits[:1])
    rows = -logits.logsumexp(1, keepdim=True)
    ended = torch.zeros((), dtype=torch.bool, device=logits.device)
    rounds_between_looks = 1 if logits.device.type == "cpu" else _SINKHORN_LOOK
    for number in range(1, _SINKHORN_ROUNDS + 1):
        scaled = log_share - (logits + rows).logsumexp(0, keepdim=True)
        ends = (columns - scaled).abs().max() <= _SINKHORN_TOLERANCE
        columns = torch.where(ended, columns, scaled)
        rows = torch.where(ended, rows, -(logits + columns).logsumexp(1, keepdim=True))
        ended = ended | ends
        if number % rounds_between_looks == 0 and bool(ended):
            break
    return logits + columns + rows - math.log(tokens)


def tokens_per_expert(experts: Tensor, num_experts: int, is_text: Tensor | None = None) -> Tensor:
    """Count the tokens of each expert: [N, K] -> [E], or [B, N, K] -> [B, E] for each sample.

    Args:
        experts: Numbers of the experts of each token.
        num_experts: Number of experts E.
        is_text: Which tokens count, bool [N] or [B, N]; all if None.
    """
    flat = experts.flatten(-2)
    counted = torch.ones_like(flat)
    if is_text is not None:
        counted = is_text.unsqueeze(-1).expand_as(experts).flatten(-2).to(flat.dtype)
    counts = torch.zeros(*flat.shape[:-1], num_experts, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(-1, flat, counted)


def balance_loss(
    probabilities: Tensor,
    experts: Tensor,
    *,
    per_sample: bool,
    is_text: Tensor | None = None,
    samples: SampleTokens = WHOLE_SAMPLES,
) -> Tensor:
    """Return E x the sum over experts of (fraction of choices x mean probability), which is 1 if all experts are equal.

    Switch Transformer, arXiv:2101.03961, section 2.2. Megatron-LM's has this factor; that of transformers is K times
    as large.

    The fractions have no gradient. So if C ranks divide the tokens of the samples, each returns its tokens' part of the
    mean probability times C, with the fractions of all tokens: the mean over the ranks is the loss, and the mean of
    their gradients its gradient.

    Args:
        probabilities: Score of each expert, as a fraction of a token's scores [B, S, E].
        experts: Experts of each token [B, S, K].
        per_sample: Whether to return the mean over samples of each one's loss, which does not depend on how samples
            are divided into micro batches (Megatron-LM's `seq_aux_loss`). Samples of padding only count 0.
        is_text: Which tokens count, bool [B, S]; all if None.
        samples: Which ranks hold the other tokens of the samples.
    """
    if not per_sample:
        # All samples together are one.
        probabilities = probabilities.flatten(0, 1).unsqueeze(0)
        experts = experts.flatten(0, 1).unsqueeze(0)
        is_text = None if is_text is None else is_text.flatten().unsqueeze(0)
    num_experts = probabilities.shape[-1]
    counts = samples.total(tokens_per_expert(experts, num_experts, is_text))  # [B, E]
    if is_text is None:
        fractions = counts / (experts[0].numel() * samples.ranks)
        return num_experts * (fractions * probabilities.mean(1)).sum(-1).mean()
    tokens = samples.total(is_text.sum(1, keepdim=True)).clamp(min=1)  # [B, 1]
    fractions = counts / (tokens * experts.shape[-1])
    means = (probabilities * is_text.unsqueeze(-1)).sum(1) / tokens * samples.ranks
    return num_experts * (fractions * means).sum(-1).mean()


def z_loss(logits: Tensor, is_text: Tensor | None = None, samples: SampleTokens = WHOLE_SAMPLES) -> Tensor:
    """Return the mean squared log-sum-exp of the logits (ST-MoE, arXiv:2202.08906, equation 5).

    Args:
        logits: Scores of the router [B, S, E].
        is_text: Which tokens count, bool [B, S]; all if None.
        samples: Which ranks hold the other tokens of the samples; the mean over them is the loss, as of `balance_loss`.
    """
    squares = logits.logsumexp(-1).square()
    if is_text is None:
        return squares.mean()
    return (squares * is_text).sum() / samples.total(is_text.sum()).clamp(min=1) * samples.ranks
