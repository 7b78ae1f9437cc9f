"""Ranks and batches of a configuration: degrees that divide, two of three batch keys, aliases of them."""

from __future__ import annotations

import pytest

from neox.config import NeoXConfig
from neox.plan import resolve
from tests.plans import problem_keys, problems_of


class TestGridAndBatch:
    @pytest.mark.parametrize(("world", "degrees", "nearest"), [(6, (2, 2), "4 or 8 GPUs"), (1, (2, 1), "2 GPUs")])
    def test_world_must_divide(self, tiny, world, degrees, nearest):
        keys = dict(zip(("pipe_parallel_size", "model_parallel_size"), degrees, strict=True))
        (problem,) = problems_of(world, **{**tiny, **keys})
        assert problem.keys == tuple(keys)
        assert nearest in problem.message

    @pytest.mark.parametrize("asked", [0, 1])
    def test_zero_and_one_are_one_stage(self, tiny, asked):
        assert resolve(NeoXConfig.from_flat({**tiny, "pipe_parallel_size": asked}), 2, 100).grid.pp_size == 1

    @pytest.mark.parametrize(
        ("total", "micro", "steps", "expected"),
        [
            (None, 2, 3, (24, 2, 3)),
            (None, 2, None, (8, 2, 1)),
            (24, 2, None, (24, 2, 3)),
            (24, None, 3, (24, 2, 3)),
            (24, None, None, (24, 6, 1)),
            (24, 2, 3, (24, 2, 3)),
        ],
    )
    def test_any_two_give_the_third(self, tiny, total, micro, steps, expected):
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        plan = resolve(NeoXConfig.from_flat({**tiny, **dict(zip(keys, (total, micro, steps), strict=True))}), 4, 100)
        batch = plan.batch
        assert tuple(getattr(batch, key) for key in keys) == expected
        assert tuple(plan.deepspeed[key] for key in keys) == expected

    @pytest.mark.parametrize(
        ("total", "micro", "steps", "nearest"),
        [
            (25, 2, 3, "train_batch_size 24"),
            (25, 2, None, "train_batch_size 24 with gradient_accumulation_steps 3"),
            (2, 2, None, "train_batch_size 8 with gradient_accumulation_steps 1"),
            (3, None, None, "train_batch_size 4"),
        ],
    )
    def test_contradictions_name_the_nearest(self, tiny, total, micro, steps, nearest):
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        (problem,) = problems_of(4, **{**tiny, **dict(zip(keys, (total, micro, steps), strict=True))})
        assert problem.keys == keys
        assert nearest in problem.message

    def test_aliases_set_what_they_name(self, tiny):
        del tiny["train_micro_batch_size_per_gpu"]
        config = NeoXConfig.from_flat({**tiny, "batch_size": 3, "gas": 2, "clip_grad": 0.5, "zero_stage": 1, "lr": 0.1})
        plan = resolve(config, 2, 100)
        assert plan.batch.train_batch_size == 12
        assert plan.deepspeed["gradient_clipping"] == 0.5
        assert plan.deepspeed["zero_optimization"]["stage"] == 1
        assert config.optimizer.optimizer.params.lr == 0.1

    def test_contradicting_aliases_are_refused(self, tiny):
        assert problem_keys(**{**tiny, "batch_size": 3}) == [("batch_size", "train_micro_batch_size_per_gpu")]
        contradiction = {"deepspeed_slurm": True, "launcher": "pdsh"}
        assert problem_keys(**{**tiny, **contradiction}) == [("deepspeed_slurm", "launcher")]

    def test_launcher_from_v2_flags(self, tiny):
        assert NeoXConfig.from_flat({**tiny, "deepspeed_slurm": True}).runner.launcher == "slurm"
        assert NeoXConfig.from_flat({**tiny, "deepspeed_mpi": True}).runner.launcher == "openmpi"
