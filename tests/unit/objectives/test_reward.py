"""Reward models: the loss against its formula, the head among the layers, and the weights that a run starts from."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neox.checkpoint import CheckpointReader
from neox.errors import CheckpointError
from neox.model import LMHead, NetworkOutput
from neox.objectives.reward import RewardModel
from neox.parallel import ParallelGrid
from tests.losses import score_rows
from tests.plans import small_plan
from tests.unit.checkpoint.synthetic import write_checkpoint

ONE_RANK = cast(ParallelGrid, SimpleNamespace(dp_size=1, cp_size=1, tp_size=1))
PAIRS = {"train_impl": "rm", "pos_train_data_paths": ["a"], "neg_train_data_paths": ["b"]}
LORA = {"r": 2, "alpha": 4, "target": ["query_key_value"]}


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), center=st.sampled_from([0.0, 0.1]), square=st.sampled_from([0.0, 0.02]))
def test_scores_are_those_of_the_formulas(seed: int, center: float, square: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, 9, 4, generator=generator)
    weight = torch.randn(1, 4, generator=generator)
    ends = torch.tensor([[1, 3, 5, 8], [4, 8, 0, 0]])
    weights = torch.tensor([[1 / 3, 1 / 3], [1 / 3, 0.0]])
    head = LMHead(ONE_RANK, weight, lambda states: states @ weight.T)
    found = RewardModel(center, square).scores(NetworkOutput(hidden, head, {}), (ends, weights))
    losses = []
    scores = []
    margins = []
    for row, first, second in ((0, 1, 3), (0, 5, 8), (1, 4, 8)):
        good = (hidden[row, first] @ weight[0]).item()
        bad = (hidden[row, second] @ weight[0]).item()
        loss = math.log1p(math.exp(bad - good)) + center * (good + bad) ** 2 + square * (good**2 + bad**2)
        losses.append(loss)
        margins.append(good - bad)
        scores += [good, bad]
    expected = {
        "loss": sum(losses) / 3,
        "accuracy": sum(margin > 0 for margin in margins) / 3,
        "margin": sum(margins) / 3,
        "mean_reward": sum(scores) / 6,
        "min_reward": min(scores),
        "max_reward": max(scores),
    }
    assert score_rows(RewardModel(), found) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert found[0].item() == pytest.approx(expected["loss"], rel=1e-5), "the trained loss comes first"


def test_the_head_is_one_row_that_tensor_ranks_split() -> None:
    plan = small_plan(**PAIRS)
    (weight,) = plan.layers.head.parameters
    assert plan.layers.head.kind == "score_head"
    assert weight.shape == (1, plan.architecture.hidden_size)
    assert weight.shard_shape(2) == (1, plan.architecture.hidden_size // 2)
    rows = plan.padded_vocab_size
    assert plan.layers.numel == small_plan().layers.numel - (rows - 1) * plan.architecture.hidden_size


def test_adapters_leave_the_new_head_trained() -> None:
    layers = small_plan(**PAIRS, lora=LORA).layers
    assert [spec.trained for spec in layers.head.parameters] == [True]
    assert not any(spec.trained for spec in layers[0].parameters)


@pytest.mark.parametrize("untied", [True, False])
def test_a_reward_model_starts_from_a_language_model(tmp_path: Path, untied: bool) -> None:
    language = small_plan(no_weight_tying=untied).layers
    weights = {(layer.index, spec.name): torch.ones(spec.shape) for layer in language for spec in layer.parameters}
    path = write_checkpoint(tmp_path / "global_step3", language, weights)
    reward = small_plan(**PAIRS).layers
    assert CheckpointReader(path, reward, finetune=True).new_layers == {reward.head.index}
    both = {(layer.index, spec.name): torch.ones(spec.shape) for layer in reward for spec in layer.parameters}
    other = write_checkpoint(tmp_path / "global_step4", reward, both)
    assert not CheckpointReader(other, reward, finetune=True).new_layers
    with pytest.raises(CheckpointError, match="reward model"):
        CheckpointReader(other, small_plan(no_weight_tying=True).layers, finetune=True)
