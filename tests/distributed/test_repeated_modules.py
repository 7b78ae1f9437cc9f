"""Modules that are used more than once in a step: their gradients are the sum over all uses and the mean over ranks.

DeepSpeed 0.18.3 to 0.19.3 gave wrong gradients of them without a word (DeepSpeed#8224: ZeRO 2, bf16, several ranks).
Gradients are read from one step of SGD, in which a weight moves by its gradient times the learning rate, and compared
with those of one rank in fp32, which reduces nothing. Faults put into DeepSpeed's reductions show that this sees them.
"""

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

REPEATED = {
    "a tied head": {"no_weight_tying": False},
    "a score bias that layers share": {"pos_emb": "rpe", "rpe_num_buckets": 8, "rpe_max_distance": 12},
    "an MLP that computes tile by tile": {"mlp_tile_size": 4, "no_weight_tying": True},
    "recomputed blocks": {"checkpoint_activations": True, "no_weight_tying": True},
}
LEARNING_RATE = 100.0  # weights after the step are then gradients but for a thousandth, so that bf16 can hold them
STEP = {
    "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
    "lr_decay_style": "constant",
    "warmup": 0.0,
    "weight_decay": 0.0,
    "gradient_clipping": 0.0,
}
FAULTS = ("a use is lost", "not reduced")


def gradients(plans, faults=()):
    """On this rank: {(layer, parameter): gradient} of a step of each plan, then of the last plan with each fault."""
    found = [_one_step(plan) for plan in plans]
    return found + [_one_faulty_step(plans[-1], fault) for fault in faults]


def _one_faulty_step(plan, fault):
    from deepspeed import comm
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    reduce = DeepSpeedZeroOptimizer.reduce_independent_p_g_buckets_and_remove_grads

    def reduce_half(optimizer, param, group):
        optimizer.get_gradient_for_reduction(param).mul_(0.5)
        return reduce(optimizer, param, group)

    with pytest.MonkeyPatch.context() as patched:
        if fault == "a use is lost":
            patched.setattr(DeepSpeedZeroOptimizer, reduce.__name__, reduce_half)
        else:
            for name in ("all_reduce", "reduce", "reduce_scatter_fn"):
                patched.setattr(comm, name, lambda *_, **__: None)
        return _one_step(plan)


def _one_step(plan):
    from neox.engine import initialize_distributed, initialize_engine
    from neox.engine.weights import weight_layers

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)

    def weights():
        layers = weight_layers(engine.deepspeed_engine.module)
        return {
            (index, name): p.detach().float().clone() for index, layer in layers for name, p in layer.named_parameters()
        }

    before = weights()
    engine.train_batch(batches(plan, grid.data_rank))
    return {key: ((before[key] - value) / LEARNING_RATE).numpy() for key, value in weights().items()}


def furthest(found, right):
    """Return the largest distance of a gradient from the right one, relative to the right one's norm."""
    assert found.keys() == right.keys()
    distances = []
    for key, value in right.items():
        one, other = torch.from_numpy(found[key]), torch.from_numpy(value)
        distances.append(((one - other).norm() / other.norm()).item())
    return max(distances)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if place else []) for place, name in enumerate(REPEATED)]
)
def test_gradients_of_repeated_modules_are_whole(name):
    keys = {**REPEATED[name], **STEP}
    (right,) = run_ranks(1, gradients, [tiny_plan(1, **keys)])[0]
    plans = [tiny_plan(2, zero=stage, precision="bf16", **keys) for stage in (0, 1, 2)]
    for rank in run_ranks(2, gradients, plans, FAULTS):
        distances = [furthest(found, right) for found in rank]
        assert distances[:3] == pytest.approx([0, 0, 0], abs=0.15), "more than bf16 rounds"
        assert min(distances[3:]) > 0.3, f"these were not seen: {FAULTS}"
