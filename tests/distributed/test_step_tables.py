"""The tables at the head of `neox.engine.engine` are true: DeepSpeed's wrappers, and what a skipped update moves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

# (precision, ZeRO stage, pipeline stages) -> wrapper, whether our optimizer clips, whether it updates the parameters
# themselves or, if not, whether it has a copy of each or flat parts.
WRAPPERS = {
    ("fp32", 0, 0): ("AdamW", True, "parameters"),
    ("fp32", 1, 0): ("ZeroOptimizer", False, "parts"),
    ("fp32", 2, 0): ("ZeroOptimizer", False, "parts"),
    ("fp32", 3, 0): ("SwappedStage3", False, "parts"),
    ("bf16", 0, 0): ("UnfusedOptimizer", True, "copies"),
    ("bf16", 1, 0): ("BF16Optimizer", False, "parts"),
    ("bf16", 2, 0): ("ZeroOptimizer", False, "parts"),
    ("bf16", 3, 0): ("SwappedStage3", False, "parts"),
    ("bf16", 0, 2): ("BF16Optimizer", False, "parts"),
    ("bf16", 1, 2): ("BF16Optimizer", False, "parts"),
}


def wrappers(layouts: list[tuple[str, int, int]]) -> list[tuple[str, bool, str]]:
    """What the table says of each layout."""
    from neox.engine import initialize_distributed, initialize_engine

    found = []
    for precision, zero, stages in layouts:
        plan = tiny_plan(2, precision=precision, zero=zero, pp=stages)
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        parameters = {id(parameter) for parameter in engine.model.module.parameters()}
        tensors = engine.model.optimizer_tensors()
        assert {item.tensor.dtype for item in tensors} == {torch.float32}
        held = "parts"
        if len(tensors) == len(parameters):
            held = "parameters" if {id(item.tensor) for item in tensors} == parameters else "copies"
        clips = engine.optimizer.scope is not None and engine.deepspeed_engine.gradient_clipping() == 0.0
        found.append((type(engine.model.wrapper).__name__, clips, held))
    return found


ONE_OF_EACH = [("fp32", 0, 0), ("fp32", 1, 0), ("bf16", 0, 0), ("bf16", 3, 0), ("bf16", 0, 2)]


@pytest.mark.parametrize(
    "layouts", [ONE_OF_EACH, pytest.param(list(WRAPPERS), marks=pytest.mark.slow)], ids=["one of each", "all"]
)
def test_wrappers_are_those_of_the_table(layouts: list[tuple[str, int, int]]) -> None:
    assert {WRAPPERS[layout][0] for layout in layouts} == {name for name, _, _ in WRAPPERS.values()}
    for of_rank in run_ranks(2, wrappers, layouts):
        assert dict(zip(layouts, of_rank, strict=True)) == {layout: WRAPPERS[layout] for layout in layouts}


ROUTING = {
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_router_type": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
}


def states_around_a_skipped_update() -> list[dict[str, Any]]:
    """What the table lists, before and after a step whose loss is not a number."""
    from neox.checkpoint import AVERAGED_STEPS
    from neox.data.run_data import DataIterators
    from neox.engine import initialize_distributed, initialize_engine
    from neox.features.loss_spikes.run import LossSpikes
    from neox.features.noise_scale.run import NoiseScale
    from neox.features.table import build_features
    from neox.model import biased_routers
    from neox.train import Trainer

    spikes = {"loss_spike_action": "warn", "loss_spike_factor": 200.0, "loss_spike_window": 8, "max_nonfinite_steps": 3}
    noise = {"log_gradient_noise_scale": True, "gradient_noise_scale_n_batches": 10}
    plan = tiny_plan(1, ema_decay=0.5, **ROUTING, **spikes, **noise)
    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device, build_features)
    count = plan.batch.gradient_accumulation_steps

    def data() -> Any:
        for number, batch in enumerate(batches(plan, grid.dp_rank)):
            is_poisoned = count <= number < 2 * count
            yield {**batch, "loss_mask": batch["loss_mask"] * (math.nan if is_poisoned else 1.0)}

    trainer = Trainer(plan, engine, DataIterators(data(), (), ()))
    states = []
    for _ in range(2):
        report = trainer.step()
        average = next(feature for feature in engine.features if AVERAGED_STEPS in feature.state(engine))
        noise_scale = next(feature for feature in engine.features if isinstance(feature, NoiseScale))
        window = next(feature for feature in engine.features if isinstance(feature, LossSpikes))
        deepspeed_engine = engine.deepspeed_engine
        states.append(
            {
                "weights": [p.tolist() for p in engine.model.module.parameters() if p.requires_grad],
                "moments": [state["exp_avg"].tolist() for state in engine.optimizer.state.values()],
                "learning rate": engine.schedule.iteration,
                "noise scale": noise_scale._added,
                "window of losses": len(window._band.losses),
                "update_skipped": report.result.update_skipped,
                "iteration": engine.iteration,
                "global_steps": deepspeed_engine.global_steps,
                "global_samples": deepspeed_engine.global_samples,
                "skipped_steps": deepspeed_engine.skipped_steps,
                "skipped_updates": trainer.state.skipped_updates,
                "selection biases": [r.selection_bias.tolist() for r in biased_routers(engine.model.module)],
                "average": [tensor.tolist() for tensor in average._averages],
                "averaged steps": average.state(engine)[AVERAGED_STEPS],
            }
        )
    return states


def test_a_skipped_update_moves_what_the_table_says() -> None:
    before, after = run_ranks(1, states_around_a_skipped_update)[0]
    stays = {name for name, value in before.items() if after[name] == value}
    assert stays == {"weights", "moments", "learning rate", "noise scale", "window of losses"}
    assert (before["update_skipped"], after["update_skipped"]) == (False, True)
    for name in ("iteration", "global_steps", "averaged steps", "skipped_steps", "skipped_updates"):
        assert after[name] == before[name] + 1, name
    assert after["global_samples"] == 2 * before["global_samples"]
