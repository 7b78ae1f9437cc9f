"""Penalties, filters and draws, against their definitions and against Hugging Face's processors."""

import pytest
import torch
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from neox.errors import GenerationError
from neox.generation.request import SamplingParams
from neox.generation.sampling import (
    TokenChooser,
    draw,
    filter_logits,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
    sequence_uniforms,
)
from tests.errors import raises_naming


def random_logits(rows: int = 3, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("k", [1, 5, 50, 99])
def test_top_k_equals_hugging_face(k):
    logits = random_logits()
    assert torch.equal(keep_top_k(logits, k), TopKLogitsWarper(k)(None, logits))


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9, 0.999])
def test_top_p_equals_hugging_face(p):
    logits = random_logits()
    assert torch.equal(keep_top_p(logits, p), TopPLogitsWarper(p)(None, logits))


def test_filters_in_hugging_face_order():
    logits = random_logits(seed=4)
    expected = TopPLogitsWarper(0.7)(None, TopKLogitsWarper(9)(None, TemperatureLogitsWarper(1.7)(None, logits)))
    assert torch.equal(filter_logits(logits, SamplingParams(temperature=1.7, top_k=9, top_p=0.7)), expected)


def test_repetition_penalty_equals_hugging_face():
    logits, ids = random_logits(), torch.tensor([[1, 2, 2], [4, 5, 6], [0, 0, 0]])
    seen = torch.zeros(3, 50, dtype=torch.bool).scatter(1, ids, True)
    assert torch.equal(
        penalize_repetition(logits, seen, 1.3), RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    )


def test_draw_follows_the_probabilities_and_never_takes_the_impossible():
    logits = torch.tensor([[0.0, float("-inf"), 1.0, float("-inf")]])
    uniforms = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:-1]
    ids = draw(logits.expand(10_000, -1), uniforms)
    assert set(ids.tolist()) == {0, 2}
    assert (ids == 2).double().mean() == pytest.approx(torch.tensor([0.0, 1.0]).softmax(0)[1].item(), abs=2e-4)


def test_draw_at_the_edges_of_the_interval():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]] * 2)
    assert draw(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 1]


def test_random_numbers_belong_to_the_sequence_and_not_to_the_batch():
    together = sequence_uniforms(7, [0, 1, 2], 4)
    assert torch.equal(together[2:], sequence_uniforms(7, [2], 4))
    assert torch.equal(together[:, :2], sequence_uniforms(7, [0, 1, 2], 2))
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together, sequence_uniforms(8, [0, 1, 2], 4))


def test_end_of_document_waits_for_the_minimum():
    logits = torch.tensor([[9.0, 1.0, 0.0]])
    chooser = TokenChooser(SamplingParams(min_new_tokens=2), [[1]], [0], 3, 0, torch.device("cpu"))
    assert [chooser(logits).item() for _ in range(3)] == [1, 1, 0]


def test_repetition_is_remembered():
    logits = torch.tensor([[1.0, 0.9, 0.8]])
    chooser = TokenChooser(SamplingParams(repetition_penalty=2.0), [[0]], [0], 3, 2, torch.device("cpu"))
    assert [chooser(logits).item() for _ in range(3)] == [1, 2, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_refused(bad):
    logits = random_logits()
    logits[1, 7] = bad
    chooser = TokenChooser(SamplingParams(), [[1]] * 3, [0, 1, 2], 50, 0, torch.device("cpu"))
    with pytest.raises(GenerationError):
        chooser(logits)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_new_tokens": 0}, "maximum_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, "minimum_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"stop": ("",)}, "stop"),
        ({"num_beams": 2, "temperature": 1.0}, "temperature 1.0"),
        ({"num_beams": 2, "stop": ("x",)}, "num_beams"),
    ],
)
def test_settings_that_make_no_sense(settings, named):
    with raises_naming(GenerationError, named):
        SamplingParams(**settings)


@pytest.mark.parametrize("temperature", [1e-6, 1e-19, 1e-45, 1e-300])
def test_next_to_no_temperature_takes_the_most_probable(temperature):
    params = SamplingParams(temperature=temperature, max_new_tokens=2, top_p=0.9)
    chooser = TokenChooser(params, [[0]], [0], 4, 0, torch.device("cpu"))
    assert chooser(torch.tensor([[1.0, 30.0, -2.0, 29.9]])).tolist() == [1]


def test_greedy_takes_the_second_best_while_the_end_is_forbidden():
    chooser = TokenChooser(
        SamplingParams(max_new_tokens=4, min_new_tokens=1), [[1], [1]], [0, 1], 5, 3, torch.device("cpu")
    )
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0, 4.0], [5.0, 5.0, 0.0, 1.0, 2.0]])
    before = logits.clone()
    assert chooser(logits).tolist() == [4, 0]
    assert chooser(logits).tolist() == [3, 0]
    assert torch.equal(logits, before)


def test_a_row_without_any_possible_token_is_refused():
    chooser = TokenChooser(SamplingParams(max_new_tokens=4), [[1]], [0], 5, 3, torch.device("cpu"))
    with pytest.raises(GenerationError):
        chooser(torch.full((1, 5), float("-inf")))
