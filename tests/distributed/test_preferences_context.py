"""Preferences over context ranks: the losses, gradients, references and resumes of one rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.test_context_gradients import Gradients, check_alike, first_gradients
from tests.distributed.test_context_parallel import LATENT, kinds
from tests.distributed.test_preferences import KINDS, check_scores, curves, keys_of, opened, resumed, write_preferences
from tests.distributed.training_runs import tiny_plan

SHARED: dict[str, Any] = {"train_batch_size": 4, "num_layers": 2}


def compare(tmp_path: Path, kind: str, world: int, layouts: list[dict[str, Any]], **others: Any) -> None:
    """Compare scores of some steps and an evaluation with those of one rank.

    Micro batches hold all samples of a step that a model of several ranks reads: some scores are of one.
    """
    keys = {**SHARED, **keys_of(write_preferences(tmp_path), kind), **others}
    (expected,) = run_ranks(1, curves, [tiny_plan(1, train_micro_batch_size_per_gpu=4, **keys)])[0]
    plans = []
    for layout in layouts:
        ranks = layout["context_parallel_size"] * layout.get("mp", 1) * max(1, layout.get("pp", 0))
        plans.append(tiny_plan(world, train_micro_batch_size_per_gpu=4 * ranks // world, **keys, **layout))
    for rank in run_ranks(world, curves, plans, timeout=500):
        for layout, curve in zip(layouts, rank, strict=True):
            for step, wanted in zip(curve, expected, strict=True):
                check_scores(step, wanted, (kind, layout))


def test_two_context_ranks(tmp_path: Path) -> None:
    gathering, by_heads = kinds(2)
    compare(tmp_path, "sigmoid", 2, [{**gathering, "zero": 1}, {**by_heads, "zero": 3}])


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_losses_of_two_context_ranks(tmp_path: Path, kind: str) -> None:
    compare(tmp_path, kind, 2, [*kinds(2), *kinds(2, zero=3, checkpoint_activations=True)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sigmoid", "orpo", "kto", "rm"])
def test_four_ranks(tmp_path: Path, kind: str) -> None:
    """Four context ranks; and two beside two data ranks, stages and tensor ranks."""
    layouts = [*kinds(4), *kinds(2, zero=2), *kinds(2, pp=2), *kinds(2, mp=2, sequence_parallel=True, zero=1)]
    compare(tmp_path, kind, 4, layouts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [
        {"lora": {"r": 4, "alpha": 8, "target": ["query_key_value", "dense"]}},
        {"lora": {"r": 4, "alpha": 8, "target": ["dense"]}, "reference_model": "without_adapters"},
        {"reference_model": "copy"},
        LATENT,
        {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_aux_loss_coeff": 0.0},
    ],
    ids=["lora", "without_adapters", "copy", "latent", "experts"],
)
def test_networks_on_two_context_ranks(tmp_path: Path, others: dict[str, Any]) -> None:
    compare(tmp_path, "sigmoid", 2, kinds(2, zero=1), **others)


def gradients_of(plans: list[RunPlan]) -> list[Gradients]:
    """Return the gradients of the first step of each plan."""
    answers = []
    for plan in plans:
        engine, data = opened(plan)
        answers.append(first_gradients(engine, data.train))
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_gradients_of_context_ranks(tmp_path: Path, kind: str) -> None:
    keys = {**SHARED, **keys_of(write_preferences(tmp_path), kind), "train_micro_batch_size_per_gpu": 4}
    (wanted,) = run_ranks(1, gradients_of, [tiny_plan(1, **keys)])[0]
    plans = [tiny_plan(2, **keys, **layout) for layout in kinds(2)]
    for rank in run_ranks(2, gradients_of, plans):
        for plan, found in zip(plans, rank, strict=True):
            check_alike(found, wanted, plan.grid.cp_kind)


@pytest.mark.slow
def test_a_run_goes_on_with_context_ranks_and_without(tmp_path: Path) -> None:
    keys = keys_of(write_preferences(tmp_path), "sigmoid")
    shared = {**SHARED, **keys, "checkpoint_factor": 2, "train_iters": 6}
    whole = tiny_plan(2, train_micro_batch_size_per_gpu=2, **shared, save=str(tmp_path / "whole"))
    divided = {"train_micro_batch_size_per_gpu": 4, "context_parallel_size": 2, "zero": 1}
    going_on = tiny_plan(
        2, **shared, **divided, load=str(tmp_path / "whole"), iteration=4, save=str(tmp_path / "second")
    )
    back = tiny_plan(
        2, **shared, train_micro_batch_size_per_gpu=2, zero=3, load=str(tmp_path / "second"), iteration=6, save=None
    )
    first, second, third = run_ranks(2, resumed, [whole, going_on, back])[0]
    for found in (second, third):
        check_scores(found[0], first[0], "resumed")
        assert found[1] == first[1]
    assert first[0]["loss"] != pytest.approx(math.log(2), rel=1e-3)
