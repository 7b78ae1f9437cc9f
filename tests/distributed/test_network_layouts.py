"""Every kind of network gives one curve under every kind of layout, and a soft prompt trains on a fixed network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from neox.config import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.test_reshard import relay
from tests.distributed.training_runs import tiny_plan, train_curves
from tests.plans import NETWORKS

STEPS = 3
LAYOUTS: list[dict[str, int]] = [{"pp": 2}, {"mp": 2, "zero": 1}, {"zero": 2}]


def plans_of(network: str, world: int, layouts: list[dict[str, int]]) -> list[RunPlan]:
    possible = [layout for layout in layouts if network != "soft_prompt" or "pp" not in layout]
    return [tiny_plan(world, **layout, **{"num_layers": 2, **NETWORKS[network]}) for layout in possible]


def assert_equal_curves(networks: list[str]) -> None:
    expected = run_ranks(1, train_curves, [plans_of(name, 1, [{}])[0] for name in networks], STEPS, timeout=500)[0]
    plans = {name: plans_of(name, 2, LAYOUTS) for name in networks}
    ranks = run_ranks(2, train_curves, [plan for several in plans.values() for plan in several], STEPS, timeout=500)
    curves = iter(ranks[0])
    for name, reference in zip(networks, expected, strict=True):
        for plan in plans[name]:
            for (loss, norm), (loss_1, norm_1) in zip(next(curves), reference, strict=True):
                assert loss == pytest.approx(loss_1, rel=1e-6), (name, plan.grid)
                assert norm == pytest.approx(norm_1, rel=1e-4), (name, plan.grid)


def test_curves_of_a_gate_and_of_sparse_attention_are_equal() -> None:
    assert_equal_curves(["amlp", "bigbird"])


@pytest.mark.slow
def test_curves_of_all_networks_are_equal() -> None:
    assert_equal_curves(list(NETWORKS))


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return {
        f"{file.name[:8]}.{name}": tensor
        for file in sorted(path.glob("global_step2/layer_*-model_00-*"))
        for name, tensor in torch.load(file, weights_only=True).items()
    }


@pytest.mark.slow
def test_a_soft_prompt_starts_as_its_text_and_goes_on_under_another_layout(tmp_path: Path) -> None:
    base, tuned, more = (str(tmp_path / name) for name in ("base", "tuned", "more"))
    keys: dict[str, Any] = {"num_layers": 2, "padded_vocab_size": 512, "train_iters": 8, "no_weight_tying": True}
    text = {"enabled": True, "num_tokens": 3, "init_string": "ab"}
    prompt = {**keys, "soft_prompt_tuning": text, "tokenizer_type": "CharLevelTokenizer"}
    plans = [tiny_plan(2, save=base, **keys), tiny_plan(2, zero=1, load=base, finetune=True, save=tuned, **prompt)]
    run_ranks(2, relay, plans, 2, timeout=300)
    on = tiny_plan(2, mp=2, zero=1, load=tuned, save=more, **prompt)
    still = tiny_plan(2, zero=1, load=base, finetune=True, save=str(tmp_path / "still"), **prompt)
    resumed = run_ranks(2, relay, [on], 2, timeout=300)[0]
    undisturbed = run_ranks(2, relay, [still], 4, timeout=300)[0]
    assert [loss for loss, _ in resumed] == pytest.approx([loss for loss, _ in undisturbed[2:]], rel=1e-5)
    before, after = weights_of(tmp_path / "base"), weights_of(tmp_path / "tuned")
    learned = after.pop("layer_01.soft_embedding_weight")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    started = before["layer_00.word_embeddings.weight"][[ord("a"), ord("b"), ord("a")]]
    assert 0 < (learned - started).abs().max() < 0.05
