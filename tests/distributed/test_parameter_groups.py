"""Groups of parameters: updates equal to those of torch's optimizers, in every layout, and resumes."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch

from neox.errors import CheckpointError
from tests.distributed.spawn import RankError, run_ranks
from tests.distributed.test_optimizers import losses_with_saves
from tests.distributed.training_runs import batches, tiny_plan, train_curves

STEPS = 4
GROUPS = [
    {"match": "attention.*bias", "lr_factor": 0.1, "weight_decay": 0.3},
    {"match": "2.mlp.*", "frozen": True},
    {"match": "mlp.dense_h_to_4h.weight", "weight_decay": 0},
    {"match": "0.*", "lr_factor": 0.5},
]
KEYS = {"parameter_groups": GROUPS, "lr_decay_style": "constant", "warmup": 0.0}
LR = 0.005
# With a small eps Adam would take steps of full length along the keys' biases, whose gradient is rounding only.
NUMBERS = {"betas": (0.9, 0.95), "eps": 1e-5}
OPTIMIZERS = {
    "adam": ({"type": "Adam", "params": {"lr": LR, **NUMBERS}}, NUMBERS),
    "sgd": ({"type": "sgd", "params": {"lr": LR, "momentum": 0.9}}, {"momentum": 0.9}),
}


def torch_group(name, parameter):
    """The keys of a parameter's group in a plain optimizer, written by hand; None for a frozen one."""
    decay = 0.1 if parameter.dim() > 1 else 0.0
    if fnmatchcase(name, "sequential.*.attention.*bias"):
        return {"lr": 0.1 * LR, "weight_decay": 0.3}
    if name.startswith("sequential.2.mlp."):
        return None
    if name.endswith("mlp.dense_h_to_4h.weight"):
        return {"lr": LR, "weight_decay": 0.0}
    if name.startswith("sequential.0."):
        return {"lr": 0.5 * LR, "weight_decay": decay}
    return {"lr": LR, "weight_decay": decay}


def plain_training(plan, name):
    """Train the network in a plain loop with torch's optimizer; return the weights by name."""
    from neox.engine import initialize_distributed
    from neox.model import GPT, Context
    from neox.objectives import build_objective

    grid, _ = initialize_distributed(plan)
    model = GPT(plan, grid)
    objective = build_objective(plan)
    groups = []
    for key, parameter in model.named_parameters():
        group = torch_group(key, parameter)
        parameter.requires_grad_(group is not None)
        if group is not None:
            groups.append({"params": [parameter], **group})
    kind = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    optimizer = kind(groups, **OPTIMIZERS[name][1])
    data = batches(plan, 0)
    count = plan.batch.gradient_accumulation_steps
    for _ in range(STEPS):
        for _ in range(count):
            batch = next(data)
            inputs = objective.inputs(batch)
            tokens = inputs.pop("tokens")
            scores = model(
                tokens,
                Context(cache=None, **inputs),
                loss=lambda out, b=batch: objective.scores(out, objective.targets(b)),
            )
            (scores[0] / count).backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {key: parameter.detach().clone() for key, parameter in model.named_parameters()}


def engine_training(plan):
    """Train with the engine; return the weights by name, gathered under ZeRO 3."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.engine.weights import gathered

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    data = batches(plan, grid.dp_rank)
    for _ in range(STEPS):
        engine.train_batch(data)
    module = engine.deepspeed_engine.module
    with gathered(module):
        return {key: parameter.detach().clone() for key, parameter in module.named_parameters()}


def trained_both_ways(name, stages):
    plans = [tiny_plan(1, zero=zero, optimizer=OPTIMIZERS[name][0], **KEYS) for zero in stages]
    return plain_training(plans[0], name), [engine_training(plan) for plan in plans]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_those_of_a_plain_optimizer(name):
    expected, found = run_ranks(1, trained_both_ways, name, (0, 1, 3))[0]
    for weights in found:
        assert weights.keys() == expected.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=2e-7, msg=key)


def assert_layouts_agree(world, layouts, *, rounding=1e-5, **keys):
    expected = run_ranks(1, train_curves, [tiny_plan(1, **KEYS, **keys)], STEPS)[0][0]
    plans = [tiny_plan(world, **layout, **KEYS, **keys) for layout in layouts]
    for layout, curve in zip(layouts, run_ranks(world, train_curves, plans, STEPS, timeout=500)[0], strict=True):
        for (loss, norm), (loss_1, norm_1) in zip(curve, expected, strict=True):
            assert loss == pytest.approx(loss_1, rel=rounding), layout
            assert norm == pytest.approx(norm_1, rel=10 * rounding), layout


def test_layouts_agree():
    assert_layouts_agree(2, [{"pp": 2}, {"mp": 2}, {"zero": 2}, {"zero": 3}])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["Lion", "Muon", "Adam8bit"])
def test_layouts_agree_with_other_optimizers(optimizer):
    """Muon multiplies in bf16, and states of 8 bits are rounded by blocks of other elements in other layouts."""
    keys = {"optimizer": {"type": optimizer, "params": {"lr": 0.003}}, "gradient_clipping": 0.0}
    layouts = [{"zero": 0}, {"zero": 2}] if optimizer == "Muon" else [{"pp": 2}, {"mp": 2}]
    rounding = 1e-5 if optimizer == "Lion" else 5e-4
    assert_layouts_agree(2, layouts, rounding=rounding, **keys)


@pytest.mark.slow
def test_layouts_agree_with_mup_recomputation_and_four_ranks():
    mup = {"use_mup": True, "mup_base_hidden_size": 16}
    assert_layouts_agree(4, [{"pp": 2, "mp": 2, "zero": 1}, {"mp": 2, "zero": 2}], **mup, checkpoint_activations=True)


def test_a_run_resumes_at_other_degrees_and_with_other_groups(tmp_path):
    here = str(tmp_path / "run")
    whole = run_ranks(2, losses_with_saves, [tiny_plan(2, zero=1, save=here, **KEYS)], STEPS, 2)[0][0]
    resuming = [tiny_plan(1, load=here, **KEYS)]
    more_frozen = {**KEYS, "parameter_groups": [*GROUPS, {"match": "norm.*", "frozen": True}]}
    resuming.append(tiny_plan(1, load=here, **more_frozen))
    all_trained = {**KEYS, "parameter_groups": [], "no_load_optim": True}
    resuming.append(tiny_plan(1, load=here, **all_trained))
    same, frozen, new_states = run_ranks(1, losses_with_saves, resuming, STEPS, 2)[0]
    assert same == pytest.approx(whole[2:], rel=1e-5)
    for other in (frozen, new_states):
        assert other[0] == pytest.approx(whole[2], rel=1e-5)
        assert other[1] != pytest.approx(whole[3], rel=1e-6)
    with pytest.raises(RankError, match=CheckpointError.__name__):
        run_ranks(1, losses_with_saves, [tiny_plan(1, load=here, **{**KEYS, "parameter_groups": []})], STEPS, 2)
