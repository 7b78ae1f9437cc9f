"""muP: movement, deviations and learning rates as functions of the width."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from neox.config import NeoXConfig
from neox.errors import ConfigError
from neox.model import GPT
from neox.objectives import CausalLM
from neox.optim import build_optimizer, parameter_groups
from neox.optim.schedule import LRSchedule
from neox.parallel import ParallelGrid
from neox.train.coordinate_check import coordinate_check
from tests.plans import SMALL, small_plan

MUP: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": 64}


def movements(**keys: Any) -> list[float]:
    flat = {**SMALL, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}, **keys}
    return [row.hidden[-1] for row in coordinate_check(NeoXConfig.from_flat(flat), [64, 128, 256], steps=3)]


def test_movement_is_independent_of_the_width_under_mup_alone() -> None:
    without = movements()
    assert without[2] > 10 * without[0]
    under = movements(**MUP)
    assert max(under) < 2 * min(under)


@pytest.mark.parametrize("optimizer", ["Adam", "Muon"])
def test_a_step_moves_the_outputs_of_a_matrix_independently_of_the_width(optimizer: str) -> None:
    """Reported as Megatron-LM PR 3715 and nanochat PR 644, of Muon. Right: arXiv:2310.17813, condition 1."""
    moved = []
    for width in (64, 512):
        keys = {"norm": "rmsnorm", "optimizer": {"type": optimizer, "params": {"lr": 0.001}}, **MUP}
        plan = small_plan(hidden_size=width, **keys)
        model = GPT(plan, ParallelGrid.single())
        trained = build_optimizer(plan, model.named_parameters())
        for group in trained.param_groups:
            group["lr"] *= group.get("lr_factor", 1.0)
        linear = model.blocks[1].mlp.dense_h_to_4h
        inputs: list[torch.Tensor] = []
        linear.register_forward_hook(lambda module, args, output, inputs=inputs: inputs.append(args[0].detach()))
        rows = torch.randint(0, 32, (8, 17), generator=torch.Generator().manual_seed(0))
        targets = (rows[:, 1:], torch.full((8, 16), 1 / 128))
        before = linear.weight.detach().clone()
        model(rows[:, :-1], loss=partial(CausalLM().scores, targets=targets))[0].backward()
        trained.step()
        step = linear.weight.detach() - before
        moved.append((inputs[0].flatten(0, 1) @ step.T).square().mean().sqrt().item())
    assert moved[1] == pytest.approx(moved[0], rel=0.4)  # with 1 / m, Muon's are 0.35 of the first


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("methods", [("normal", "scaled_normal"), ("small_init", "wang_init")])
def test_movement_for_other_initial_weights_and_heads(heads: int, methods: tuple[str, str]) -> None:
    keys = {"num_attention_heads": heads, "init_method": methods[0], "output_layer_init_method": methods[1]}
    under = movements(**MUP, **keys)
    assert max(under) < 2 * min(under)


def test_at_the_base_width_only_the_scale_of_attention_differs() -> None:
    plain, mup = small_plan(), small_plan(use_mup=True, mup_base_hidden_size=32, mup_attn_temp=1 / math.sqrt(8))
    tokens = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0))
    models = [GPT(plan, ParallelGrid.single()).eval() for plan in (plain, mup)]
    torch.testing.assert_close(models[0](tokens), models[1](tokens), atol=1e-6, rtol=1e-5)


def test_deviations_multipliers_and_learning_rates_follow_the_width() -> None:
    keys = {"hidden_size": 64, "mup_base_hidden_size": 16, "use_mup": True, "mup_init_scale": 2.0}
    plain, plan = small_plan(hidden_size=64), small_plan(**keys, mup_output_temp=2.0, mup_embedding_mult=3.0)
    models = [GPT(p, ParallelGrid.single()).eval() for p in (plain, plan)]
    weights = [dict(model.named_parameters()) for model in models]
    for name in ("sequential.2.mlp.dense_h_to_4h.weight", "sequential.3.attention.dense.weight"):
        torch.testing.assert_close(weights[1][name], weights[0][name])  # 2 / sqrt(4)
    name = "sequential.0.word_embeddings.weight"
    torch.testing.assert_close(weights[1][name], 2 * weights[0][name])
    tokens = torch.tensor([[1, 2]])
    embedding = models[1].sequential[0]
    torch.testing.assert_close(embedding(tokens), 3 * embedding.word_embeddings(tokens))
    assert plan.architecture.logit_multiplier == 1 / 8
    assert plan.architecture.attention_scale == 1 / 16
    groups = parameter_groups(models[1].named_parameters(), 0.1)
    assert [(group.get("lr_factor", 1.0), group["weight_decay"]) for group in groups] == [
        (0.25, 0.4),
        (1.0, 0.1),
        (1.0, 0.0),
    ]
    optimizer = torch.optim.AdamW(groups)
    LRSchedule(plan, optimizer).seek(5)
    first, *others = (group["lr"] for group in optimizer.param_groups)
    assert {first * 4} == set(others)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"use_mup": True}, ("use_mup", "mup_base_hidden_size")),
        ({**MUP, "init_method": "xavier_normal"}, ("init_method", "use_mup")),
        ({**MUP, "coord_check": True}, ("coord_check",)),
        ({**MUP, "save_base_shapes": True}, ("save_base_shapes",)),
    ],
)
def test_what_does_not_fit_mup_is_refused_by_name(keys: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        small_plan(**keys)
    assert [problem.keys for problem in refused.value.problems] == [named]
