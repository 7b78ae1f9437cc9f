"""Each choice has both halves: on paper, and as an implementation."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn

from neox import architecture, model, ops
from neox.architecture import NORMS
from neox.architecture.attention import QUERY_KEY_NORMS
from neox.architecture.choices import TRANSFORMER_ENGINE_NORMS
from neox.config.sections.model import ModelConfig
from tests.plans import small_plan


@pytest.mark.parametrize(
    ("on_paper", "implemented"),
    [
        (architecture.ACTIVATIONS, ops.ACTIVATIONS),
        (architecture.NORMS, ops.NORMS),
        (architecture.POSITIONS, model.POSITIONS),
        (architecture.BLOCKS, model.BLOCKS),
        (architecture.MLPS, model.MLPS),
    ],
    ids=["activation", "norm", "positions", "block", "mlp"],
)
def test_the_same_names(on_paper, implemented):
    assert on_paper.keys() == implemented.keys()


def test_every_residual_rule_is_implemented_and_used():
    assert {residual.rule for residual in architecture.RESIDUALS.values()} == model.RESIDUAL_RULES.keys()


@pytest.mark.parametrize(
    ("key", "on_paper"),
    [
        ("activation", architecture.ACTIVATIONS.keys()),
        ("norm", architecture.NORMS.keys() | TRANSFORMER_ENGINE_NORMS.keys()),
        ("pos_emb", architecture.POSITIONS.keys()),
        ("qk_norm", QUERY_KEY_NORMS.keys() - {"neox"}),
    ],
)
def test_keys_take_the_names_on_paper(key, on_paper):
    assert set(get_args(ModelConfig.model_fields[key].annotation)) == on_paper


@pytest.mark.parametrize("name", NORMS)
def test_a_norms_parameters(name):
    norm = ops.build_norm(small_plan(norm=name).architecture, 8)
    assert isinstance(norm, nn.Module)
    on_paper = {p.name: p.shape for p in NORMS[name].parameters(8)}
    assert {n: tuple(p.shape) for n, p in norm.named_parameters()} == on_paper


def test_a_norm_without_an_epsilon_gets_none(monkeypatch):
    network = replace(small_plan().architecture, norm="plain", norm_epsilon=0.0)
    monkeypatch.setattr(ops.norms, "NORMS_ON_PAPER", {"plain": replace(NORMS["layernorm"], epsilon_key=None)})
    monkeypatch.setattr(ops.norms, "NORMS", {"plain": lambda size, **options: nn.Linear(size, 1, **options)})
    assert ops.build_norm(network, dtype=torch.bfloat16).weight.shape == (1, network.hidden_size)
