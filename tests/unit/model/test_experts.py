"""Mixtures of experts: outputs, losses and gradients equal those of plain loops over tokens and experts."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.architecture import BALANCE_LOSS, CHOICES, DROPPED, LARGEST_SHARE, Z_LOSS, Architecture
from neox.architecture import ROUTERS as ROUTER_NAMES
from neox.architecture.experts import expert_parameters
from neox.model import GPT, BlockContext, ExpertMLP, move_selection_biases
from neox.model.mlp import MLP
from neox.ops import ACTIVATIONS, ROUTERS, balance_loss, route, sinkhorn, tokens_per_expert
from neox.parallel import ParallelGrid
from tests.plans import small_plan

HIDDEN = 16
EXPERTS = {
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "moe_router_type": "topk",
    "moe_ffn_hidden_size": 12,
    "activation": "swiglu",
    "hidden_size": HIDDEN,
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.25,
}
KINDS = {
    "softmax": {},
    "normalised": {"moe_norm_topk_prob": True, "moe_router_load_balancing_type": "seq_aux_loss"},
    "one of six": {"moe_top_k": 1, "activation": "gelu"},
    "all six": {"moe_top_k": 6},
    "groups": {"moe_router_num_groups": 3, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid": {
        "moe_router_type": "sigmoid",
        "moe_norm_topk_prob": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_enable_expert_bias": True,
    },
    "sinkhorn": {"moe_router_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    "sinkhorn of one": {"moe_router_type": "sinkhorn", "moe_aux_loss_coeff": 0.0, "moe_top_k": 1},
    "shared expert": {"moe_shared_expert_intermediate_size": 20},
    "shared expert with a gate": {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True},
    "capacity": {"moe_expert_capacity_factor": 0.75},
}


def network_of(**keys) -> Architecture:
    return small_plan(**{**EXPERTS, **keys}).architecture


def mixture(network: Architecture) -> ExpertMLP:
    """Return a mixture with random weights."""
    module = ExpertMLP(network, 0, ParallelGrid.single())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    return module


def hidden_states(seed: int = 1) -> Tensor:
    return torch.randn(3, 7, HIDDEN, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def run(module: nn.Module, x: Tensor, **context) -> tuple[Tensor, dict[str, Tensor]]:
    return module(x, BlockContext(torch.arange(x.shape[1]), **context))


def best_experts(scores: Tensor, network: Architecture, bias: Tensor) -> list[int]:
    """Choose the experts of one token by sorting in plain Python."""
    wanted = (scores + bias).tolist()
    candidates = list(range(network.num_experts))
    if network.router_groups:
        size = network.num_experts // network.router_groups
        groups = [wanted[start : start + size] for start in range(0, network.num_experts, size)]
        counted = max(1, network.experts_per_token // network.router_top_groups)
        sums = [sum(sorted(group, reverse=True)[:counted]) for group in groups]
        best = sorted(range(len(groups)), key=lambda group: -sums[group])[: network.router_top_groups]
        candidates = [expert for expert in candidates if expert // size in best]
    return sorted(candidates, key=lambda expert: -wanted[expert])[: network.experts_per_token]


def plain_scores(network: Architecture, logits: Tensor) -> Tensor:
    if network.router == "sigmoid" or (network.router == "sinkhorn" and network.experts_per_token == 1):
        return logits.sigmoid()
    return logits.softmax(-1)


def plain_expert(network: Architecture, up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    return down @ ACTIVATIONS[network.activation](up @ x)


def plain_shared(module: ExpertMLP, network: Architecture, x: Tensor) -> Tensor:
    """Compute the shared expert for one token; 0 without one."""
    expert = module.shared_expert
    if expert is None:
        return torch.zeros(HIDDEN)
    output = plain_expert(network, expert.dense_h_to_4h.weight, expert.dense_4h_to_h.weight, x)
    if module.shared_expert_gate is not None:
        output = output * (module.shared_expert_gate.weight @ x).sigmoid()
    return output


def plain_loop(module: ExpertMLP, network: Architecture, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a mixture token by token and expert by expert."""
    logits = x @ module.router.weight.t()
    scores = plain_scores(network, logits)
    wanted = scores.detach()
    if network.router == "sinkhorn":
        wanted = sinkhorn(logits.detach().flatten(0, 1)).view_as(logits)
    bias = module.router.selection_bias
    bias = torch.zeros(network.num_experts) if bias is None else bias.detach()
    batch, length, _ = x.shape
    most = batch * length * network.experts_per_token
    if network.expert_capacity:
        most = int(network.expert_capacity * most / network.num_experts)
    counts = torch.zeros(batch, network.num_experts)
    dropped = 0
    rows = []
    for sample in range(batch):
        for token in range(length):
            here = x[sample, token]
            chosen = best_experts(wanted[sample, token], network, bias)
            weights = scores[sample, token, chosen]
            if network.router_normalizes:
                weights = weights / weights.sum()
            total = plain_shared(module, network, here)
            for expert, weight in zip(chosen, weights * network.router_scale, strict=True):
                counts[sample, expert] += 1
                if counts[:, expert].sum() > most:
                    dropped += 1
                    continue
                up = module.experts.dense_h_to_4h.weight[expert]
                down = module.experts.dense_4h_to_h.weight[expert]
                total = total + weight * plain_expert(network, up, down, here)
            rows.append(total)
    aux = plain_report(network, logits, scores, counts)
    if network.expert_capacity:
        aux[DROPPED] = torch.tensor(float(dropped))
    return torch.stack(rows).view_as(x), aux


def plain_report(network: Architecture, logits: Tensor, scores: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """Compute losses and numbers of choices; `counts` [B, E] are choices of each expert in each sample."""
    shares = scores
    if network.router == "sigmoid":
        shares = scores / scores.sum(-1, keepdim=True)
    aux = {}
    if network.balance_coefficient:
        parts = [(counts.sum(0), shares.flatten(0, 1))]
        if network.balance_per_sample:
            parts = list(zip(counts, shares, strict=True))
        losses = [network.num_experts * (count / count.sum() * share.mean(0)).sum() for count, share in parts]
        aux[BALANCE_LOSS] = network.balance_coefficient * sum(losses) / len(losses)
    if network.z_coefficient:
        aux[Z_LOSS] = network.z_coefficient * (logits.exp().sum(-1).log() ** 2).mean()
    aux[CHOICES] = counts.sum()
    aux[LARGEST_SHARE] = counts.sum(0).max()
    return aux


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_equal_a_plain_loop(kind: str):
    network = network_of(**KINDS[kind])
    module = mixture(network)
    x = hidden_states()
    target = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    inputs = [x, *(parameter for parameter in module.parameters() if parameter.requires_grad)]

    def gradients(output: Tensor, aux: dict[str, Tensor]) -> tuple[Tensor, ...]:
        losses = [loss for loss in aux.values() if loss.requires_grad]
        return torch.autograd.grad((output * target).sum() + sum(losses), inputs)

    output, aux = run(module, x)
    expected, expected_aux = plain_loop(module, network, x)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert {name: value.item() for name, value in aux.items()} == pytest.approx(
        {name: value.item() for name, value in expected_aux.items()}, rel=1e-5
    )
    if kind == "capacity":
        assert aux[DROPPED] > 0
    found = gradients(output, aux)
    for ours, theirs in zip(found, gradients(expected, expected_aux), strict=True):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm() + 1e-9


def test_names_and_shapes_are_those_of_the_layer_plan():
    for keys in KINDS.values():
        network = network_of(**keys)
        module = ExpertMLP(network, 0, ParallelGrid.single())
        found = {f"mlp.{name}": tuple(parameter.shape) for name, parameter in module.named_parameters()}
        assert found == {spec.name: spec.shape for spec in expert_parameters(network)}


def test_one_expert_is_the_dense_network():
    network = replace(network_of(moe_top_k=1), num_experts=1, balance_coefficient=0.0, z_coefficient=0.0)
    module = mixture(network)
    dense = MLP(replace(network, mlp_width=network.expert_width, mlp_bias=False), 0, ParallelGrid.single())
    with torch.no_grad():
        dense.dense_h_to_4h.weight.copy_(module.experts.dense_h_to_4h.weight[0])
        dense.dense_4h_to_h.weight.copy_(module.experts.dense_4h_to_h.weight[0])
    x = hidden_states()
    torch.testing.assert_close(run(module, x)[0], run(dense, x)[0], rtol=0, atol=0)


def test_a_router_that_sends_all_tokens_to_one_expert():
    network = network_of(moe_top_k=1)
    module = mixture(network)
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[4, 0] = 100.0
    x = hidden_states().detach().clone()
    x[..., 0] = 1.0
    x.requires_grad_()
    output, aux = run(module, x)
    inner = F.linear(x, module.experts.dense_h_to_4h.weight[4])
    expected = F.linear(ACTIVATIONS["swiglu"](inner), module.experts.dense_4h_to_h.weight[4])
    torch.testing.assert_close(output, expected)
    assert aux[LARGEST_SHARE] == aux[CHOICES] > 0
    assert aux[BALANCE_LOSS].item() == pytest.approx(0.5 * network.num_experts)
    output.sum().backward()
    idle = [expert for expert in range(6) if expert != 4]
    for weight in (module.experts.dense_h_to_4h.weight, module.experts.dense_4h_to_h.weight):
        assert weight.grad is not None
        assert not weight.grad[idle].any()
        assert weight.grad[4].any()


def test_a_uniform_router_has_the_smallest_balance_loss_and_equal_weights():
    network = network_of(moe_top_k=6)
    module = mixture(network)
    with torch.no_grad():
        module.router.weight.zero_()
    x = hidden_states()
    output, aux = run(module, x)
    each = []
    for expert in range(6):
        inner = ACTIVATIONS["swiglu"](F.linear(x, module.experts.dense_h_to_4h.weight[expert]))
        each.append(F.linear(inner, module.experts.dense_4h_to_h.weight[expert]))
    torch.testing.assert_close(output, torch.stack(each).mean(0))
    assert aux[BALANCE_LOSS].item() == pytest.approx(0.5)
    assert (aux[LARGEST_SHARE] / aux[CHOICES]).item() == pytest.approx(1 / 6)


def test_a_second_pass_keeps_the_routes_and_counts_no_token():
    network = network_of(moe_router_type="sigmoid", moe_router_enable_expert_bias=True)
    module = mixture(network)
    routes: dict[int, Tensor] = {}
    x = hidden_states()
    first, _ = run(module, x, routes=routes)
    counts = module.router.token_counts.clone()
    assert counts.sum() == x.shape[0] * x.shape[1] * 2
    with torch.no_grad():
        module.router.selection_bias.copy_(torch.arange(6.0))  # would choose others
    second, _ = run(module, x, routes=routes)
    assert torch.equal(first, second)
    assert torch.equal(module.router.token_counts, counts)
    third, _ = run(module, x)
    assert not torch.equal(first, third)


def test_selection_biases_move_towards_experts_with_few_tokens():
    network = network_of(
        moe_router_type="sigmoid", moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.25
    )
    module = mixture(network)
    with torch.no_grad():
        module.router.selection_bias.zero_()
        module.router.token_counts.copy_(torch.tensor([1, 5, 3, 3, 0, 6]))
    move_selection_biases(module, ParallelGrid.single())
    assert module.router.selection_bias.tolist() == [0.25, -0.25, 0.0, 0.0, 0.25, -0.25]
    assert not module.router.token_counts.any()


def test_every_router_on_paper_has_its_functions():
    assert set(ROUTERS) == set(ROUTER_NAMES)


def test_tokens_are_counted_over_all_or_for_each_sample():
    experts = torch.tensor([[[0, 2], [2, 1]], [[0, 1], [0, 2]]])  # [B, N, K]
    assert tokens_per_expert(experts, 4).tolist() == [[1, 1, 2, 0], [2, 1, 1, 0]]
    assert tokens_per_expert(experts.flatten(0, 1), 4).tolist() == [3, 2, 3, 0]


def test_sinkhorn_gives_equal_shares_to_tokens_and_experts():
    assignment = sinkhorn(torch.randn(40, 5, generator=torch.Generator().manual_seed(2)))
    torch.testing.assert_close(assignment.sum(0), torch.full((5,), 1 / 5), rtol=1e-2, atol=0)
    torch.testing.assert_close(assignment.sum(1), torch.full((40,), 1 / 40), rtol=1e-2, atol=0)


def test_experts_compute_in_bf16_and_route_in_fp32():
    network = network_of()
    module = mixture(network).bfloat16()
    output, aux = run(module, hidden_states().bfloat16())
    assert output.dtype == torch.bfloat16
    assert aux[BALANCE_LOSS].dtype == torch.float32


def test_active_parameters_are_those_that_a_token_is_computed_with():
    plan = small_plan(**EXPERTS)
    model = GPT(plan, ParallelGrid.single())
    total = sum(parameter.numel() for parameter in model.parameters())
    stacked = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert plan.layers.numel == total
    assert plan.layers.active_numel == total - stacked + stacked * 2 // 6


def test_the_balance_loss_of_one_block_is_that_of_transformers_divided_by_the_experts_per_token():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(4))
    routes = route(logits, network_of())
    theirs = load_balancing_loss_func((logits.flatten(0, 1),), num_experts=6, top_k=2)
    assert balance_loss(routes.probabilities, routes.experts, per_sample=False).item() == pytest.approx(
        theirs.item() / 2
    )


def test_nobody_reads_what_a_kernel_leaves_in_spare_rows(monkeypatch):
    """Of an expert's capacity: gradients are those of a loop over experts, though the kernel's other rows are NaN."""
    plan = small_plan(
        moe_num_experts=4,
        moe_top_k=2,
        moe_router_type="topk",
        moe_ffn_hidden_size=32,
        moe_expert_capacity_factor=0.7,
        activation="gelu",
    )
    kernel = torch._grouped_mm

    def careless(*operands: Tensor, offs: Tensor) -> Tensor:
        product = kernel(*operands, offs=offs)
        if product.dim() == 2:
            product[int(offs[-1]) :] = torch.nan
        return product

    found = []
    for has_kernel in (False, True):
        module = sys.modules["neox.ops.grouped_linear"]  # whose name in the package is the function's
        monkeypatch.setattr(module, "_has_grouped_product", lambda *_, answer=has_kernel: answer)
        monkeypatch.setattr(torch, "_grouped_mm", careless)
        torch.manual_seed(3)
        layer = ExpertMLP(plan.architecture, 0, ParallelGrid.single(), dtype=torch.bfloat16)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        x = torch.randn(2, 16, 32, dtype=torch.bfloat16, requires_grad=True)
        output, aux = layer(x, BlockContext(torch.arange(16)))
        assert aux[DROPPED] > 0
        output.square().sum().backward()
        found.append([output, x.grad, *(p.grad for p in layer.parameters())])
    for of_loop, of_kernel in zip(*found, strict=True):
        torch.testing.assert_close(of_kernel, of_loop, rtol=0.02, atol=0.02)


def test_sigmoids_that_underflow_are_finite() -> None:
    """transformers (DeepSeek-V3, GLM-4) and Megatron-LM add 1e-20 to the sum of a token's scores, which is near 0."""
    network = network_of(**KINDS["sigmoid"])
    for value in (-100.0, -200.0):
        logits = torch.full((1, 4, 6), value, requires_grad=True)
        routes = route(logits, network)
        loss = balance_loss(routes.probabilities, routes.experts, per_sample=True)
        (routes.weights.square().sum() + loss).backward()
        for found in (routes.weights, routes.probabilities, loss, logits.grad):
            assert found is not None
            assert found.isfinite().all()
    ordinary = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    sums = route(ordinary, network).weights.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))
