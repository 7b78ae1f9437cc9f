"""From gpt-neox v2.0's initial weights, 30 iterations give gpt-neox v2.0's losses, evaluations and logits."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from neox.config import NeoXConfig
from neox.plan import resolve
from neox.tokenizer import build_tokenizer
from tests.distributed.spawn import run_ranks

GOLDEN = Path(__file__).parents[1] / "golden"
LAYOUTS = {
    "v2_pp1_mp1_dp1_fp32": 1,
    "v2_pp2_mp1_dp1_fp32": 2,
    "v2_pp2_mp2_dp1_fp32": 4,
    "v2_gmlp_amlp_global_pp1": 1,
    "head_llama_gqa_pp1": 1,
    "head_llama_gqa_pp2_mp2": 4,
    "v2_gptjtied_softsign_nopos_pp1": 1,
}
SLOW = (
    *("v2_pp2_mp1_dp1_fp32", "v2_pp2_mp2_dp1_fp32", "v2_gmlp_amlp_global_pp1", "head_llama_gqa_pp1"),
    "v2_gptjtied_softsign_nopos_pp1",
)
LOGITS = {"head_llama_gqa_pp1": 5e-5, "head_llama_gqa_pp2_mp2": 1e-4, "v2_gptjtied_softsign_nopos_pp1": 3e-4}
"""Largest difference after 30 iterations, where rounding grows to more than 2e-5."""


def golden_plan(name, directory):
    """The recorded run's configuration, reading the golden checkpoint and a copy of the golden data."""
    flat = yaml.safe_load((GOLDEN / name / f"{name}.yml").read_text().replace("True", "true"))
    flat |= {
        "data_path": str(directory / "data" / "small_text_document"),
        "vocab_file": str(directory / "data" / "tokenizer.json"),
        "load": str(GOLDEN / name / "global_step0"),
        "finetune": True,
        "lr_schedule_version": "v2.0" if name.startswith("v2") else "later",
        "log_dir": str(directory / "logs"),
        "num_workers": 0,
        "eval_order": "gpt-neox",
    }
    for key in ("save", "extra_save_iters", "checkpoint_factor"):
        flat.pop(key)
    config = NeoXConfig.from_flat(flat)
    size = build_tokenizer("HFTokenizer", config.tokenizer.vocab_file).vocab_size
    return resolve(config, flat["global_num_gpus"], size)


def train_and_compute_logits(plan, tokens, go_on=None):
    """Train as planned; return the logits of `tokens` afterwards (of the last stage's tensor rank 0, else None).

    go_on: a plan that resumes gpt-neox's own checkpoint of the end; further steps must be the same under both.
    """
    from neox.data.run_data import build_data_iterators
    from neox.engine import initialize_distributed, open_engine
    from neox.features.table import build_features
    from neox.parallel import gather_last_dim
    from neox.train.trainer import Trainer

    grid, device = initialize_distributed(plan)
    engine = open_engine(plan, grid, device, build_features)
    data = build_data_iterators(plan, grid.dp_rank, engine.iteration)
    assert Trainer(plan, engine, data).fit() == 0
    logits = engine.logits(torch.from_numpy(tokens))
    if go_on is not None:
        resumed = open_engine(go_on, grid, device, build_features)
        assert resumed.iteration == engine.iteration == 30
        batches = build_data_iterators(go_on, grid.dp_rank, 30).train
        ours = [engine.train_batch(data.train) for _ in range(3)]
        theirs = [resumed.train_batch(batches) for _ in range(3)]
        for one, other in zip(ours, theirs, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=2e-6)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
            assert one.lr == other.lr
    return None if logits is None else gather_last_dim(logits, grid).numpy()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LAYOUTS]
)
def test_losses_evaluations_and_logits(name, tmp_path):
    shutil.copytree(GOLDEN / "data", tmp_path / "data")
    recorded = json.loads((GOLDEN / "loss_curves.json").read_text())[name]
    stored = np.load(GOLDEN / name / "logits_step30.npz")
    plan, keeps_adam = golden_plan(name, tmp_path), name == "v2_pp2_mp1_dp1_fp32"
    further = {"load": str(GOLDEN / name / "global_step30"), "finetune": False, "log_dir": None}
    go_on = resolve(NeoXConfig.from_flat({**plan.config.to_flat(), **further}), plan.grid.world_size, plan.vocab_size)
    answers = run_ranks(LAYOUTS[name], train_and_compute_logits, plan, stored["tokens"], go_on if keeps_adam else None)
    lines = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["iteration"]: line["train/lm_loss"] for line in lines if "train/lm_loss" in line}
    assert list(losses) == list(range(1, 31))
    for iteration, row in recorded["iters"].items():
        assert losses[int(iteration)] == pytest.approx(row["lm_loss"], rel=2e-6), iteration
    evaluated = {key: value for line in lines for key, value in line.items()}
    for part, loss in recorded["eval"].items():
        assert evaluated[f"{part}/lm_loss"] == pytest.approx(loss, rel=2e-6)
    logits = answers[-1]
    assert np.abs(logits - stored["logits"]).max() < LOGITS.get(name, 2e-5)
    assert (tmp_path / "logs" / "loss.png").stat().st_size > 1000
