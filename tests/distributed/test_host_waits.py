"""How often the host waits for the device in a step, counted on the stand-in of `tests/stand_in`.

Between waits the host runs ahead and queues work, so that the device never idles. A wait costs a GPU 0.1 ms and more.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from neox.plan import RunPlan
from tests.distributed import test_stand_in
from tests.distributed.test_preferences import curves, opened
from tests.distributed.test_stand_in import EXPERTS, LORA, data_keys
from tests.distributed.training_runs import tiny_plan
from tests.stand_in.ranks import run_on_npus

MICRO_BATCHES = 2
BLOCKS = 2
# Which functions may wait how often in a step, and why.
NORM = "neox/engine/deepspeed_patches/bf16_optimizer.py:_norm_and_factor"  # whether to update, and how to clip
PLAIN_NORM = "neox/optim/clipping.py:global_norm"  # the same
NUMBERS = "neox/engine/measurements.py:take"  # loss and norm of the step, which were copied before the update
BF16_ZERO1 = {NORM: 1, NUMBERS: 1}
BF16_ZERO0 = {PLAIN_NORM: 1, NUMBERS: 1}
GROUPED = "neox/ops/grouped_linear.py:grouped_linear"
# NPUs have no product of all experts in one kernel: the host loops over experts. (GPUs do not wait here.)
EXPERT_LOOP = {GROUPED: 2 * BLOCKS * MICRO_BATCHES}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "dense": ("dense", {}, BF16_ZERO1),
    "packed documents": ("packed", {"reset_attention_mask": True}, BF16_ZERO1),
    "label weights": ("dense", {"loss_normalization": "tokens"}, BF16_ZERO1),
    "lora": ("lora", {"lora": LORA}, BF16_ZERO1),
    "zero 0": ("dense", {"zero": 0}, BF16_ZERO0),
    "experts": ("experts", EXPERTS, BF16_ZERO1 | EXPERT_LOOP),
    # The host must know how many rows go where.
    "divided experts": (
        "experts",
        {**EXPERTS, "expert_model_parallel_size": 2},
        BF16_ZERO1 | EXPERT_LOOP | {"neox/parallel/expert_exchange.py:plan": BLOCKS * MICRO_BATCHES},
    ),
    "capacity": ("experts", {**EXPERTS, "moe_expert_capacity_factor": 1.0}, BF16_ZERO1 | EXPERT_LOOP),
    # Whether the rounds have ended, every fourth round.
    "sinkhorn": (
        "experts",
        {"moe_num_experts": 4, "moe_top_k": 1, "moe_ffn_hidden_size": 24},
        BF16_ZERO1 | EXPERT_LOOP | {"neox/ops/routing.py:log_sinkhorn": BLOCKS * MICRO_BATCHES},
    ),
    # The tokens of answers, which alone go through the head.
    "dpo": (
        "dpo",
        {"train_impl": "dpo"},
        BF16_ZERO1 | {"neox/objectives/preferences.py:select_tokens": MICRO_BATCHES},
    ),
    "adafactor": ("dense", {"zero": 0, "optimizer": {"type": "Adafactor", "params": {"lr": 0.01}}}, BF16_ZERO0),
    "resumed adafactor": ("dense", {"zero": 0, "optimizer": {"type": "Adafactor", "params": {"lr": 0.01}}}, BF16_ZERO0),
    "resumed madgrad": ("dense", {"optimizer": {"type": "madgrad_wd", "params": {"lr": 0.01}}}, BF16_ZERO1),
    "resumed 8 bits": ("dense", {"optimizer": {"type": "Adam8bit", "params": {"lr": 0.01}}}, BF16_ZERO1),
    "8 bits": ("dense", {"optimizer": {"type": "Adam8bit", "params": {"lr": 0.01}}}, BF16_ZERO1),
    "muon": ("dense", {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}, BF16_ZERO1),
    "average": ("dense", {"ema_decay": 0.9}, BF16_ZERO1),
    # A wait for each piece of 64 MiB; two groups of parameters.
    "average in CPU memory": (
        "dense",
        {"ema_decay": 0.9, "ema_device": "cpu"},
        BF16_ZERO1 | {"neox/engine/arrivals.py:_arrived": 2},
    ),
    # One wait for the numbers of each of these.
    "statistics": (
        "dense",
        {"log_param_norm": True, "log_optimizer_states": True, "log_grad_pct_zeros": True},
        BF16_ZERO1 | {"neox/features/update_statistics/run.py:_take": 1},
    ),
    "replicas": (
        "dense",
        {"check_replicas_every": 1},
        BF16_ZERO1 | {"neox/features/replica_check/run.py:check": 1},
    ),
    "context ranks": (
        "dense",
        {"context_parallel_size": 2, "train_micro_batch_size_per_gpu": 4},
        BF16_ZERO1,
    ),
    "stages": ("dense", {"pp": 2, "train_micro_batch_size_per_gpu": 4}, BF16_ZERO1),
    # DeepSpeed's own waits for overflow and norm, a few in a step (0.1 % of it), and not one for each parameter.
    "zero 2": ("dense", {"zero": 2}, {"deepspeed": 6, NUMBERS: 1}),
    "offload": (
        "dense",
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        {"deepspeed": 7, "neox/engine/deepspeed_patches/zero_optimizer.py": 2, NUMBERS: 1},
    ),
    # One in a micro batch: DeepSpeed ends the stream that reduces gradients.
    "zero 3": ("dense", {"zero": 3}, {"deepspeed": 4 + MICRO_BATCHES, NUMBERS: 1}),
}
QUICK = ("label weights", "resumed adafactor")
LOSSES = [("experts", "zero1"), ("windows", "stages")]


def plan_of(directory: Path, name: str) -> RunPlan:
    network, keys, _ = CASES[name]
    size = {"train_batch_size": 4 * MICRO_BATCHES, "train_micro_batch_size_per_gpu": 2, "precision": "bf16"}
    if name.startswith("resumed"):
        keys = {**keys, "save": str(directory / name), "load": str(directory / name)}
    return tiny_plan(2, **{"zero": 1, **data_keys(directory / network, network), **size, **keys})


def waits_of_steps(plans: dict[str, RunPlan]) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """Take a step of each plan, and return what the host waited for in the next one. Some go on from a checkpoint."""
    from torch_npu.waits import record

    from neox.engine import save_checkpoint

    found = {}
    for name, plan in plans.items():
        engine, data = opened(plan)
        engine.train_batch(data.train)
        if plan.config.checkpoint.load:
            save_checkpoint(engine, plan.config.checkpoint.save)
            engine, data = opened(plan)
            assert engine.iteration == 1
            engine.train_batch(data.train)
        with record() as waits:
            engine.train_batch(data.train)
        found[name] = [(wait.what, wait.places) for wait in waits]
    return found


def compare_with_allowed(found: dict[str, list[tuple[str, tuple[str, ...]]]]) -> None:
    for name, waits in found.items():
        allowed = CASES[name][2]
        counts: Counter[str] = Counter()
        for what, places in waits:
            place = places[0]
            matching = [known for known in allowed if place.startswith(known)]
            counts[matching[0] if matching else f"{what} at {' < '.join(places[:4])}"] += 1
        assert counts == allowed, name


def curves_and_waits(of_curves: list[RunPlan], of_waits: dict[str, RunPlan]) -> tuple[Any, Any]:
    return curves(of_curves), waits_of_steps(of_waits)


def test_a_quick_choice_of_losses_and_waits(tmp_path: Path) -> None:
    """One start of two ranks: losses are those of a CPU, and the host waits for nothing else."""
    plans = [test_stand_in.plan_of(tmp_path, *case) for case in LOSSES]
    counted = {name: plan_of(tmp_path, name) for name in QUICK}
    losses, waits = run_on_npus(2, curves_and_waits, plans, counted)[0]
    test_stand_in.compare_with_cpu(LOSSES, plans, losses)
    compare_with_allowed(waits)


@pytest.mark.slow
def test_waits_of_every_group(tmp_path: Path) -> None:
    plans = {name: plan_of(tmp_path, name) for name in CASES if name not in QUICK}
    compare_with_allowed(run_on_npus(2, waits_of_steps, plans)[0])
