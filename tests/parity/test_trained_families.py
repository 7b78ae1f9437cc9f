"""Imported families train on two tensor ranks and two stages, and go on from a checkpoint, as on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from neox.config import NeoXConfig
from neox.convert import from_hf
from neox.plan import RunPlan, config_from_files, resolve
from tests.distributed.spawn import run_ranks
from tests.distributed.test_reshard import worst
from tests.distributed.training_runs import TINY, batches
from tests.parity.family_configs import COMMON, TEXT_FAMILIES
from tests.parity.test_hf_families import CASES, FURTHER_CASES, transformers_model

STEPS = 2
"""Steps before the checkpoint, and after it."""
KEPT = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_clipping",
    "optimizer",
    "lr_decay_style",
    "train_iters",
    "seed",
)
LENGTH = 16


def losses(plans: list[RunPlan]) -> list[tuple[float, float]]:
    """Train each plan for `STEPS` steps, which the next one loads; return loss and gradient norm of each step."""
    from neox.engine import initialize_distributed, open_engine, save_checkpoint

    found = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank, engine.iteration * plan.batch.gradient_accumulation_steps)
        for _ in range(STEPS):
            step = engine.train_batch(data)
            found.append((step.loss, step.grad_norm))
        save_checkpoint(engine, plan.config.checkpoint.save)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TEXT_FAMILIES)
def test_tensor_ranks_and_stages_train_as_one_rank(tmp_path: Path, model_type: str) -> None:
    config = {**CASES, **FURTHER_CASES}[model_type]
    transformers_model(model_type, **config).save_pretrained(tmp_path / "hf")
    imported = from_hf(tmp_path / "hf", tmp_path / "neox")
    flat: dict[str, Any] = config_from_files([imported.config_file]).to_flat()
    flat |= {key: TINY[key] for key in KEPT}
    flat |= {"seq_length": LENGTH, "attention_dropout": 0.0, "hidden_dropout": 0.0}

    def plan(world: int, load: Path, **keys: Any) -> RunPlan:
        given = {
            **flat,
            "load": str(load),
            "save": str(tmp_path / str(world)),
            "finetune": load != tmp_path / str(world),
        }
        return resolve(NeoXConfig.from_flat({**given, **keys}), world, COMMON["vocab_size"])

    layout = {"model_parallel_size": 2, "pipe_parallel_size": 2}
    (expected,) = run_ranks(1, losses, [plan(1, tmp_path / "neox"), plan(1, tmp_path / "1")])
    divided = [plan(4, tmp_path / "neox", **layout), plan(4, tmp_path / "4", **layout)]
    for found in run_ranks(4, losses, divided):
        for part in (0, 1):
            assert worst([step[part] for step in found], [step[part] for step in expected]) < 2e-6 * 10**part
