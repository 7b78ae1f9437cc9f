"""Parameters and operations of every model on paper are those of its modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from neox.architecture import (
    ACTIVATIONS,
    BLOCK_OFFSET,
    BLOCKS,
    MLPS,
    NORMS,
    POSITIONS,
    RESIDUALS,
    ROUTERS,
    recomputed_flops_per_token,
    training_flops_per_token,
)
from neox.architecture.attention import QUERY_KEY_NORMS
from neox.ops import VisiblePairs, window_rule
from neox.plan import RunPlan
from neox.plan.memory.parameters import count_parameters
from tests.counted_operations import FUNCTIONS, OPERATIONS, CountedOperations
from tests.models_on_paper import MODELS, RANKS, RECOMPUTED, batch_of, built, one_of, plan_of, trained_loss

WHOLE_MIXING = ("gmlp", "amlp")  # blocks whose tokens every tensor rank mixes in all channels
LAYOUTS = [
    (ranks, recomputed)
    for ranks, recomputed in product(RANKS, RECOMPUTED)
    if (ranks, recomputed) != ("one", "nothing") and ("tensor" not in ranks or recomputed == "nothing")
]


def test_every_row_of_the_tables_is_in_a_model() -> None:
    """So a new row is compared with its module as soon as a model has it, and it must have one."""
    architectures = [plan.architecture for plan in map(plan_of, MODELS) if plan is not None]
    assert {kind for network in architectures for kind in network.attention} == set(BLOCKS)
    assert {kind for network in architectures for kind in network.mlp} == set(MLPS)
    assert {network.activation for network in architectures} == set(ACTIVATIONS)
    assert {network.norm for network in architectures} == set(NORMS)
    assert {network.positions for network in architectures} == set(POSITIONS)
    assert {network.residual for network in architectures} == set(RESIDUALS)
    assert {network.qk_norm for network in architectures} == set(QUERY_KEY_NORMS)
    assert {network.router for network in architectures if network.num_experts} == set(ROUTERS)


def check_parameters(plan: RunPlan) -> None:
    """Compare the number of each parameter's elements on a rank, and their sum in the plan's memory."""
    with one_of(plan) as grid:
        modules = built(plan, grid).sequential
    held = 0
    copies = 0  # which training replaces by the shared parameter
    for layer in plan.layers:
        found = {name: parameter.numel() for name, parameter in modules[layer.index].named_parameters()}
        for spec in layer.parameters:
            elements = spec.shard_numel(plan.grid.tp_size)
            if spec.experts:
                elements //= plan.grid.ep_size
            assert found[spec.name] == elements, (layer.index, spec.name)
            if spec.shared_with is None:
                held += elements
            else:
                copies += elements
    assert sum(parameter.numel() for parameter in modules.parameters()) == held + copies
    assert count_parameters(plan.workload, plan.stages[0]).held == held


def check_operations(plan: RunPlan) -> None:
    """Compare the operations of a step on one rank, with those that it repeats."""
    torch.manual_seed(0)
    batch = batch_of(plan)
    with one_of(plan) as grid:
        network = built(plan, grid)
        with CountedOperations() as step:
            trained_loss(plan, network, batch).backward()
    assert step.total == batch["tokens"].numel() * operations_of_rank(plan)


def operations_of_rank(plan: RunPlan) -> int:
    """Return the operations on paper of a step on one rank for one of its tokens."""
    length = plan.config.model.seq_length
    assert length is not None
    chunk = plan.config.training.checkpoint_num_layers
    total = training_flops_per_token(plan.layers, length, predicted=plan.config.model.predicted_tokens)
    total += recomputed_flops_per_token(plan.layers, length, plan.recomputed_parts, chunk)
    if plan.layers.lora is not None:
        # The first block's input has no gradient, as the embedding is frozen. On paper it has one, as in other blocks.
        readers = ("attention.query_key_value.weight", "attention.query_key_value.adapter.lora_A")
        total -= 2 * sum(spec.numel for spec in plan.layers[BLOCK_OFFSET].parameters if spec.name in readers)
    if plan.grid.tp_size == 1:
        return total

    # Tensor ranks divide all but what each computes whole.
    whole = 0
    for layer in plan.layers:
        each = 6 * sum(spec.active_numel for spec in layer.multiplied if spec.partition_dim is None)
        if layer.kind in ("block", "multi_token"):
            whole += each
        elif layer.kind == "masked_lm_head":
            whole += each * plan.workload.predicted_tokens // length
        elif layer.kind == "sentence_head":
            whole += each // length
    for kind in plan.architecture.attention:
        if kind in WHOLE_MIXING:
            whole += 3 * BLOCKS[kind].mixing_flops(plan.architecture, length)
    return (total + whole * (plan.grid.tp_size - 1)) // plan.grid.tp_size


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_of_the_modules(model: str) -> None:
    plan = plan_of(model)
    assert plan is not None
    check_parameters(plan)


@pytest.mark.parametrize("model", MODELS)
def test_operations_are_those_that_are_counted(model: str) -> None:
    plan = plan_of(model)
    assert plan is not None
    check_operations(plan)


def failures(check: Callable[[RunPlan], None], ranks: str, recomputed: str) -> dict[str, str]:
    """Return the models that fail a check in a layout, with their failures."""
    found = {}
    for model in MODELS:
        plan = plan_of(model, ranks, recomputed)
        if plan is None:
            continue
        try:
            check(plan)
        except AssertionError as failure:
            found[model] = str(failure).splitlines()[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_hold_their_share_of_the_parameters(ranks: str) -> None:
    assert failures(check_parameters, ranks, "nothing") == {}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "recomputed"), LAYOUTS)
def test_operations_in_layouts_are_those_that_are_counted(ranks: str, recomputed: str) -> None:
    assert failures(check_operations, ranks, recomputed) == {}


def counted(function: Callable[[], object]) -> int:
    """Return the operations of a function's products as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_attention_counts_as_products_of_all_pairs() -> None:
    q, k, v = torch.ones(2, 5, 6, 8), torch.ones(2, 7, 3, 8), torch.ones(2, 7, 3, 4)
    formula = FUNCTIONS["neox.model.attention.core_attention"]

    def products() -> Tensor:
        keys, values = (x.repeat_interleave(2, dim=2).transpose(1, 2) for x in (k, v))
        return (q.transpose(1, 2) @ keys.mT) @ values

    assert formula({"q": q, "k": k, "v": v, "pairs": None}) == counted(products)
    on_cpu = OPERATIONS[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu]
    heads = [x.transpose(1, 2) for x in (q, k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=2))]
    assert on_cpu(*heads) == counted(products)
    backward = OPERATIONS[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward]
    assert backward(heads[0], *heads) == 2 * counted(products)


def test_a_window_counts_as_products_with_its_keys() -> None:
    window = 3
    q, k, v = torch.ones(2, 7, 6, 8), torch.ones(2, 7, 6, 8), torch.ones(2, 7, 6, 8)
    pairs = VisiblePairs(7, torch.device("cpu"), None, window_rule(window), window, 1)

    def products() -> Tensor:
        def seen(x: Tensor) -> Tensor:
            return F.pad(x.transpose(1, 2), (0, 0, window - 1, 0)).unfold(2, window, 1)  # [B, N, S, D, window]

        return (q.transpose(1, 2).unsqueeze(3) @ seen(k)) @ seen(v).mT

    arguments = {"q": q, "k": k, "v": v, "pairs": pairs}
    assert FUNCTIONS["neox.model.attention.core_attention"](arguments) == counted(products)


def test_a_convolution_counts_as_products_with_its_taps() -> None:
    x, weight = torch.ones(2, 7, 6), torch.ones(6, 4)
    products = partial(torch.matmul, F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1).unsqueeze(3), weight.unsqueeze(-1))
    assert FUNCTIONS["neox.model.mixer.causal_convolution"]({"x": x, "weight": weight}) == counted(products)


def test_states_count_as_products_of_each_token() -> None:
    """What a token writes into a state is a column times a row; what it reads is a row times the state."""
    samples, length, heads, keys, values = 2, 5, 3, 4, 6
    state = torch.ones(samples, heads, keys, values)
    key, value = torch.ones(samples, length, heads, keys), torch.ones(samples, length, heads, values)

    def writes_and_reads(reads: int) -> None:
        for token in range(length):
            written = key[:, token].unsqueeze(-1) @ value[:, token].unsqueeze(-2)
            for _ in range(reads):
                key[:, token].unsqueeze(-2) @ (state + written)

    scans = {"neox.model.mamba.selective_scan": value.flatten(2), "neox.model.mamba2.chunked_scan": value}
    for name, inputs in scans.items():
        arguments = {"x": inputs, "b": key if inputs is value else key[:, :, 0]}
        assert FUNCTIONS[name](arguments) == counted(partial(writes_and_reads, 1))
    arguments = {"keys": key, "values": value}
    assert FUNCTIONS["neox.model.rwkv.wkv_scan"](arguments) == counted(partial(writes_and_reads, 1))
    rule = FUNCTIONS["neox.model.gated_delta.gated_delta_scan"]
    assert rule(arguments) == counted(partial(writes_and_reads, 2))


def test_products_that_are_added_in_place_count_as_others() -> None:
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    with CountedOperations() as in_place:
        torch.zeros(3, 5).addmm_(a, b)
        torch.zeros(2, 3, 5).baddbmm_(a.expand(2, 3, 4), b.expand(2, 4, 5))
    assert in_place.total == counted(lambda: (a @ b, a.expand(2, 3, 4) @ b.expand(2, 4, 5)))


def test_an_operation_without_a_formula_fails() -> None:
    with pytest.raises(AssertionError, match=r"aten\.linalg_inv_ex"), CountedOperations():
        torch.linalg.inv(torch.eye(3))
