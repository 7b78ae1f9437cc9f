"""Gradients of stages, tensor ranks and data ranks against one rank's; tied copies in every precision; evaluation."""

import math

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan


def first_gradients(plans):
    """On this rank: one step of each plan, recording {(layer, name): gradient} before clipping moves anything."""
    return [_first_gradient(plan) for plan in plans]


def _first_gradient(plan):
    from neox.engine import initialize_distributed, initialize_engine
    from neox.engine.weights import weight_layers

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    recorded = {}
    step = engine.optimizer.step

    def recording_step(*args, **kwargs):
        for index, layer in weight_layers(engine.deepspeed_engine.module):
            recorded.update({(index, name): p.grad.clone().numpy() for name, p in layer.named_parameters()})
        return step(*args, **kwargs)

    engine.optimizer.step = recording_step
    engine.train_batch(batches(plan, grid.dp_rank))
    return (grid.pp_rank, grid.dp_rank, grid.tp_rank), recorded


@pytest.mark.parametrize("tied", [True, False])
def test_pipeline_gradients_equal_one_ranks(tied):
    keys = {"no_weight_tying": not tied, "train_micro_batch_size_per_gpu": 1}
    whole = run_ranks(1, first_gradients, [tiny_plan(1, **keys)])[0][0][1]
    staged = [answer[0][1] for answer in run_ranks(2, first_gradients, [tiny_plan(2, pp=2, **keys)])]
    assert set(whole) == set(staged[0]) | set(staged[1])
    for stage in staged:
        for key, gradient in stage.items():
            torch.testing.assert_close(
                torch.from_numpy(gradient), torch.from_numpy(whole[key]), rtol=2e-5, atol=1e-8, msg=str(key)
            )
    if tied:
        key = (0, "word_embeddings.weight")
        assert (staged[0][key] == staged[1][key]).all()


def tied_copies(plans, steps):
    """The embedding's weights on this rank after some steps of each plan, with their losses."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.engine.weights import weight_layers

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank)
        results = [engine.train_batch(data) for _ in range(steps)]
        weights = dict(weight_layers(engine.deepspeed_engine.module))[0].word_embeddings.weight
        answers.append((weights.detach().float().numpy().copy(), results))
    return answers


PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


@pytest.mark.parametrize(
    "combinations",
    [
        pytest.param([("fp32", 0), ("bf16", 1), ("fp16", 0)], id="some"),
        pytest.param([("fp32", 1), ("bf16", 0), ("fp16", 1)], id="others", marks=pytest.mark.slow),
    ],
)
def test_tied_copies_are_equal_in_every_precision(combinations):
    plans = [
        tiny_plan(2, pp=2, zero=zero, train_micro_batch_size_per_gpu=1, **PRECISIONS[precision])
        for precision, zero in combinations
    ]
    first, last = run_ranks(2, tied_copies, plans, 5)
    for (precision, zero), (mine, results), (copy, _) in zip(combinations, first, last, strict=True):
        assert (mine == copy).all(), f"{precision}, ZeRO {zero}: copies differ by up to {abs(mine - copy).max()}"
        assert not any(r.update_skipped for r in results), (precision, zero)
        assert all(math.isfinite(r.grad_norm) for r in results)
        assert results[-1].loss < results[0].loss, (precision, zero)
        assert results[0].loss_scale == (256.0 if precision == "fp16" else 1.0)


@pytest.mark.parametrize("share", ["half", pytest.param("all", marks=pytest.mark.slow)])
def test_half_precision_norms_and_losses_follow_fp32(share):
    """Norms are of the unscaled gradient and count every parameter once, whoever clips: DeepSpeed or our optimizer."""
    combinations = [
        (degrees, precision, zero) for degrees in ({"pp": 2}, {"mp": 2}) for precision in PRECISIONS for zero in (0, 1)
    ]
    if share == "half":  # one stage of ZeRO for each precision, the other one with tensor ranks
        combinations = [combinations[number] for number in (0, 2, 5, 9, 10)]
    plans = [
        tiny_plan(2, **degrees, zero=zero, train_micro_batch_size_per_gpu=2, **PRECISIONS[precision])
        for degrees, precision, zero in combinations
    ]
    curves = [[(r.loss, r.grad_norm) for r in results] for _, results in run_ranks(2, tied_copies, plans, 2)[0]]
    for curve in curves:
        for (loss, norm), (loss_32, norm_32) in zip(curve, curves[0], strict=True):
            assert loss == pytest.approx(loss_32, rel=1e-2)
            assert norm == pytest.approx(norm_32, rel=3e-2)


def evaluations(plans):
    """Evaluate each plan's initial weights between training steps; training must not notice."""
    from neox.engine import initialize_distributed, initialize_engine

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank)
        first = 1000 * plan.batch.gradient_accumulation_steps

        def evaluate(engine=engine, plan=plan, grid=grid, first=first):
            return engine.eval_batch(batches(plan, grid.dp_rank, start=first)).scores["lm_loss"]

        before = evaluate()
        trained = [engine.train_batch(data).loss]
        after = evaluate()
        trained.append(engine.train_batch(data).loss)
        answers.append((before, after, trained))
    return answers


def test_evaluation_is_equal_and_leaves_training_alone():
    layouts = [{"pp": 2}, {"mp": 2}, {"zero": 3}]
    keys = {"train_micro_batch_size_per_gpu": 1}
    plans = [
        tiny_plan(2, **layout, **keys, **dropout) for dropout in ({}, {"hidden_dropout": 0.1}) for layout in layouts
    ]
    answers = run_ranks(2, evaluations, plans)[0]
    for before, after, trained in answers:
        assert before == pytest.approx(answers[0][0], rel=1e-5)  # no dropout in an evaluation
        assert after < before
        assert trained[0] != after
    for _, after, trained in answers[: len(layouts)]:
        assert after == pytest.approx(answers[0][1], rel=1e-5)
        assert trained == pytest.approx(answers[0][2], rel=1e-5)


def block_calls(plans):
    """How often this rank's blocks run in one training step and one evaluation of each plan."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.model import TransformerLayer

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        calls = []
        for module in engine.deepspeed_engine.module.modules():
            if isinstance(module, TransformerLayer):
                module.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        data = batches(plan, grid.dp_rank)
        engine.train_batch(data)
        trained = len(calls)
        engine.eval_batch(data)
        answers.append((trained, len(calls) - trained))
    return answers


def test_recomputation_runs_every_block_twice_in_training_and_once_in_evaluation():
    keys = [{}, {"checkpoint_activations": True}, {"checkpoint_activations": True, "checkpoint_num_layers": 3}]
    plans = [tiny_plan(2, pp=2, **key) for key in keys]  # 2 blocks a stage, 4 micro batches
    for answers in run_ranks(2, block_calls, plans):
        assert answers == [(8, 8), (16, 8), (16, 8)]
