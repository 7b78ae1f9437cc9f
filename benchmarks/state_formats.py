"""Measure what smaller optimizer states cost in loss and save in memory: fp32, bf16 and 8-bit states in turn.

    benchmarks/state_formats.py [--steps 200] [--rates 2e-3 2e-4] [--out FILE.json]

The network, text and schedule are those of configs/quickstart.yml, in bf16 on one rank, with two micro batches a step:
run `make quickstart` first, which makes the data. All runs have the same seeds and batches. `planned` and `measured`
are the memory of a step as in benchmarks/memory.py; `last` is the mean training loss of the last tenth of the steps,
and `validation` the loss on text that was held out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.held_storages import HeldStorages
from benchmarks.machine import describe
from benchmarks.memory import device_of
from neox.config.loader import load_config
from neox.data.run_data import build_data_iterators
from neox.engine import initialize_distributed, initialize_engine
from neox.plan import RunPlan, resolve
from neox.plan.devices.device import memory_on
from neox.tokenizer import tokenizer_of

ROOT = Path(__file__).parents[1]
BF16 = "bf16={bf16_master_weights_and_grads: true, bf16_optimizer_states: true}"
STATES: dict[str, tuple[str, ...]] = {
    "fp32 states": (),
    "bf16 states": (BF16,),
    "8-bit states": ("optimizer.type=Adam8bit",),
}
VALIDATION_STEPS = 20


def plan_of(steps: int, rate: float, states: tuple[str, ...]) -> RunPlan:
    """Return the quickstart's plan with some format of states, on one rank."""
    settings = {
        "pipe_parallel_size": 1,
        "num_gpus": 1,
        "precision": "bfloat16",
        "gradient_accumulation_steps": 2,
        "train_iters": steps,
        "lr_decay_iters": steps,
        "optimizer.params.lr": rate,
        "min_lr": rate / 10,
        "zero_optimization.reduce_bucket_size": 500_000,  # a bucket is counted whole, though a CPU fills only a part
        "save": None,
        "load": None,
        "log_dir": None,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    loaded = load_config(["quickstart.yml"], conf_dir=ROOT / "configs", overrides=[*overrides, *states])
    assert not loaded.problems, loaded.problems
    vocabulary = tokenizer_of(loaded.config).vocab_size
    return resolve(loaded.config, 1, vocabulary)


def measure(plan: RunPlan) -> dict[str, Any]:
    """Train, and return the losses and the memory of the second step."""
    grid, device = initialize_distributed(plan)
    steps = plan.config.training.train_iters or 0
    with HeldStorages() as held:
        engine = initialize_engine(plan, grid, device)
        data = build_data_iterators(plan)
        losses = [engine.train_batch(data.train).loss]
        held.peak = held.total
        losses.append(engine.train_batch(data.train).loss)
    losses += [engine.train_batch(data.train).loss for _ in range(steps - len(losses))]
    valid = data.valid[0].batches
    scores = [engine.eval_batch(valid).scores["lm_loss"] for _ in range(VALIDATION_STEPS)]
    on = device_of(plan)
    return {
        "planned": memory_on(plan, on).needed(on_cpu=on.shared),
        "measured": held.peak,
        "last": mean(losses[-max(1, steps // 10) :]),
        "validation": mean(scores),
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 2e-4], help="peak learning rates")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for rate in arguments.rates:
        for name, keys in STATES.items():
            row = {"states": name, "rate": rate, **measure(plan_of(arguments.steps, rate, keys))}
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items() if key != "losses"), flush=True)
            if arguments.out:  # after each run: one that is cut off leaves the others
                about = {**describe(torch.device("cpu")), "steps": arguments.steps}
                arguments.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
