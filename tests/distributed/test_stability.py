"""`log_stability_every`: numbers by layer equal to those of a plain computation, in every layout."""

from __future__ import annotations

import math

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

EVERY = 2
STEPS = 4
KEYS = {"log_stability_every": EVERY, "num_layers": 2, "train_micro_batch_size_per_gpu": 4, "no_weight_tying": True}
NORMS = ("gradient_norm", "weight_norm", "update_norm")


def observed(plans):
    """Numbers of each step, gradient norms and learning rates, by plan."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.features.table import build_features

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device, build_features)
        data = batches(plan, grid.dp_rank)
        results = [engine.train_batch(data) for _ in range(STEPS)]
        answers.append([(dict(result.numbers), result.grad_norm) for result in results])
    return answers


def observed_plainly(plan):
    """The same of the second step from the model itself, on one rank with one micro batch."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.features.table import build_features

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device, build_features)
    model = engine.deepspeed_engine.module
    data = batches(plan, 0)
    engine.train_batch(data)
    seen = {}
    hooks = []
    for index, layer in model.stage.layers.items():
        block = {"block": layer, "multi_token": getattr(layer, "block", None)}.get(plan.layers[index].kind)
        if block is None:
            continue

        def note(_module, _args, output, index=index):
            seen.setdefault(f"stability/activation_rms/{index}", output[0].detach().square().mean().sqrt().item())

        hooks.append(block.register_forward_hook(note))
        attention = block.attention
        original = attention._queries_keys_values

        def with_scores(x, encode, index=index, attention=attention, original=original):
            q, k, v, gate = original(x, encode)
            scores = torch.einsum("bsnd,btnd->bnst", q.detach(), k.detach()) * attention.score_scale
            later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
            largest = scores.masked_fill(later, -math.inf).max().item()
            seen.setdefault(f"stability/attention_logit/{index}", largest)
            return q, k, v, gate

        attention._queries_keys_values = with_scores
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = engine.train_batch(data)
    squares = {}
    for name, parameter in model.named_parameters():
        layer = int(name.split(".")[1])
        for quantity, value in (("weight_norm", before[name]), ("update_norm", parameter.detach() - before[name])):
            key = f"stability/{quantity}/{layer}"
            squares[key] = squares.get(key, 0.0) + value.double().square().sum().item()
    seen |= {key: math.sqrt(square) for key, square in squares.items()}
    return dict(result.numbers), seen, result.grad_norm


@pytest.mark.parametrize("keys", [{}, {"mtp_num_layers": 2}])
def test_numbers_equal_those_of_a_plain_computation(keys):
    """Blocks of multi-token prediction, too, under the numbers of their layers, which are behind the head's."""
    plan = tiny_plan(1, **KEYS, **keys)
    found, expected, norm = run_ranks(1, observed_plainly, plan)[0]
    last = len(plan.layers) - 1
    assert f"stability/weight_norm/{last}" in found
    assert (f"stability/attention_logit/{last}" in found) == bool(keys)
    assert {key for key in found if "gradient" not in key} == set(expected)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-4), key
    of_layers = [value for key, value in found.items() if "gradient_norm" in key]
    assert math.sqrt(sum(value**2 for value in of_layers)) == pytest.approx(norm, rel=1e-5)


def assert_layouts_agree(world, layouts, rel=1e-4, **keys):
    expected = run_ranks(1, observed, [tiny_plan(1, **{**KEYS, **keys})])[0][0]
    assert [bool(values) for values, _ in expected] == [step % EVERY == 0 for step in range(1, STEPS + 1)]
    plans = []
    for layout in layouts:
        micro_batch = 4 * layout.get("pp", 1) * layout.get("mp", 1) // world
        plans.append(tiny_plan(world, **layout, **{**KEYS, **keys, "train_micro_batch_size_per_gpu": micro_batch}))
    for number, layout in enumerate(layouts):
        per_rank = run_ranks(world, observed, [plans[number]], timeout=300)
        assert all(answers == per_rank[0] for answers in per_rank), layout
        for (values, _), (wanted, _) in zip(per_rank[0][0], expected, strict=True):
            assert values.keys() == wanted.keys(), layout
            for key, value in wanted.items():
                assert values[key] == pytest.approx(value, rel=rel, abs=1e-9), (layout, key)


def test_layouts_agree():
    """Gradients are clipped in these runs; their norms are those before."""
    assert_layouts_agree(2, [{"pp": 2}, {"mp": 2}, {"zero": 1}, {"zero": 3}])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layout", "keys"),
    [
        (2, {"zero": 0}, {}),
        (2, {"zero": 2}, {"checkpoint_activations": True}),
        (2, {"mp": 2}, {"sequence_parallel": True}),
        (4, {"pp": 2, "mp": 2, "zero": 1}, {"no_weight_tying": False}),
    ],
)
def test_more_layouts_agree(world, layout, keys):
    assert_layouts_agree(world, [layout], **keys)


@pytest.mark.slow
def test_compiled_layers_and_16_bits_are_observed():
    expected = run_ranks(1, observed, [tiny_plan(1, **KEYS)])[0][0]
    changes = ({"compile_layers": True}, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    for change in changes:
        found = run_ranks(1, observed, [tiny_plan(1, **{**KEYS, **change})], timeout=400)[0][0]
        for (values, _), (wanted, _) in zip(found, expected, strict=True):
            assert values.keys() == wanted.keys()
            for key, value in wanted.items():
                assert values[key] == pytest.approx(value, rel=0.1), (change, key)
