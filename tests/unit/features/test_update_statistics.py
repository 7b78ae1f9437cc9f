"""Statistics of updates that were skipped."""

from types import SimpleNamespace

import torch

from neox.engine import StepResult
from neox.engine.optimizer_tensors import CountedRange
from neox.features.update_statistics.run import UpdateStatistics
from tests.plans import small_plan


def test_a_skipped_update_has_none_and_leaves_nothing_to_the_next():
    weights = torch.nn.Parameter(torch.full((4,), 2.0))
    optimizer = SimpleNamespace(param_groups=[{"params": [weights]}], state={weights: {}})
    model = SimpleNamespace(
        plan=small_plan(log_param_norm=True),
        optimizer=optimizer,
        divides_optimizer=False,
        counted_ranges=lambda: {weights: [CountedRange(0, 0, 4)]},
    )
    engine = SimpleNamespace(grid=SimpleNamespace(dp_rank=0), gather=lambda own: [own])
    statistics = UpdateStatistics(model)
    for skipped, expected in ((False, {"train/param_norm": 4.0}), (True, {}), (False, {"train/param_norm": 4.0})):
        weights.grad = torch.ones(4)
        statistics.before_update(engine)
        statistics.after_update(engine)
        result = StepResult({"lm_loss": 1.0}, grad_norm=1.0, loss_scale=1.0, lr=0.1, update_skipped=skipped)
        assert statistics.after_step(engine, result) == expected
