"""A soft prompt: what it adds, and that nothing else is trained, stored by the optimizer or counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neox.model import GPT, SoftPrompt
from neox.optim import parameter_groups
from neox.parallel import ParallelGrid
from tests.losses import causal_lm_loss
from tests.plans import SMALL, problem_keys, small_plan

TOKENS = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(0))
PROMPT: dict[str, Any] = {"soft_prompt_tuning": {"enabled": True, "num_tokens": 3, "init_range": 0.25}}


def test_a_prompt_of_a_texts_vectors_is_that_text() -> None:
    model, plain = (GPT(small_plan(**keys), ParallelGrid.single()).eval() for keys in (PROMPT, {}))
    text = torch.tensor([7, 8, 9])
    with torch.no_grad():
        assert model.sequential[1].soft_embedding_weight.abs().max() <= 0.25
        model.sequential[1].soft_embedding_weight.copy_(model.sequential[0].word_embeddings(text[None])[0])
        expected = plain(torch.cat([text.expand(2, -1), TOKENS], dim=1))[:, 3:]
        torch.testing.assert_close(model(TOKENS), expected, atol=1e-6, rtol=1e-5)


def test_only_the_prompt_is_trained() -> None:
    model = GPT(small_plan(**PROMPT), ParallelGrid.single())
    causal_lm_loss(model, TOKENS, TOKENS, torch.ones(TOKENS.shape)).backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == [
        "sequential.1.soft_embedding_weight"
    ]
    (group,) = parameter_groups(model.named_parameters(), 0.1)
    assert [tuple(p.shape) for p in group["params"]] == [(3, 32)]


def test_memory_holds_gradients_and_states_of_the_prompt_alone() -> None:
    plan, plain = small_plan(**PROMPT), small_plan()
    assert plan.layers.numel == plain.layers.numel + 3 * 32
    assert plan.memory.weights == 4 * plan.layers.numel
    assert plan.memory.optimizer == 8 * 3 * 32
    assert plan.memory.gradients == 4 * 3 * 32


def test_the_prompt_stands_between_padding_and_tokens() -> None:
    prompt = SoftPrompt(2, 1)
    with torch.no_grad():
        prompt.soft_embedding_weight.copy_(torch.tensor([[-1.0], [-2.0]]))
    x = torch.tensor([[[0.0], [0.0], [1.0], [2.0]], [[1.0], [2.0], [3.0], [4.0]]])
    assert prompt(x, torch.tensor([2, 0])).squeeze(-1).tolist() == [[0, 0, -1, -2, 1, 2], [-1, -2, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"pipe_parallel_size": 2}, "pipe_parallel_size"),
        ({"attention_config": ["global", "gmlp"]}, "attention_config"),
        ({"lora": {"r": 2}}, "lora"),
        ({"reset_attention_mask": True}, "reset_attention_mask"),
    ],
)
def test_what_does_not_fit_a_prompt_is_refused_by_name(keys: dict[str, Any], named: str) -> None:
    (found,) = problem_keys(keys.get("pipe_parallel_size", 1), **SMALL, **PROMPT, **keys)
    assert {named, "soft_prompt_tuning"} <= {key.partition(".")[0] for key in found}
    assert small_plan(soft_prompt_tuning={"enabled": False}).architecture.soft_prompt_tokens == 0
