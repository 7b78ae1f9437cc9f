"""Low-rank adapters: the same curve in every layout, frozen weights, checkpoints, merged weights."""

import pytest
import torch

from neox.checkpoint import CheckpointReader
from neox.errors import CheckpointError
from tests.distributed.spawn import run_ranks
from tests.distributed.test_multi_token import MODULES, SHARES, check, finetuned
from tests.distributed.test_reshard import plan_of, relay_and_still, worst
from tests.distributed.training_runs import batches, tiny_plan, train_curves
from tests.errors import raises_naming
from tests.unit.checkpoint.synthetic import seeded_weights, write_checkpoint

STEPS = 6
EVERYWHERE = {"r": 4, "alpha": 8, "target": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]}
KEYS = {"lora": EVERYWHERE, "gradient_clipping": 0.02, "optimizer": {"type": "Adam", "params": {"lr": 0.02}}}


def assert_equal_curves(world, layouts, **keys):
    expected = run_ranks(1, train_curves, [tiny_plan(1, **KEYS, **keys)], STEPS)[0][0]
    plans = [tiny_plan(world, **layout, **KEYS, **keys) for layout in layouts]
    per_rank = run_ranks(world, train_curves, plans, STEPS, timeout=500)
    for layout, curve in zip(layouts, per_rank[0], strict=True):
        for step, ((loss, norm), (loss_1, norm_1)) in enumerate(zip(curve, expected, strict=True)):
            assert loss == pytest.approx(loss_1, rel=1e-5), (layout, step)
            assert norm == pytest.approx(norm_1, rel=1e-4), (layout, step)
    assert expected[-1][0] < expected[0][0]


def test_curves_are_equal():
    assert_equal_curves(2, [{"pp": 2}, {"mp": 2}, {"zero": 1}])


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [{}, {"gpt_j_residual": True, "no_weight_tying": True, "checkpoint_activations": True}]
)
def test_curves_are_equal_in_more_layouts(keys):
    layouts = [{"pp": 2, "zero": 1}, {"mp": 2, "zero": 1}, {"mp": 2}, {"zero": 0}, {"zero": 2}, {"zero": 3}]
    # DeepSpeed PR 8130: frozen norms that are divided were divided again while a block was recomputed.
    layouts.append({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
    assert_equal_curves(2, layouts, **keys)
    assert_equal_curves(4, [{"pp": 2, "mp": 2, "zero": 1}], **keys)


LATENT = {
    "attention_config": ["latent"] * 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "head_dim": 8,
    "v_head_dim": 6,
    "norm": "rmsnorm",
    "use_bias_in_qkv": False,
    "use_bias_in_attn_linear": False,
}
OF_LATENT = {
    "lora": {"r": 4, "alpha": 8, "target": ["query_down", "query_up", "key_value_down", "key_value_up", "dense"]}
}
OF_QUERIES = {"lora": {"r": 4, "alpha": 8, "target": ["query", "key_value_down", "dense_h_to_4h"]}, "q_lora_rank": None}
WITH_MODULES = {"lora": {"r": 4, "alpha": 8, "target": ["query_key_value", "dense", "dense_h_to_4h", "eh_proj"]}}


def check_losses(layouts, **keys):
    expected = run_ranks(1, train_curves, [tiny_plan(1, **keys)], STEPS)[0][0]
    curves = run_ranks(2, train_curves, [tiny_plan(2, **layout, **keys) for layout in layouts], STEPS, timeout=500)[0]
    for layout, curve in zip(layouts, curves, strict=True):
        for step, ((loss, norm), (loss_1, norm_1)) in enumerate(zip(curve, expected, strict=True)):
            assert loss == pytest.approx(loss_1, rel=2e-6), (layout, step)
            assert norm == pytest.approx(norm_1, rel=2e-5), (layout, step)
    assert expected[-1][0] < expected[0][0]


def test_latent_attention_trains_on_two_tensor_ranks_as_on_one():
    check_losses([SHARES], **LATENT, **OF_LATENT)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [OF_LATENT, OF_QUERIES], ids=["all", "queries"])
def test_latent_attention_trains_alike_in_more_layouts(adapters):
    context = {"context_parallel_size": 2, "zero": 1}
    layouts = [{"mp": 2}, {"mp": 2, "zero": 1}, {"pp": 2}, {"zero": 3, "checkpoint_activations": True}, context]
    check_losses(layouts, **{**LATENT, **adapters})


@pytest.mark.slow
@pytest.mark.parametrize("keys", [WITH_MODULES, {**LATENT, **OF_LATENT}], ids=["attention", "latent"])
def test_modules_of_multi_token_prediction_train_alike(keys):
    expected = check(2, [{"mp": 2}, SHARES, {"pp": 2}, {"zero": 1}, {"zero": 3}], **keys)
    assert expected[-2]["mtp_loss"] < expected[0]["mtp_loss"]


@pytest.mark.slow
def test_a_relay_of_layouts_is_an_undisturbed_run(tmp_path):
    layouts = [
        {"pp": 1, "mp": 2, "zero": 1},
        {"pp": 2, "mp": 1, "zero": 0},
        {"pp": 1, "mp": 2, "zero": 0},
        {"pp": 1, "mp": 1, "zero": 3},
    ]
    save = str(tmp_path / "relay")
    keys = {**MODULES, **LATENT, **OF_LATENT}
    relayed = [plan_of(2, layout, save=save, load=save, **keys) for layout in layouts]
    still = plan_of(2, {"pp": 1, "mp": 1, "zero": 1}, save=str(tmp_path / "still"), **keys)
    got, expected = run_ranks(2, relay_and_still, relayed, still, timeout=300)[0]
    assert worst([loss for loss, _ in got], [loss for loss, _ in expected]) < 2e-6


@pytest.mark.slow
def test_adapters_on_a_network_with_modules_start_as_that_network(tmp_path):
    keys = {**MODULES, **LATENT}
    saving = tiny_plan(1, **keys, save=str(tmp_path))
    loading = tiny_plan(1, **keys, **OF_LATENT, load=str(tmp_path), finetune=True)
    _, trained, tuned = run_ranks(1, finetuned, saving, loading, timeout=300)[0]
    assert tuned == pytest.approx(trained, rel=1e-6)


def test_adapters_on_modules_that_a_checkpoint_lacks_are_refused(tmp_path):
    plain = tiny_plan(1, **LATENT).layers
    path = write_checkpoint(tmp_path / "global_step1", plain, seeded_weights(plain))
    layers = tiny_plan(1, **LATENT, **OF_LATENT, mtp_num_layers=1).layers
    with raises_naming(CheckpointError, "mtp_num_layers", "lora"):
        CheckpointReader(path, layers, finetune=True)


def train_and_save(base, tuned, again):
    """Train a base model, then adapters on it with a save on the way; return what the weights did."""
    from neox.engine import initialize_distributed, open_engine, save_checkpoint
    from neox.parallel import ParallelGrid

    grid, device = initialize_distributed(base)
    assert isinstance(grid, ParallelGrid)
    losses = []
    for plan, steps in ((base, 2), (tuned, 4), (again, 2)):
        engine = open_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank, engine.iteration * plan.batch.gradient_accumulation_steps)
        before = {n: p.detach().clone() for n, p in engine.deepspeed_engine.module.named_parameters()}
        losses.append([])
        for _ in range(steps):
            losses[-1].append(engine.train_batch(data).loss)
            if plan is not again and engine.iteration == 2:
                save_checkpoint(engine, plan.config.checkpoint.save)
        if plan.layers.lora and plan.config.deepspeed.zero_optimization.stage < 3:  # which leaves parts in place
            changed = {n for n, p in engine.deepspeed_engine.module.named_parameters() if not torch.equal(p, before[n])}
            assert changed == {n for n in before if ".adapter." in n}
    return losses


@pytest.mark.parametrize(
    ("world", "layout", "resumed"),
    [
        (2, {"mp": 2, "zero": 1}, {"mp": 2, "zero": 1}),
        pytest.param(2, {"pp": 2}, {"pp": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"mp": 2}, {"pp": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"zero": 2}, {"zero": 3}, marks=pytest.mark.slow),
    ],
)
def test_adapters_on_a_checkpoint_are_resumed_and_merged(tmp_path, world, layout, resumed):
    saves = {name: str(tmp_path / name) for name in ("base", "tuned")}
    base = tiny_plan(world, **layout, save=saves["base"])
    tuned = tiny_plan(world, **layout, **KEYS, load=saves["base"], save=saves["tuned"], finetune=True)
    again = tiny_plan(world, **resumed, **KEYS, load=saves["tuned"])
    _, straight, continued = run_ranks(world, train_and_save, base, tuned, again, timeout=300)[0]
    assert continued == pytest.approx(straight[2:], rel=1e-5)

    merged = CheckpointReader(tmp_path / "tuned" / "global_step2", base.layers)
    apart = CheckpointReader(tmp_path / "tuned" / "global_step2", tuned.layers)
    first = CheckpointReader(tmp_path / "base" / "global_step2", base.layers)
    for name in ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"):
        weight = first.full(2, f"{name}.weight")
        a, b = (apart.full(2, f"{name}.adapter.lora_{part}") for part in "AB")
        assert torch.equal(apart.full(2, f"{name}.weight"), weight)
        assert b.abs().max() > 0
        expected = weight + 2.0 * b @ a
        torch.testing.assert_close(merged.full(2, f"{name}.weight"), expected)
        torch.testing.assert_close(torch.cat(list(merged.row_blocks(2, f"{name}.weight"))), expected)
        dim = 0 if name.endswith(("value", "4h")) else 1
        shards = [merged.shard(2, f"{name}.weight", rank, 2) for rank in range(2)]
        torch.testing.assert_close(torch.cat(shards, dim), expected)
    assert not any("adapter" in name for name in merged.names(2))
