"""Flipped bits on one of three data ranks: found before the next update or save, with the name of the rank."""

import pytest
import torch

from neox.features.replica_check.run import ranks_that_differ, sum_of_bits
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan
from tests.features import feature_of

SIZES = {"train_batch_size": 6}
FLIPPED = 1


def flip(tensor, element=5, bit=3):
    """Flip one bit of a tensor."""
    words = tensor.detach().view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    words[element] ^= 1 << bit


def find_flips(plans, where):
    """Train each plan with a flip after step 3; return (steps that were completed, the error's step and ranks)."""
    from neox.engine import initialize_distributed, initialize_engine, roll_back, save_checkpoint
    from neox.errors import ReplicaError
    from neox.features.replica_check.run import ReplicaCheck
    from neox.features.table import build_features

    def run(plan, place):
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device, build_features)
        data = batches(plan, grid.data_rank)
        try:
            for _ in range(3):
                engine.train_batch(data)
            if place == "weight after a rollback":
                save_checkpoint(engine, plan.config.checkpoint.save)
                engine.train_batch(data)  # the step that is checked, and repeated
                roll_back(engine, 4)
            if grid.rank == FLIPPED and place.startswith("weight"):
                flip(next(engine.deepspeed_engine.module.parameters()))
            if grid.rank == FLIPPED and place == "momentum":
                tensor = engine.optimizer.param_groups[0]["params"][0]
                flip(engine.optimizer.state[tensor]["exp_avg"])
            if place == "save":
                flip(next(engine.deepspeed_engine.module.parameters()), bit=grid.rank)
                feature_of(engine, ReplicaCheck).before_save(engine)
            for _ in range(3):
                engine.train_batch(data)
        except ReplicaError as error:
            return engine.iteration, error.step, error.ranks
        return engine.iteration, None, ()

    return [run(plan, place) for plan, place in zip(plans, where, strict=True)]


@pytest.mark.parametrize("chosen", [(0, 3, 7), pytest.param((1, 2, 4, 5, 6), marks=pytest.mark.slow)])
def test_the_rank_with_a_flipped_bit_is_named(chosen, tmp_path):
    every_step = {"check_replicas_every": 1, **SIZES}
    plans = [
        tiny_plan(3, check_replicas_every=2, **SIZES),
        tiny_plan(3, **every_step),
        tiny_plan(3, zero=1, **every_step),
        tiny_plan(3, zero=2, precision="bf16", **every_step),
        tiny_plan(3, zero=1, check_replicas_every=5, **SIZES),
        tiny_plan(3, **every_step),
        tiny_plan(3, **SIZES),
        tiny_plan(3, check_replicas_every=4, save=str(tmp_path), **SIZES),
    ]
    where = ["weight", "momentum", "weight", "weight", "save", "nowhere", "weight", "weight after a rollback"]
    expected = [
        (3, 4, (FLIPPED,)),
        (3, 4, (FLIPPED,)),
        (3, 4, (FLIPPED,)),
        (3, 4, (FLIPPED,)),
        (3, 3, ()),  # all three differ
        (6, None, ()),
        (6, None, ()),  # nothing is compared without the key
        (3, 4, (FLIPPED,)),
    ]
    plans, where, expected = ([values[number] for number in chosen] for values in (plans, where, expected))
    for answers in run_ranks(3, find_flips, plans, where, timeout=300):
        assert answers == expected


def test_each_bit_of_each_kind_of_number_counts():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensors = [torch.randn(7, generator=generator).to(dtype), torch.randn(3, 5, generator=generator).to(dtype)]
        before = int(sum_of_bits(tensors))
        for bit in range(8 * tensors[1].element_size() - 1):
            flip(tensors[1], element=11, bit=bit)
            assert int(sum_of_bits(tensors)) != before
            flip(tensors[1], element=11, bit=bit)
        assert int(sum_of_bits(tensors)) == before
        assert int(sum_of_bits(tensors[::-1])) != before


def test_the_sum_is_on_the_device_of_the_weights():
    weights = torch.empty(3, device="meta")
    counter = torch.ones(())  # in CPU memory, as in Adafactor's state
    assert sum_of_bits([weights, counter]).device == weights.device


@pytest.mark.parametrize(
    ("sums", "different"), [([5, 5, 5], []), ([5, 6, 5], [1]), ([5, 6], [0, 1]), ([1, 2, 3], [0, 1, 2]), ([4], [])]
)
def test_who_differs(sums, different):
    assert ranks_that_differ(sums) == different
