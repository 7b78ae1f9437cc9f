"""Average of the trained weights: a plain formula in every layout, over resumes at other degrees, and evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from neox.checkpoint import CheckpointReader, OptimizerReader
from neox.checkpoint.optimizer.file_formats import FP32
from neox.convert.verification import load_reference_model
from neox.engine import Engine
from neox.generation.load import load_model
from neox.parallel import ParallelGrid
from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import SEQ, batches, tiny_plan
from tests.features import feature_of
from tests.plans import NETWORKS

STEPS = 2
MATRIX_NAME = "mlp.dense_h_to_4h.weight"
EMA = {"ema_decay": 0.6, "no_save_rng": True}


def train_relay(plans: Sequence[RunPlan]) -> None:
    """Train some steps with each plan, and save after each of them; each goes on where the one before has stopped."""
    from neox.engine import initialize_distributed, open_engine, save_checkpoint
    from neox.features.table import build_features

    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device, build_features)
        save = plan.config.checkpoint.save
        assert save is not None
        if engine.iteration == 0:
            save_checkpoint(engine, save)
        data = batches(plan, grid.data_rank, engine.iteration * plan.batch.gradient_accumulation_steps)
        for _ in range(STEPS):
            engine.train_batch(data)
            save_checkpoint(engine, save)


def trained(save: Path, plan: RunPlan, iteration: int) -> dict[tuple[int, str], torch.Tensor]:
    """The fp32 weights after a step, in fp64."""
    reader = OptimizerReader(save / f"global_step{iteration}", plan.layers)
    weights = {}
    for layer in plan.layers.weight_layers:
        for spec in layer.parameters:
            weights[layer.index, spec.name] = reader.full(layer.index, spec.name, FP32).double()
    return weights


def assert_is_formula(save: Path, plan: RunPlan, steps: int) -> None:
    """Compare the saved average with average = d * average + (1 - d) * weights over the saved weights."""
    settings = plan.config.optimizer
    expected = trained(save, plan, 0)
    for step in range(1, steps + 1):
        if step % settings.ema_every:
            continue
        decay = min(settings.ema_decay, (1 + step) / (10 + step)) ** settings.ema_every
        for key, weights in trained(save, plan, step).items():
            expected[key] = decay * expected[key] + (1 - decay) * weights
    reader = CheckpointReader(save / f"global_step{steps}", plan.layers, weights="ema")
    last = trained(save, plan, steps)
    moved = 0.0
    for (index, name), average in expected.items():
        found = reader.full(index, name).double()
        assert (found - average).abs().max() < 1e-6, (index, name)
        moved = max(moved, (found - last[index, name]).abs().max().item())
    assert moved > 1e-3, "the average is the weights"


def relay(save: Path, world: int, layouts: Sequence[dict[str, Any]], **keys: Any) -> list[RunPlan]:
    """Plans of one run, each of which goes on in another layout."""
    flat = {"save": str(save), "load": str(save), "num_layers": 2, **EMA, **keys}
    return [tiny_plan(world, **layout, **flat) for layout in layouts]


def weights_at_start(plan: RunPlan) -> torch.Tensor:
    """A weight with which a run starts on this rank."""
    from neox.engine import initialize_distributed, open_engine
    from neox.features.table import build_features

    grid, device = initialize_distributed(plan)
    parameters = dict(open_engine(plan, grid, device, build_features).deepspeed_engine.module.named_parameters())
    return parameters[f"sequential.2.{MATRIX_NAME}"].detach()


def test_formula_over_resumes_in_other_layouts(tmp_path: Path) -> None:
    plans = relay(tmp_path, 2, [{"zero": 1}, {"pp": 2}, {"mp": 2}, {"zero": 3}])
    run_ranks(2, train_relay, plans)
    steps = STEPS * len(plans)
    assert_is_formula(tmp_path, plans[0], steps)

    reads = {"load": str(tmp_path), "load_weights": "ema", "num_layers": 2}
    tuned = run_ranks(2, weights_at_start, tiny_plan(2, mp=2, finetune=True, **reads))
    reader = CheckpointReader(tmp_path / f"global_step{steps}", plans[0].layers, weights="ema")
    for tp_rank, found in enumerate(tuned):
        assert torch.equal(found, reader.shard(2, MATRIX_NAME, tp_rank, 2))
    alone = tiny_plan(1, **reads)
    model = load_model(alone, reader.path, ParallelGrid.single(), torch.device("cpu"))
    tokens = torch.arange(SEQ).unsqueeze(0)
    log_probs, _ = model.score(tokens, tokens)
    logits = load_reference_model(reader, alone.config)(tokens)
    expected = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    assert (log_probs - expected).abs().max() < 1e-5


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
DIVIDED: dict[str, Any] = {"expert_model_parallel_size": 2}
EXPERTS = NETWORKS["experts"]
MODULES = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}
MATRIX: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "bf16": ([{"zero": zero} for zero in (0, 1, 2, 3)] + [{"pp": 2}, {"pp": 2, "zero": 1}, {"mp": 2, "zero": 1}], BF16),
    "fp16": ([{"zero": zero} for zero in (0, 1, 2, 3)] + [{"pp": 2}, {"mp": 2}], FP16),
    "every third step on the cpu": ([{"zero": 2}, {"pp": 2}, {"zero": 3}], {"ema_every": 3, "ema_device": "cpu"}),
    "tied": ([{"pp": 2}, {"zero": 3}, {"mp": 2}], {"no_weight_tying": False}),
    "parallel residual": ([{"mp": 2}, {"zero": 1}, {"mp": 2}], {"gpt_j_residual": True}),
    "background": ([{"zero": 1}, {"pp": 2}], {"async_save": True}),
    "schedules": (
        [{"pp": 2, "pipeline_schedule": name} for name in ("interleaved", "dualpipev")] + [{"zero": 2}],
        {"num_layers": 4, "train_batch_size": 8},
    ),
    "context": ([{"zero": 2, "context_parallel_size": 2}, {"pp": 2}, {"zero": 3, "context_parallel_size": 2}], {}),
    "multi-token": ([{"zero": 1}, {"pp": 2}, {"mp": 2}, {"zero": 3}], MODULES),
    "experts": ([{"zero": 1}, {"pp": 2}, {"zero": 3}], NETWORKS["experts"]),
    "divided experts": ([{**DIVIDED, "zero": zero} for zero in (0, 1, 2, 3)] + [{"pp": 2}, DIVIDED], EXPERTS),
    "divided experts in bf16": ([{**DIVIDED, "zero": zero} for zero in (1, 0, 3, 2)], {**EXPERTS, **BF16}),
    "divided experts in background": (
        [{**DIVIDED, "zero": 3}, {**DIVIDED, "zero": 0}, {"mp": 2}, {**DIVIDED, "zero": 1}],
        {**EXPERTS, "async_save": True},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_formula_in_every_precision(tmp_path: Path, name: str) -> None:
    layouts, keys = MATRIX[name]
    plans = relay(tmp_path, 2, layouts, **keys)
    run_ranks(2, train_relay, plans)
    assert_is_formula(tmp_path, plans[0], STEPS * len(plans))


@pytest.mark.slow
def test_formula_with_offload(tmp_path: Path) -> None:
    flat = {"save": str(tmp_path), "load": str(tmp_path), "num_layers": 2, **EMA}
    plans = [tiny_plan(2, **flat, **OFFLOAD), tiny_plan(2, pp=2, **flat), tiny_plan(2, **flat, **OFFLOAD)]
    run_ranks(2, train_relay, plans)
    assert_is_formula(tmp_path, plans[0], STEPS * len(plans))


@pytest.mark.slow
@pytest.mark.parametrize("network", ["dense", "divided experts"])
def test_formula_over_four_ranks(tmp_path: Path, network: str) -> None:
    layouts: list[dict[str, Any]] = [{"pp": 2, "mp": 2}, {"zero": 3, "mp": 2}, {"zero": 2}, {"pp": 2, "zero": 1}]
    keys: dict[str, Any] = {}
    if network == "divided experts":
        layouts = [{**DIVIDED, "zero": 1}, {**DIVIDED, "mp": 2}, {**DIVIDED, "zero": 3}, {**DIVIDED, "pp": 2}, DIVIDED]
        keys = EXPERTS
    plans = relay(tmp_path, 4, layouts, **keys)
    run_ranks(4, train_relay, plans)
    assert_is_formula(tmp_path, plans[0], STEPS * len(plans))


def held(model: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters, or this rank's parts of them under ZeRO 3."""
    return [getattr(parameter, "ds_tensor", parameter).detach() for parameter in model.parameters()]


def evaluation(engine: Engine) -> float:
    """The loss of samples that training does not read."""
    first = 1000 * engine.plan.batch.gradient_accumulation_steps
    return engine.eval_batch(batches(engine.plan, engine.grid.data_rank, first)).scores["lm_loss"]


def losses_and_evaluations(plans: Sequence[RunPlan]) -> list[tuple[list[float], float, float, bool]]:
    """Train each plan; return the losses, the last loss of weights and of their average, and whether weights stay."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.features.ema.run import AveragedWeights
    from neox.features.table import build_features

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device, build_features)
        data = batches(plan, grid.data_rank)
        losses = []
        evaluated = []
        stays = True
        for _ in range(3):
            losses.append(engine.train_batch(data).loss)
            evaluated = [evaluation(engine)]
            if plan.config.optimizer.ema_decay is None:
                continue
            before = [weights.clone() for weights in held(engine.deepspeed_engine.module)]
            with feature_of(engine, AveragedWeights).in_model(engine):
                evaluated.append(evaluation(engine))
            after = held(engine.deepspeed_engine.module)
            stays &= all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        answers.append((losses, evaluated[0], evaluated[-1], stays))
    return answers


LAYOUTS = [{"zero": 0}, {"zero": 3}, {"pp": 2}, {"zero": 2}, {"mp": 2, "zero": 1}]


@pytest.mark.slow
def test_an_evaluated_average_of_divided_experts_leaves_training_as_it_is() -> None:
    assert_training_stays({**EXPERTS, **DIVIDED}, 1e-5, [{"zero": 0}, {"zero": 1}, {"zero": 3}])


def assert_training_stays(
    precision: dict[str, Any], tolerance: float, layouts: Sequence[dict[str, Any]] = LAYOUTS
) -> None:
    """Compare runs that evaluate their average with runs that keep none, and the average's loss between layouts."""
    plans = []
    for layout in layouts:
        for ema in ({}, {"ema_decay": 0.9}):
            plans.append(tiny_plan(2, **layout, **precision, **ema, num_layers=2))
    answers = run_ranks(2, losses_and_evaluations, plans)[0]
    expected = answers[1][2]
    for without, kept in zip(answers[::2], answers[1::2], strict=True):
        assert kept[0] == without[0]
        assert kept[1] == without[1]
        assert kept[3]
        assert kept[2] == pytest.approx(expected, rel=tolerance)
        assert abs(kept[2] - kept[1]) > 1e-3


@pytest.mark.parametrize("layouts", [LAYOUTS[:3], pytest.param(LAYOUTS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_an_evaluated_average_leaves_training_as_it_is(layouts: Sequence[dict[str, Any]]) -> None:
    assert_training_stays({}, 1e-5, layouts)


@pytest.mark.slow
def test_an_evaluated_average_of_multi_token_prediction_leaves_training_as_it_is() -> None:
    assert_training_stays(MODULES, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [BF16, FP16], ids=["bf16", "fp16"])
def test_an_evaluated_average_leaves_training_in_16_bits_as_it_is(precision: dict[str, Any]) -> None:
    assert_training_stays(precision, 1e-2)
