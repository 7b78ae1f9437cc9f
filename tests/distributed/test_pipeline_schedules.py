"""Every pipeline schedule trains the same network: losses, evaluations, checkpoints, generated logits."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

STEPS = 4
LOSS_TOLERANCE = 2e-6
NORM_TOLERANCE = 1e-4
BATCH = {"train_batch_size": 8}
DEEPER = {"num_layers": 8}
TIED = {"no_weight_tying": False}
UNTIED = {"no_weight_tying": True}
INTERLEAVED = {"pipeline_schedule": "interleaved"}
DUAL = {"pipeline_schedule": "dualpipev"}


def answers_of(plans: list[RunPlan]) -> list[dict[str, Any]]:
    """Train and evaluate each plan on this rank.

    Returns:
        For each plan `curve`: (loss, gradient norm) of each step; `evaluated`: loss of an evaluation; `logits`: logits
        of a few tokens, if this rank computes them; `hashes`: hash of this rank's initial weights, by layer, on data
        rank 0.
    """
    from neox.engine import initialize_distributed, initialize_engine

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        hashes = layer_hashes(engine) if grid.dp_rank == 0 else {}
        data = batches(plan, grid.data_rank)
        results = [engine.train_batch(data) for _ in range(STEPS)]
        evaluated = engine.eval_batch(batches(plan, grid.data_rank)).scores
        logits = engine.logits(torch.arange(10).unsqueeze(0))
        answers.append(
            {
                "curve": [(result.loss, result.grad_norm) for result in results],
                "evaluated": next(iter(evaluated.values())),
                "logits": None if logits is None else logits.float().tolist(),
                "hashes": hashes,
            }
        )
    return answers


def layer_hashes(engine) -> dict[int, str]:
    """Hash the weights of each layer on this rank."""
    from neox.engine.weights import weight_layers

    hashes = {}
    for index, layer in weight_layers(engine.deepspeed_engine.module):
        content = hashlib.sha256()
        for name, parameter in sorted(layer.named_parameters()):
            content.update(name.encode() + parameter.detach().float().numpy().tobytes())
        hashes[index] = content.hexdigest()
    return hashes


@functools.cache
def one_rank(**keys: Any) -> dict[bool, dict[str, Any]]:
    """Answers of one rank, by whether the head is untied."""
    plans = [tiny_plan(1, **BATCH, **keys, **head) for head in (TIED, UNTIED)]
    ((tied, untied),) = run_ranks(1, answers_of, plans)
    return {False: tied, True: untied}


def assert_like_one_rank(world: int, layouts: list[dict[str, Any]], **keys: Any) -> None:
    """Train layouts and compare them with one rank; each of their layers must be there exactly once."""
    plans = [tiny_plan(world, **{**BATCH, **layout, **keys}) for layout in layouts]
    ranks = run_ranks(world, answers_of, plans, timeout=500)
    for number, layout in enumerate(layouts):
        expected = one_rank(**keys)[layout["no_weight_tying"]]
        found = [answers[number] for answers in ranks]
        assert all(answer["curve"] == found[0]["curve"] for answer in found)
        for (loss, norm), (expected_loss, expected_norm) in zip(found[0]["curve"], expected["curve"], strict=True):
            assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE), layout
            assert norm == pytest.approx(expected_norm, rel=NORM_TOLERANCE), layout
        assert found[0]["evaluated"] == pytest.approx(expected["evaluated"], rel=LOSS_TOLERANCE), layout
        if layout.get("mp", 1) == 1 and layout.get("expert_model_parallel_size", 1) == 1:
            assert_same_layers(found, expected, layout)


def assert_same_layers(found: list[dict[str, Any]], expected: dict[str, Any], layout: dict[str, Any]) -> None:
    """Compare logits and initial weights; a tied embedding may be on two ranks."""
    held = [index for answer in found for index in answer["hashes"]]
    copies = sum(index == 0 for index in held) - 1
    assert copies <= (0 if layout["no_weight_tying"] else 1), layout
    assert sorted(held) == sorted([*expected["hashes"], *[0] * copies]), layout
    for answer in found:
        for index, content in answer["hashes"].items():
            assert content == expected["hashes"][index], (layout, index)
    logits = [answer["logits"] for answer in found if answer["logits"] is not None]
    assert logits
    for one in logits:
        assert torch.allclose(torch.tensor(one), torch.tensor(expected["logits"]), atol=1e-4), layout


def test_two_stages_of_two_ranges() -> None:
    layouts = [
        {"pp": 2, **INTERLEAVED, **TIED},
        {"pp": 2, **INTERLEAVED, **UNTIED, "zero": 1},
        {"pp": 2, **DUAL, **TIED},
        {"pp": 2, **DUAL, **UNTIED, "zero": 1, "checkpoint_activations": True, "pipe_partition_method": "parameters"},
        {"pp": 2, **INTERLEAVED, **TIED, "train_micro_batch_size_per_gpu": 4},
    ]
    assert_like_one_rank(2, layouts)


@pytest.mark.slow
@pytest.mark.parametrize("head", [TIED, UNTIED], ids=["tied", "untied"])
def test_four_stages(head: dict[str, bool]) -> None:
    layouts = [
        {"pp": 4, **INTERLEAVED, **head},
        {"pp": 4, **INTERLEAVED, **head, "zero": 1, "checkpoint_activations": True},
        {"pp": 2, **INTERLEAVED, **head, "virtual_stages": 4},
        {"pp": 4, **DUAL, **head},
        {"pp": 4, **DUAL, **head, "zero": 1},
    ]
    assert_like_one_rank(4, layouts, **DEEPER)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [INTERLEAVED, DUAL], ids=["interleaved", "dualpipev"])
def test_tensor_and_data_ranks(schedule: dict[str, str]) -> None:
    layouts = [
        {"pp": 2, "mp": 2, **schedule, **TIED},
        {"pp": 2, "mp": 2, **schedule, **UNTIED, "zero": 1, "sequence_parallel": True},
        {"pp": 2, **schedule, **TIED, "zero": 1},
    ]
    assert_like_one_rank(4, layouts)


def reductions_and_curves(plans: list[RunPlan]) -> list[tuple[int, list[tuple[float, float]]]]:
    """Train each plan; return how many reductions of single ranges began, and (loss, gradient norm) of each step."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.engine.deepspeed_patches.range_reduction import RangeReduction

    begun = []
    start = RangeReduction.start

    def counted(reduction, chunk):
        begun.append(chunk)
        start(reduction, chunk)

    RangeReduction.start = counted  # type: ignore[method-assign]  # this process ends with the test
    answers = []
    for plan in plans:
        begun.clear()
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank)
        results = [engine.train_batch(data) for _ in range(STEPS)]
        answers.append((len(begun), [(result.loss, result.grad_norm) for result in results]))
    return answers


def test_ranges_are_reduced_during_the_backward_pass_with_the_same_numbers() -> None:
    bf16 = {**BATCH, **DUAL, **UNTIED, "pp": 2, "bf16": {"enabled": True}}
    plans = [
        tiny_plan(4, **BATCH, **INTERLEAVED, **TIED, pp=2),
        tiny_plan(4, **{**bf16, "zero_optimization": {"stage": 1, "overlap_comm": False}}),
        tiny_plan(4, **{**bf16, "zero_optimization": {"stage": 1}}),
    ]
    for (begun, curve), at_the_end, overlapped in run_ranks(4, reductions_and_curves, plans):
        assert begun == 2 * STEPS
        for (loss, norm), (expected_loss, expected_norm) in zip(curve, one_rank()[False]["curve"], strict=True):
            assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE)
            assert norm == pytest.approx(expected_norm, rel=NORM_TOLERANCE)
        assert at_the_end[0] == 0
        assert overlapped[0] == 2 * STEPS
        assert overlapped[1] == at_the_end[1]


def run_and_save(plan: RunPlan) -> None:
    """Train two steps and save."""
    from neox.engine import initialize_distributed, open_engine, save_checkpoint

    grid, device = initialize_distributed(plan)
    engine = open_engine(plan, grid, device)
    data = batches(plan, grid.dp_rank)
    for _ in range(2):
        engine.train_batch(data)
    save_checkpoint(engine, plan.config.checkpoint.save)


def resumed_curves(plans: list[RunPlan]) -> list[list[tuple[float, float]]]:
    """Load each plan's checkpoint and train two steps."""
    from neox.engine import initialize_distributed, open_engine

    curves = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device)
        assert engine.iteration == 2
        data = batches(plan, grid.dp_rank, start=2 * plan.batch.gradient_accumulation_steps)
        results = [engine.train_batch(data) for _ in range(2)]
        curves.append([(result.loss, result.grad_norm) for result in results])
    return curves


@pytest.mark.parametrize(
    "saved_with",
    [pytest.param(INTERLEAVED, id="interleaved", marks=pytest.mark.slow), pytest.param(DUAL, id="dualpipev")],
)
def test_a_run_goes_on_with_another_schedule(saved_with: dict[str, str], tmp_path) -> None:
    keys = {**BATCH, **TIED, "zero": 1, "pp": 2}
    run_ranks(2, run_and_save, tiny_plan(2, **keys, **saved_with, save=str(tmp_path)))
    others = [tiny_plan(2, **keys, **schedule, load=str(tmp_path)) for schedule in ({}, INTERLEAVED, DUAL)]
    expected = one_rank()[False]["curve"][2:]
    for curve in run_ranks(2, resumed_curves, others)[0]:
        for (loss, norm), (expected_loss, expected_norm) in zip(curve, expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE)
            assert norm == pytest.approx(expected_norm, rel=NORM_TOLERANCE)


UNEVEN = {"num_layers": 7}
UNEVEN_LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2},
    {"pp": 2, **INTERLEAVED},
    {"pp": 2, **INTERLEAVED, "virtual_stages": 3},
    {"pp": 2, **DUAL},
    {"pp": 2, **DUAL, "pipe_partition_method": "parameters"},
]


def initial_and_saved_hashes(plan: RunPlan, save: str) -> tuple[dict[int, str], dict[int, str]]:
    """Return the hash of each layer's initial weights on this one rank, and of those that it saves after a step."""
    from neox.engine import initialize_distributed, initialize_engine, save_checkpoint

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    initial = layer_hashes(engine)
    engine.train_batch(batches(plan, grid.dp_rank))
    save_checkpoint(engine, Path(save))
    return initial, layer_hashes(engine)


def hashes_at_start(plans: list[RunPlan]) -> list[dict[int, str]]:
    """Return the hash of each layer on this rank when each plan starts, from initial weights or those of `load`."""
    from neox.engine import initialize_distributed, open_engine

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        answers.append(layer_hashes(open_engine(plan, grid, device)))
    return answers


def test_uneven_ranges_hold_each_layer_once_at_the_start_and_at_every_load(tmp_path: Path) -> None:
    one = tiny_plan(1, **BATCH, **UNEVEN, **UNTIED)
    ((initial, saved),) = run_ranks(1, initial_and_saved_hashes, one, str(tmp_path))
    assert sorted(initial) == sorted(saved)
    assert all(initial[index] != saved[index] for index in initial), "every layer is trained"
    plans = []
    for layout in UNEVEN_LAYOUTS:
        plans.append(tiny_plan(2, **BATCH, **UNEVEN, **UNTIED, **layout))
        plans.append(tiny_plan(2, **BATCH, **UNEVEN, **UNTIED, **layout, load=str(tmp_path)))
    ranks = run_ranks(2, hashes_at_start, plans)
    for number, plan in enumerate(plans):
        expected = initial if plan.config.checkpoint.load is None else saved
        held = [answers[number] for answers in ranks]
        assert sum(map(len, held)) == len(expected), "no layer is held twice"
        assert held[0] | held[1] == expected, UNEVEN_LAYOUTS[number // 2]


EXPERTS = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_aux_loss_coeff": 0.01}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [INTERLEAVED, DUAL], ids=["interleaved", "dualpipev"])
def test_ranks_that_divide_experts(schedule: dict[str, str]) -> None:
    divided = {"pp": 2, **schedule, **UNTIED, "expert_model_parallel_size": 2}
    assert_like_one_rank(4, [divided, {**divided, "zero": 1}], **EXPERTS)


@pytest.mark.slow
def test_context_ranks() -> None:
    layouts = []
    for schedule in (INTERLEAVED, DUAL):
        for kind in ("all_gather", "ulysses"):
            context = {"context_parallel_size": 2, "context_parallel_kind": kind}
            layouts.append({"pp": 2, **schedule, **UNTIED, **context, "zero": 1})
    assert_like_one_rank(4, layouts)
