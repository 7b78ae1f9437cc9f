"""Modules that are used more than once in a step, under ZeRO 2 in bf16 on two ranks.

DeepSpeed 0.18.3 to 0.19.3 lost gradients of them without a word (DeepSpeed#8224); versions older than the installed one
are refused. A small network on CPUs did not show the fault with 0.19.3 either: the test says that gradients are whole
now, not that it would have found it.
"""

import pytest

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import tiny_plan, train_curves

REPEATED = {
    "a tied head": {"no_weight_tying": False},
    "a score bias that layers share": {"pos_emb": "rpe", "rpe_num_buckets": 8, "rpe_max_distance": 12},
    "an MLP that computes tile by tile": {"mlp_tile_size": 4, "no_weight_tying": True},
    "recomputed blocks": {"checkpoint_activations": True, "no_weight_tying": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REPEATED)
def test_gradients_of_repeated_modules_are_whole(name):
    keys = {**REPEATED[name], "precision": "bf16", "gradient_clipping": 0.0, "train_batch_size": 8}
    plans = [tiny_plan(2, zero=stage, **keys) for stage in (1, 2)]
    first, second = run_ranks(2, train_curves, plans, 6)[0]
    for (loss_1, norm_1), (loss_2, norm_2) in zip(first, second, strict=True):
        assert loss_2 == pytest.approx(loss_1, rel=2e-3)
        assert norm_2 == pytest.approx(norm_1, rel=2e-2)
