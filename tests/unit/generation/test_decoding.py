"""The loop on a toy model: ragged batches, ends, stop strings, seeds, beams."""

import pytest
import torch

from neox.errors import GenerationError
from neox.generation.beam_search import beam_search
from neox.generation.completion import generate
from neox.generation.decoding import decode
from neox.generation.request import SamplingParams
from tests.errors import raises_naming
from tests.unit.generation.toy import ToyCodec, ToyModel, hashed, next_letter

CODEC = ToyCodec()


def texts(prompts, rule=next_letter, **settings):
    return [c.text for c in generate(ToyModel(rule), prompts, SamplingParams(**settings), CODEC)]


def test_each_prompt_of_a_ragged_batch_goes_on_by_itself():
    assert texts(["xyz", "a", "xy"], max_new_tokens=3) == ["", "bcd", "z"]


def test_what_ended_by_itself_is_finished():
    done = generate(ToyModel(next_letter), ["x", "a"], SamplingParams(max_new_tokens=3), CODEC)
    assert [(c.text, c.length, c.finished, c.tokens) for c in done] == [
        ("yz", 2, True, (25, 26)),
        ("bcd", 3, False, (2, 3, 4)),
    ]


def test_stop_strings_cut_the_text():
    done = generate(ToyModel(next_letter), ["a", "c", "e"], SamplingParams(max_new_tokens=9, stop=("de", "jk")), CODEC)
    assert [(c.text, c.finished) for c in done] == [("bc", True), ("", True), ("fghi", True)]


def test_streamed_text_is_the_text_and_holds_back_what_may_be_a_stop_string():
    told = {0: [], 1: []}
    params = SamplingParams(max_new_tokens=6, stop=("def",))
    done = generate(ToyModel(next_letter), ["a", "h"], params, CODEC, on_text=lambda n, text: told[n].append(text))
    assert told == {0: ["b", "c"], 1: ["i", "j", "k", "l", "m", "n"]}
    assert ["".join(told[n]) for n in (0, 1)] == [c.text for c in done]


def test_the_context_limits_each_sequence_alone():
    model = ToyModel(next_letter, max_length=5)
    done = generate(model, ["abcd", "a"], SamplingParams(max_new_tokens=9), CODEC)
    assert [c.text for c in done] == ["e", "bcde"]
    with raises_naming(GenerationError, "prompt 2", "5 tokens"):
        generate(model, ["a", "abcde"], SamplingParams(), CODEC)


def test_no_prompt_starts_after_the_end_of_a_document():
    assert texts([""], max_new_tokens=2) == ["ab"]
    with pytest.raises(GenerationError):
        decode(ToyModel(next_letter), [[]], SamplingParams(), CODEC)


def test_samples_do_not_depend_on_the_batch():
    prompts = ["abc", "d", "efghi", "d", "xy"]
    settings = {"temperature": 1.3, "top_k": 20, "seed": 5, "max_new_tokens": 12}
    params = SamplingParams(**settings)
    reference = [c.text for c in generate(ToyModel(hashed), prompts, params, CODEC, batch_size=1)]
    for size in (2, 5):
        assert [c.text for c in generate(ToyModel(hashed), prompts, params, CODEC, batch_size=size)] == reference
    assert reference[1] != reference[3], "the same prompt twice is two samples"
    part = generate(ToyModel(hashed), prompts[3:], params, CODEC, sequence_ids=[3, 4])
    assert [c.text for c in part] == reference[3:]
    assert texts(prompts, hashed, **{**settings, "seed": 6}) != reference


def test_kept_logits_are_those_the_tokens_came_from():
    (done,) = generate(
        ToyModel(hashed), ["ab"], SamplingParams(max_new_tokens=3, min_new_tokens=3), CODEC, keep_logits=True
    )
    assert len(done.logits) == done.length == 3
    assert torch.tensor(done.logits[0]).equal(hashed([1, 2]))
    assert set(done.to_json()) == {"context", "text", "length", "finished", "duration", "logits"}


def test_the_benchmark_decodes_without_a_tokenizer():
    from benchmarks.generate import NoText as BenchmarkTokenizer

    params = SamplingParams(max_new_tokens=3, min_new_tokens=3)
    (done,) = decode(ToyModel(hashed), [[1, 2]], params, BenchmarkTokenizer())
    assert len(done.tokens) == 3
    assert done.text == ""


def test_one_beam_is_greedy_and_more_find_what_is_no_less_probable():
    def log_probability(prompt, tokens):
        ids, total = list(prompt), 0.0
        for token in tokens:
            total += hashed(ids).log_softmax(-1)[token].item()
            ids.append(token)
        return total

    better = 0
    for start in range(1, 9):
        prompt = [start, 2, 3]
        params = SamplingParams(max_new_tokens=6, min_new_tokens=6)
        (greedy,) = decode(ToyModel(hashed), [prompt], params, CODEC)
        beam = beam_search(
            ToyModel(hashed), prompt, SamplingParams(max_new_tokens=6, min_new_tokens=6, num_beams=5), CODEC
        )
        assert log_probability(prompt, beam.tokens) >= log_probability(prompt, greedy.tokens) - 1e-5
        better += beam.tokens != greedy.tokens
        assert beam_search(ToyModel(hashed), prompt, params, CODEC).tokens == greedy.tokens
    assert better


def test_beams_through_generate():
    assert texts(["a", "x"], num_beams=3, max_new_tokens=3) == ["bcd", "yz"]
