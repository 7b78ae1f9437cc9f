"""Masked language modelling: equal curves over layouts, evaluation, checkpoints at other degrees, 16 bits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.distributed.spawn import run_ranks
from tests.distributed.test_layouts_curves import TOLERANCE
from tests.distributed.test_reshard import plan_of, relay_and_still, worst
from tests.distributed.training_runs import batches, legal_layouts, tiny_plan
from tests.plans import ENCODERS

STEPS = 6


def curves_and_scores(plans):
    """Train each plan; return losses and gradient norms, and the scores of an evaluation at the end."""
    from neox.engine import initialize_distributed, initialize_engine

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank)
        results = [engine.train_batch(data) for _ in range(STEPS)]
        scores = engine.eval_batch(batches(plan, grid.dp_rank, 1000 * plan.batch.gradient_accumulation_steps)).scores
        answers.append(([({**r.scores}, r.grad_norm) for r in results], scores))
    return answers


def one_rank(keys):
    return run_ranks(1, curves_and_scores, [tiny_plan(1, **keys)])[0][0]


def assert_equal(world, layouts, keys, reference=None):
    """Compare curves and scores with a reference's, or with the first layout's."""
    plans = [tiny_plan(world, **layout, **keys) for layout in layouts]
    answers = run_ranks(world, curves_and_scores, plans, timeout=500)
    assert all(answer == answers[0] for answer in answers), "ranks report different numbers"
    expected, scores = reference or answers[0][0]
    for layout, (curve, found) in zip(layouts, answers[0], strict=True):
        for step, ((losses, norm), (losses_1, norm_1)) in enumerate(zip(curve, expected, strict=True)):
            assert losses == pytest.approx(losses_1, rel=TOLERANCE), (world, layout, step)
            assert norm == pytest.approx(norm_1, rel=1e-4), (world, layout, step)
        assert found == pytest.approx(scores, rel=1e-4), layout
    assert max(norm for _, norm in expected) > 0.5, "clipping is not exercised"


def test_curves_and_scores_are_equal():
    assert_equal(2, [{"pp": 2}, {"mp": 2}, {"zero": 3}], {**ENCODERS["bert"], "checkpoint_activations": True})


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("world", [2, 4])
def test_all_layouts_are_equal(world, name):
    assert_equal(world, legal_layouts(world), ENCODERS[name], one_rank(ENCODERS[name]))


@pytest.mark.slow
def test_a_relay_of_layouts_is_an_undisturbed_run(tmp_path):
    save, keys = str(tmp_path / "relay"), {**ENCODERS["bert"], "num_layers": 2}
    layouts = [{"pp": 2}, {"mp": 2}, {"zero": 1}, {"pp": 2}]
    relayed = [tiny_plan(2, **layout, save=save, load=save, **keys) for layout in layouts]
    still = tiny_plan(2, zero=1, save=str(tmp_path / "still"), **keys)
    got, expected = run_ranks(2, relay_and_still, relayed, still, timeout=300)[0]
    assert worst([loss for loss, _ in got], [loss for loss, _ in expected]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("block", [{"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}])
def test_sixteen_bits_follow_fp32(block):
    keys = ENCODERS["megatron_bert"]
    expected, _ = one_rank(keys)
    plans = [tiny_plan(2, **layout, **block, **keys) for layout in ({"pp": 2}, {"mp": 2}, {"zero": 2})]
    for curve, _ in run_ranks(2, curves_and_scores, plans, timeout=300)[0]:
        for (losses, _), (losses_1, _) in zip(curve, expected, strict=True):
            assert losses["loss"] == pytest.approx(losses_1["loss"], rel=2e-2)


def random_network(chance: random.Random) -> dict[str, Any]:
    """Choose a bidirectional network whose sizes four tensor ranks divide."""
    heads, width = chance.choice([4, 8]), chance.choice([8, 12, 16])
    length = chance.randint(9, 24)
    keys = {
        **chance.choice([*ENCODERS.values()]),
        "num_layers": chance.randint(4, 6),
        "hidden_size": heads * width,
        "num_attention_heads": heads,
        "mlp_width": 4 * chance.randint(8, 24),
        "activation": chance.choice(["gelu", "gelu_tanh", "relu", "silu"]),
        "norm": chance.choice(["layernorm", "rmsnorm"]),
        "attention_config": [[[chance.choice(["global", "flash"])], "all"]],
        "seq_length": length,
        "max_position_embeddings": length + chance.choice([0, 7]),
        "max_preds_per_seq": chance.randint(2, length // 2),
        "norm_placement": chance.choice(["input", "post"]),
        "embed_layernorm": chance.random() < 0.5,
        "bert_binary_head": chance.random() < 0.7,
        "num_tokentypes": chance.choice([0, 2, 3]),
        "use_bias_in_attn_linear": chance.random() < 0.7,
        "checkpoint_activations": chance.random() < 0.3,
    }
    return keys if keys["num_tokentypes"] or not keys["bert_binary_head"] else {**keys, "num_tokentypes": 2}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_random_networks_go_on_at_other_degrees(tmp_path, world):
    chance = random.Random(world)
    for number in range(7):
        keys, layouts = random_network(chance), chance.sample(legal_layouts(world), 2)
        save = str(tmp_path / f"relay{number}")
        relayed = [plan_of(world, layout, save=save, load=save, **keys) for layout in layouts]
        still = tiny_plan(world, zero=1, save=str(tmp_path / f"still{number}"), **keys)
        got, expected = run_ranks(world, relay_and_still, relayed, still, timeout=300)[0]
        assert worst([loss for loss, _ in got], [loss for loss, _ in expected]) < 1e-6, (layouts, keys)
