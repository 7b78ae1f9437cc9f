"""From gpt-neox's initial weights, 30 iterations of its other optimizers give its losses."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from neox.config import NeoXConfig
from neox.plan import RunPlan, resolve
from neox.tokenizer import build_tokenizer
from tests.distributed.spawn import run_ranks

GOLDEN = Path(__file__).parents[1] / "golden"
BASE = "v2_pp1_mp1_dp1_fp32"
LAYERS, HIDDEN, ROWS = 3, 64, 1024
# Seed, optimizer, relative bound of the losses: a sign that rounding turns moves a weight by a whole step of Lion.
RUNS = {
    "v2_sm3_pp1": (110, {"type": "sm3", "params": {"lr": 0.001, "momentum": 0.9, "beta": 0.0, "eps": 1e-30}}, 2e-6),
    "v2_madgrad_pp1": (111, {"type": "madgrad_wd", "params": {"lr": 0.001, "momentum": 0.9, "eps": 1e-6}}, 2e-6),
    "head_lion_pp1": (112, {"type": "Lion", "params": {"lr": 0.001, "betas": [0.9, 0.99]}}, 2e-5),
}


def initial_weights(seed: int, *, builds: int) -> dict[str, torch.Tensor]:
    """Draw the weights that gpt-neox starts from: it seeds with seed + 2718, and v2.0 builds every layer twice."""
    small, wang = math.sqrt(2 / (5 * HIDDEN)), 2 / LAYERS / math.sqrt(HIDDEN)
    drawn = {"sequential.0.word_embeddings.weight": ((ROWS, HIDDEN), small)}
    whole = {}
    for block in (f"sequential.{2 + i}" for i in range(LAYERS)):
        for name, shape, std in (
            ("attention.query_key_value", (3 * HIDDEN, HIDDEN), small),
            ("attention.dense", (HIDDEN, HIDDEN), wang),
            ("mlp.dense_h_to_4h", (4 * HIDDEN, HIDDEN), small),
            ("mlp.dense_4h_to_h", (HIDDEN, 4 * HIDDEN), wang),
        ):
            drawn[f"{block}.{name}.weight"] = (shape, std)
            whole[f"{block}.{name}.bias"] = torch.zeros(shape[0])
        whole |= _norm(f"{block}.input_layernorm") | _norm(f"{block}.post_attention_layernorm")
    drawn[f"sequential.{LAYERS + 4}.final_linear.weight"] = ((ROWS, HIDDEN), small)
    whole |= _norm(f"sequential.{LAYERS + 3}.norm")
    generator = torch.Generator().manual_seed(seed + 2718)
    for _ in range(builds):
        for name, (shape, std) in drawn.items():
            whole[name] = torch.empty(shape).normal_(0.0, std, generator=generator)
    return whole


def _norm(name: str) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": torch.ones(HIDDEN), f"{name}.bias": torch.zeros(HIDDEN)}


def golden_plan(name: str, directory: Path) -> RunPlan:
    """The recorded run: the first golden one with other numbers, from a checkpoint of its initial weights."""
    seed, optimizer, _ = RUNS[name]
    weights = initial_weights(seed, builds=2 if name.startswith("v2") else 1)
    start = directory / "start" / "global_step0"
    start.mkdir(parents=True)
    torch.save({"module": weights}, start / "mp_rank_00_model_states.pt")
    flat = yaml.safe_load((GOLDEN / BASE / f"{BASE}.yml").read_text().replace("True", "true"))
    for key in ("save", "extra_save_iters", "checkpoint_factor"):
        flat.pop(key)
    flat |= {
        "num_layers": LAYERS,
        "optimizer": optimizer,
        "seed": seed,
        "data_path": str(directory / "data" / "small_text_document"),
        "vocab_file": str(directory / "data" / "tokenizer.json"),
        "load": str(start),
        "finetune": True,
        "lr_schedule_version": "v2.0" if name.startswith("v2") else "later",
        "num_workers": 0,
    }
    return resolve(NeoXConfig.from_flat(flat), 1, build_tokenizer("HFTokenizer", flat["vocab_file"]).vocab_size)


def losses_of(plan: RunPlan) -> list[float]:
    from neox.data.run_data import build_data_iterators
    from neox.engine import initialize_distributed, open_engine

    grid, device = initialize_distributed(plan)
    engine = open_engine(plan, grid, device)
    batches = build_data_iterators(plan, grid.dp_rank, 0).train
    return [engine.train_batch(batches).loss for _ in range(30)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name.startswith("head") else name for name in RUNS]
)
def test_losses(name, tmp_path):
    shutil.copytree(GOLDEN / "data", tmp_path / "data")
    losses = run_ranks(1, losses_of, golden_plan(name, tmp_path), timeout=300)[0]
    recorded = json.loads((GOLDEN / "loss_curves.json").read_text())[name]["iters"]
    differences = [abs(loss / recorded[str(i)]["lm_loss"] - 1.0) for i, loss in enumerate(losses, 1)]
    assert len(differences) == len(recorded) == 30
    assert max(differences) < RUNS[name][2]
