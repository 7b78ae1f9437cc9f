"""Tensor parallelism gives one rank's numbers: logits, losses, gradients, dropout and recomputation."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist

from neox.architecture import Constant, ParameterSpec
from neox.model import GPT
from neox.optim.groups import decays
from neox.parallel import ParallelGrid, Topology, gather_last_dim, shard
from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.losses import causal_lm_loss
from tests.plans import networks_for, small_plan

HEADS = (
    {"no_weight_tying": True, "output_layer_parallelism": "column"},
    {"no_weight_tying": True, "output_layer_parallelism": "row"},
    {"no_weight_tying": False},
)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 100, (2, 17), generator=generator)
    mask = (torch.rand(2, 16, generator=generator) > 0.2).float()
    return ids[:, :-1], ids[:, 1:], mask


def randomize_vectors(model: GPT, specs: Mapping[str, ParameterSpec]) -> None:
    """Give biases and norms values of their own, the same whole vectors on every layout: zeros would hide mistakes."""
    for name, parameter in model.named_parameters():
        if not decays(parameter):
            generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
            full = torch.randn(specs[name].shape, generator=generator) * 0.1 + (specs[name].init == Constant(1.0))
            parameter.data.copy_(shard(full, specs[name], model.grid.tp_rank, model.grid.tp_size))


def specs_of(plan: RunPlan) -> dict[str, ParameterSpec]:
    """Return the parameters of the plan under the names of `GPT`."""
    return {f"sequential.{entry.index}.{spec.name}": spec for entry in plan.layers for spec in entry.parameters}


def build(grid: ParallelGrid, **keys) -> tuple[GPT, object]:
    plan = small_plan(grid.tp_size, model_parallel_size=grid.tp_size, **keys)
    model = GPT(plan, grid)
    randomize_vectors(model, specs_of(plan))
    return model, plan


def equals_one_rank(tp_size: int) -> None:
    grid = ParallelGrid.build(Topology(1, 1, tp_size))
    tokens, labels, mask = batch()
    heads = [head | {"gpt_j_residual": parallel} for head in HEADS for parallel in (True, False)]
    row = {"output_layer_parallelism": "row", "use_bias_in_lm_head": True}
    for keys in [*heads, row, *networks_for(tp_size).values()]:
        one, _ = build(ParallelGrid.single(), **keys)
        expected = one(tokens)
        expected_loss = causal_lm_loss(one, tokens, labels, mask)
        expected_loss.backward()
        model, plan = build(grid, **keys)
        logits = model(tokens)
        assert logits.shape[-1] == 128 // tp_size
        loss = causal_lm_loss(model, tokens, labels, mask)
        loss.backward()
        torch.testing.assert_close(gather_last_dim(logits.detach(), grid), expected.detach(), atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(loss, expected_loss, atol=1e-6, rtol=1e-6)
        whole = dict(one.named_parameters())
        specs = specs_of(plan)
        for name, parameter in model.named_parameters():
            if whole[name].grad is None:  # gpt-neox's gMLP has biases that nothing uses
                assert parameter.grad is None, name
                continue
            part = shard(whole[name].grad, specs[name], grid.tp_rank, tp_size)
            torch.testing.assert_close(
                parameter.grad, part, atol=2e-6, rtol=1e-4, msg=lambda m, n=name, k=keys: f"{k} {n}: {m}"
            )


@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_logits_losses_and_gradients_equal_one_rank(tp_size: int):
    run_ranks(tp_size, equals_one_rank, tp_size)


def dropout_and_recompute() -> None:
    grid = ParallelGrid.build(Topology(1, 1, 2))
    tokens, labels, mask = batch()

    # The tracker's stream differs over tensor ranks, the default one agrees.
    grid.seed(7)
    with grid.rng.fork(torch.device("cpu")):
        split = torch.rand(64)
    replicated = torch.rand(64)
    for value, same in ((split, False), (replicated, True)):
        others = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(others, value, group=grid.tp_group)
        assert torch.equal(*others) is same

    for parallel in (True, False):
        keys = {"gpt_j_residual": parallel, "hidden_dropout": 0.2, "attention_dropout": 0.3}
        results = []
        for recompute in (False, True, True):
            model, _ = build(
                grid, checkpoint_activations=recompute, checkpoint_num_layers=1 + len(results) // 2, **keys
            )
            grid.seed(11)
            losses = []
            for step in range(2):  # two steps: the streams must stand where they would without recomputation
                losses.append(causal_lm_loss(model, tokens, labels, mask))
                losses[step].backward()
            results.append([loss.detach() for loss in losses] + [p.grad for p in model.parameters()])
        for plain, *again in zip(*results, strict=True):
            assert all(torch.equal(plain, other) for other in again)
        assert not torch.equal(results[0][0], results[0][1])

        # Hidden states are replicated: with dropout on they must stay equal on all ranks.
        hidden = model.hidden(tokens).detach()
        others = [torch.empty_like(hidden) for _ in range(2)]
        dist.all_gather(others, hidden, group=grid.tp_group)
        assert torch.equal(*others)


def test_dropout_agrees_where_replicated_and_recompute_repeats_it():
    run_ranks(2, dropout_and_recompute)


def grid_of_three_axes() -> list:
    grid = ParallelGrid.build(Topology(2, 1, 2))
    groups = (grid.tp_group, grid.dp_group, grid.pp_group, grid.model_group)
    reduced = []
    for group in groups:
        value = torch.tensor([10.0**grid.rank])
        dist.all_reduce(value, group=group)
        reduced.append(value.item())
    parallel, _ = build(ParallelGrid.single())
    assert not any(getattr(parameter, "model_parallel", False) for parameter in parallel.parameters())
    return [grid.pp_rank, grid.dp_rank, grid.tp_rank, reduced]


def test_groups_hold_the_ranks_of_their_axis():
    results = run_ranks(4, grid_of_three_axes)
    assert results[0] == [0, 0, 0, [11.0, 1.0, 101.0, 1111.0]]
    assert results[3] == [1, 0, 1, [1100.0, 1000.0, 1010.0, 1111.0]]
