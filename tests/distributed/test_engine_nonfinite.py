"""A loss that is not finite leaves weights and schedule alone in every layout and precision, and is counted."""

import math

import pytest
import torch

from neox.errors import TrainingError
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

BF16 = {"bf16": {"enabled": True}}


def poisoned(source, micro_batches):
    """Batches whose loss mask is NaN at the given micro batches."""
    for number, batch in enumerate(source):
        if number in micro_batches:
            batch = {**batch, "loss_mask": torch.full_like(batch["loss_mask"], math.nan)}
        yield batch


def steps_with_one_poisoned(plans):
    """For each plan: three steps, the second of which sees NaN, and whether weights stayed as they were in it."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.engine.weights import gathered, weight_layers

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        per_step = plan.batch.gradient_accumulation_steps
        data = poisoned(batches(plan, grid.dp_rank), {per_step} if grid.dp_rank == 0 else set())

        def weights(engine=engine):
            copies = []
            for _, layer in weight_layers(engine.deepspeed_engine.module):
                with gathered(layer):
                    copies += [p.detach().clone() for p in layer.parameters()]
            return copies

        results = [engine.train_batch(data)]
        before, position = weights(), engine.schedule.iteration
        results.append(engine.train_batch(data))
        unchanged = all(torch.equal(a, b) for a, b in zip(before, weights(), strict=True))
        unchanged &= engine.schedule.iteration == position
        results.append(engine.train_batch(data))
        moved = not all(torch.equal(a, b) for a, b in zip(before, weights(), strict=True))
        answers.append((results, unchanged, moved))
    return answers


@pytest.mark.parametrize(
    "layouts",
    [
        [{"pp": 2}, {"zero": 2}, {"zero": 3}, {"pp": 2, "zero": 1, **BF16}, {"zero": 2, **BF16}],
        pytest.param([{"pp": 2, "zero": 1}, {"zero": 0}, {"zero": 1}, {"mp": 2, "zero": 1}], marks=pytest.mark.slow),
        pytest.param([{"pp": 2, **BF16}, *({"zero": zero, **BF16} for zero in (0, 1, 3))], marks=pytest.mark.slow),
    ],
    ids=["fast", "fp32", "bf16"],
)
def test_a_poisoned_step_changes_nothing(layouts):
    plans = [tiny_plan(2, train_micro_batch_size_per_gpu=2, **layout) for layout in layouts]
    for rank_answers in run_ranks(2, steps_with_one_poisoned, plans):
        for layout, (results, unchanged, moved) in zip(layouts, rank_answers, strict=True):
            assert [r.update_skipped for r in results] == [False, True, False], layout
            assert math.isnan(results[1].loss), layout
            assert results[1].grad_norm == math.inf, layout
            assert unchanged, layout
            assert moved, layout
            assert math.isfinite(results[2].loss), layout


def train_on_poison(plan):
    """The Trainer's end on data that is NaN from the second step on."""
    from neox.data.run_data import DataIterators
    from neox.engine import initialize_distributed, initialize_engine
    from neox.train import Trainer

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    data = poisoned(batches(plan, grid.dp_rank), range(plan.batch.gradient_accumulation_steps, 10_000))
    trainer = Trainer(plan, engine, DataIterators(data, (), ()))
    try:
        trainer.fit()
    except TrainingError as error:
        return engine.iteration, trainer.state.skipped_updates, str(error)
    return None


def test_too_many_in_a_row_end_the_run_on_every_rank():
    for iteration, skipped, message in run_ranks(2, train_on_poison, tiny_plan(2, pp=2, max_nonfinite_steps=2)):
        assert (iteration, skipped) == (4, 3)
        assert "max_nonfinite_steps" in message
