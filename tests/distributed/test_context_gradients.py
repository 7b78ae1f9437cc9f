"""Each parameter's gradient over context ranks is one rank's; dropout draws no mask twice; bf16 stays near fp32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from neox.parallel import gather_tensor_ranks
from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.test_context_parallel import BASE, DOCUMENTS, GROUPED, LATENT, curves, kinds, uneven
from tests.distributed.training_runs import tiny_plan

Gradients = dict[str, list[Any]]


def first_gradients(engine: Any, data: Iterator[dict[str, torch.Tensor]]) -> Gradients:
    """Return the gradient of each parameter in the next step, before it is clipped."""
    found: Gradients = {}
    step = engine.optimizer.step

    def recording_step(*args: Any) -> Any:
        for name, parameter in engine.deepspeed_engine.module.named_parameters():
            found[name] = parameter.grad.tolist()
        return step(*args)

    engine.optimizer.step = recording_step
    engine.train_batch(data)
    return found


def gradients_of(plans: list[RunPlan]) -> list[Gradients]:
    """Return the gradients of the first step of each plan."""
    from neox.engine import initialize_distributed, initialize_engine

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        answers.append(first_gradients(initialize_engine(plan, grid, device), uneven(plan, grid.data_rank)))
    return answers


def check_alike(found: Gradients, wanted: Gradients, what: object) -> None:
    """Compare the gradients of all parameters with those of one rank."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        gradient = torch.tensor(value)
        difference = (torch.tensor(found[name]) - gradient).abs().max()
        largest = gradient.abs().max()
        assert largest > 0, name
        assert difference <= 1e-5 * largest, (what, name)


def check_gradients(world: int, **network: Any) -> None:
    plans = [tiny_plan(world, **BASE, **layout, **network) for layout in kinds(world)]
    wanted = run_ranks(1, gradients_of, [tiny_plan(1, **BASE, **network)], timeout=300)[0][0]
    for rank in run_ranks(world, gradients_of, plans, timeout=500):
        for plan, found in zip(plans, rank, strict=True):
            check_alike(found, wanted, plan.grid.cp_kind)


def test_gradients_of_two_context_ranks() -> None:
    check_gradients(2, **DOCUMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("network", [{}, GROUPED, LATENT, {**DOCUMENTS, "pos_emb": "learned"}])
def test_gradients_of_context_ranks(network: dict[str, Any]) -> None:
    check_gradients(2, **network)
    if "num_kv_heads" not in network:  # four context ranks cannot exchange two heads
        check_gradients(4, **network)


def masks_of(plan: RunPlan) -> list[list[list[bool]]]:
    """Return which numbers the embedding keeps for this rank's tokens: those of all tensor ranks."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.engine.weights import weight_layers

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    masks: list[torch.Tensor] = []

    def note(module: Any, inputs: Any, output: torch.Tensor) -> None:
        masks.append(output.detach() != 0)

    embedding = dict(weight_layers(engine.deepspeed_engine.module))[0]
    embedding.register_forward_hook(note)
    engine.train_batch(uneven(plan, grid.data_rank))
    kept = gather_tensor_ranks(masks[0].float(), grid)  # [tp, B, S/cp, H]
    return (kept[:, 0] > 0).tolist()


def check_masks(world: int, mp: int) -> None:
    plan = tiny_plan(world, **BASE, mp=mp, hidden_dropout=0.5, context_parallel_size=2)
    rows = []
    for rank in run_ranks(world, masks_of, plan, timeout=300)[::mp]:
        assert all(of_tensor_rank == rank[0] for of_tensor_rank in rank)
        rows += [tuple(token) for token in rank[0]]
    assert len(rows) == 16
    assert len(set(rows)) == 16
    kept = torch.tensor(rows).float().mean().item()
    assert 0.35 < kept < 0.65


def test_no_two_tokens_share_a_dropout_mask() -> None:
    check_masks(2, 1)


@pytest.mark.slow
def test_tensor_ranks_draw_the_same_masks() -> None:
    check_masks(4, 2)


@pytest.mark.slow
def test_losses_in_bf16_are_near_those_of_one_rank() -> None:
    keys = {"precision": "bf16", "zero": 1, **DOCUMENTS}
    (expected,) = run_ranks(1, curves, [tiny_plan(1, **BASE, **keys)], 4, timeout=300)[0]
    plans = [tiny_plan(2, **BASE, **keys, **layout) for layout in kinds(2)]
    for found in run_ranks(2, curves, plans, 4, timeout=500)[0]:
        for (loss, _), (one_loss, _) in zip(found, expected, strict=True):
            assert loss == pytest.approx(one_loss, rel=0.02)
