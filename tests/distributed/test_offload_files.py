"""Offload to files of a local disk: the curves of training without it, resuming with it on and off, no file left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.test_offload import CPU, TOLERANCE
from tests.distributed.test_reshard import relay_and_still, worst
from tests.distributed.training_runs import batches, tiny_plan

STEPS = 4
# Large enough for files, in several sub-groups.
SIZES: dict[str, Any] = {"hidden_size": 64, "no_weight_tying": True}


def in_files(path: Path, *, weights: bool = True) -> dict[str, Any]:
    """Return a ZeRO block with states, and weights if wanted, in files of a directory."""
    nvme = {"device": "nvme", "nvme_path": str(path)}
    return {"stage": 3, "sub_group_size": 60_000, "offload_optimizer": nvme, "offload_param": nvme if weights else CPU}


def curves(plans: Sequence[RunPlan]) -> list[tuple[list[tuple[float, float]], int, int]]:
    """For each plan: (loss, gradient norm) of each step, and how many of the states and weights are in files."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.engine.deepspeed_patches.file_states import is_in_file

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank)
        results = [engine.train_batch(data) for _ in range(STEPS)]
        wrapper = engine.deepspeed_engine.optimizer
        kept = [value for weights in wrapper.fp32_partitioned_groups_flat for value in wrapper._states(weights)]
        parts = [p.ds_tensor for p in engine.deepspeed_engine.module.parameters()]
        counts = [sum(map(is_in_file, tensors)) for tensors in (kept, parts)]
        answers.append(([(result.loss, result.grad_norm) for result in results], *counts))
    return answers


def compare(
    cases: Sequence[dict[str, Any]], directory: Path, world: int, reference: dict[str, Any], tolerance: float
) -> None:
    """Compare each case with the same one under another ZeRO block."""
    plans = []
    for case in cases:
        blocks = (reference, in_files(directory, weights=False), in_files(directory))
        plans += [tiny_plan(world, **{**SIZES, **case, "zero_optimization": block}) for block in blocks]
    answers = run_ranks(world, curves, plans, timeout=500)[0]
    for number, case in enumerate(cases):
        (expected, *none), (states, *some), (everything, *most) = answers[3 * number : 3 * number + 3]
        assert none == [0, 0]
        assert some == [most[0], 0], "states alone are in files"
        assert min(most) > 0, "weights are in files too"
        for step, right in enumerate(expected):
            assert states[step] == pytest.approx(right, rel=tolerance), case
            assert everything[step] == pytest.approx(right, rel=tolerance), case
    assert not list(directory.iterdir()), "files have no names, so that none is left"


def test_curves_without_offload_are_equal(tmp_path):
    compare([{"precision": "fp32"}], tmp_path / "nvme", 1, {"stage": 3}, TOLERANCE["fp32"])


FURTHER: list[dict[str, Any]] = [
    *({"precision": precision} for precision in ("fp32", "bf16", "fp16")),
    {"precision": "bf16", "model_parallel_size": 2},
    {"optimizer": {"type": "Lion", "params": {"lr": 0.001}}},
    {"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}},
    {"optimizer": {"type": "Muon", "params": {"lr": 0.005}}},
]


@pytest.mark.slow
def test_curves_with_offload_to_main_memory_are_the_same_bit_for_bit(tmp_path):
    in_memory = {"stage": 3, "sub_group_size": 60_000, "offload_optimizer": CPU, "offload_param": CPU}
    compare(FURTHER, tmp_path / "nvme", 2, in_memory, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_with_files_switched_on_and_off(tmp_path, precision):
    common = {"precision": precision, **SIZES}
    save = str(tmp_path / "relay")
    blocks: dict[str, Any] = {"files": in_files(tmp_path / "nvme"), "cpu": {"stage": 2, "offload_optimizer": CPU}}
    relayed = [
        tiny_plan(2, **common, zero_optimization=blocks.get(kind, {"stage": stage}), mp=mp, save=save, load=save)
        for kind, stage, mp in (("files", 3, 1), ("off", 1, 2), ("cpu", 2, 1), ("files", 3, 2), ("files", 3, 1))
    ]
    still = tiny_plan(2, **common, zero=3, save=str(tmp_path / "still"))
    got, expected = run_ranks(2, relay_and_still, relayed, still, timeout=500)[0]
    assert worst([loss for loss, _ in got], [loss for loss, _ in expected]) < TOLERANCE[precision]
