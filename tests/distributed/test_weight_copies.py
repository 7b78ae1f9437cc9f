"""Second copies of ZeRO 3's weights (hpZ): the same training, and gathers in small groups after the first pass."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from neox.plan import RunPlan, resolve
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan
from tests.features import feature_of

STEPS = 3
BATCH = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}
SHARED = {"stage": 3, "stage3_param_persistence_threshold": 0}
COPIED = {**SHARED, "zero_hpz_partition_size": 2}
AVERAGED = {"ema_decay": 0.5, "eval_ema": True}


def answers_of(plans: list[RunPlan], directory: Path) -> list[dict[str, Any]]:
    """Train each plan on this rank, save it, and go on from the checkpoint in another engine.

    Returns:
        For each plan `curve`: losses; `average`: loss of an evaluation of the averaged weights; `resumed`: losses
        of the same steps as the last ones of `curve`; `gathers`: number of gathers in the last step, by size of group.
    """
    import torch.distributed as dist
    from deepspeed.runtime.zero import partition_parameters

    from neox.engine import initialize_distributed, initialize_engine, open_engine, save_checkpoint
    from neox.features.ema.run import AveragedWeights
    from neox.features.table import build_features

    gathers: Counter[int] = Counter()
    original = partition_parameters._dist_allgather_fn

    def counted(source: Any, target: Any, group: Any = None) -> Any:
        gathers[dist.get_world_size(group)] += 1
        return original(source, target, group)

    partition_parameters._dist_allgather_fn = counted
    answers = []
    for number, plan in enumerate(plans):
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device, build_features)
        data = batches(plan, grid.dp_rank)
        curve = [engine.train_batch(data).loss for _ in range(STEPS - 1)]
        path = directory / str(number)
        save_checkpoint(engine, path)
        gathers.clear()
        curve.append(engine.train_batch(data).loss)
        of_step = dict(gathers)
        average = None
        if plan.config.optimizer.ema_decay is not None:
            with feature_of(engine, AveragedWeights).in_model(engine):
                average = engine.eval_batch(batches(plan, grid.dp_rank)).scores
        curve.append(engine.train_batch(data).loss)
        config = plan.config.updated({"load": str(path)})
        resumed = open_engine(resolve(config, plan.grid.world_size, plan.vocab_size), grid, device, build_features)
        rest = batches(plan, grid.dp_rank, (STEPS - 1) * plan.batch.gradient_accumulation_steps)
        again = [resumed.train_batch(rest).loss for _ in range(2)]
        answers.append({"curve": curve, "average": average, "resumed": again, "gathers": of_step})
    return answers


def assert_equal_training(world: int, plans: list[RunPlan], directory: Path) -> list[dict[str, Any]]:
    """Train plans on ranks and compare each with the first; return the first rank's answers."""
    ranks = run_ranks(world, answers_of, plans, directory, timeout=400)
    first = ranks[0]
    for answer in first[1:]:
        assert answer["curve"] == pytest.approx(first[0]["curve"], rel=2e-6)
        assert answer["average"] == first[0]["average"] or answer["average"] == pytest.approx(first[0]["average"])
    for answer in first:
        assert answer["resumed"] == pytest.approx(answer["curve"][-2:], rel=2e-6)
    return first


@pytest.mark.parametrize("num_layers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_copies_train_the_same_and_gather_in_small_groups(tmp_path: Path, num_layers: int) -> None:
    network = {**BATCH, "num_layers": num_layers, **AVERAGED}
    plans = [tiny_plan(4, zero_optimization=SHARED, **network), tiny_plan(4, zero_optimization=COPIED, **network)]
    shared, copied = assert_equal_training(4, plans, tmp_path)
    assert set(shared["gathers"]) == {4}
    accumulation = plans[0].batch.gradient_accumulation_steps
    assert accumulation == 2
    passes = 2 * accumulation
    assert copied["gathers"][4] <= shared["gathers"][4] / passes + 1
    assert copied["gathers"][2] >= shared["gathers"][4] * (passes - 1) / passes - 1


@pytest.mark.slow
def test_copies_of_tensor_ranks_are_of_their_own_parts(tmp_path: Path) -> None:
    plans = [
        tiny_plan(4, mp=2, zero_optimization={"stage": 0}, **BATCH),
        tiny_plan(4, mp=2, zero_optimization=COPIED, **BATCH),
        tiny_plan(4, mp=2, zero_optimization={**COPIED, "zero_hpz_partition_size": 1}, **BATCH),
    ]
    assert_equal_training(4, plans, tmp_path)
