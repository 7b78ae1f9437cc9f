"""Norms of weights and of the optimizer's states, and zeros in gradients, equal in every layout."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

KEYS = {"log_param_norm": True, "log_grad_pct_zeros": True, "log_optimizer_states": True, "no_weight_tying": True}


def observed(plan):
    """Numbers of three steps, and on one rank the same of the model and the optimizer themselves."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.features.table import build_features

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device, build_features)
    data = batches(plan, grid.dp_rank)
    zeros = []
    engine.optimizer.register_step_pre_hook(lambda optimizer, *_: zeros.append(zero_share(optimizer)))
    found = []
    for _ in range(3):
        found.append(engine.train_batch(data).numbers)
    weights = sum(parameter.double().square().sum().item() for parameter in engine.deepspeed_engine.module.parameters())
    moments = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    for state in engine.optimizer.state.values():
        for name in moments:
            moments[name] += state[name].double().square().sum().item()
    expected = {"train/param_norm": math.sqrt(weights), "train/grad_pct_zeros": zeros[-1]}
    return found, expected | {f"optimizer/{name}_norm": math.sqrt(square) for name, square in moments.items()}


def zero_share(optimizer):
    gradients = [tensor.grad for group in optimizer.param_groups for tensor in group["params"]]
    return 100.0 * sum((each == 0).sum().item() for each in gradients) / sum(each.numel() for each in gradients)


def test_states_of_parameters_of_one_element_count():
    """The norms of this network have one scale each."""
    plan = tiny_plan(1, **KEYS, norm="scalenorm")
    steps, expected = run_ranks(1, observed, plan)[0]
    for name in ("optimizer/exp_avg_norm", "optimizer/exp_avg_sq_norm"):
        assert steps[-1][name] == pytest.approx(expected[name], rel=1e-6)


def test_numbers_equal_those_of_a_plain_computation_in_every_layout():
    steps, expected = run_ranks(1, observed, tiny_plan(1, **KEYS))[0]
    assert set(steps[-1]) == set(expected)
    assert 0 < expected["train/grad_pct_zeros"] < 100
    for name, value in expected.items():
        assert steps[-1][name] == pytest.approx(value, rel=1e-5), name
    for layout in ({"mp": 2}, {"zero": 1}, {"zero": 3}, {"pp": 2}):
        for found, _ in run_ranks(2, observed, tiny_plan(2, **layout, **KEYS)):
            for name, value in expected.items():
                assert found[-1][name] == pytest.approx(value, rel=1e-3), (layout, name)


def test_characters_are_counted_where_tokens_are_in_the_loss():
    from neox.features.char_perplexity.run import CharacterCounter
    from neox.tokenizer import build_tokenizer

    counter = CharacterCounter(build_tokenizer("CharLevelTokenizer", None))
    labels = torch.tensor([list(b"abcd"), list("é..".encode())])
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    assert len(list(counter.evaluation_batches(iter([{"labels": labels, "loss_mask": mask}])))) == 1
    assert counter.tokens_per_character(SimpleNamespace(gather=lambda own: [own, (3, 4)])) == pytest.approx(
        (6 + 3) / (5 + 4)
    )
