"""The prompt loop: what is asked, what is answered, and how it ends."""

import io

import pytest

from neox.generation.interactive import interact
from neox.generation.request import SamplingParams
from neox.parallel import ParallelGrid
from tests.unit.generation.toy import ToyCodec, ToyModel, next_letter


def talk(typed, prompt_end="\n", **settings):
    sink = io.StringIO()
    params = SamplingParams(max_new_tokens=3, **settings)
    model = ToyModel(next_letter, max_length=8)
    interact(
        model, params, ToyCodec(), ParallelGrid.single(), prompt_end=prompt_end, source=io.StringIO(typed), sink=sink
    )
    return sink.getvalue()


def test_prompts_are_answered_until_stop():
    said = talk("abc\nx\nstop\nnever\n")
    assert said.startswith("greedy; up to 3 tokens; `stop` ends\nContext prompt >>> abc\ndef\n[")
    assert "Context prompt >>> x\nyz\n[" in said
    assert said.count("Context prompt") == 3


def test_an_empty_prompt_generates_without_a_context():
    assert "Context prompt >>> \nabc\n[" in talk("\nstop\n")  # after the end of a document, 0
    assert talk("END\nstop\n", prompt_end="END").count("tokens/s]") == 1


def test_long_prompts_are_answered_kindly_and_the_loop_goes_on():
    said = talk("abcdefghi\na\nstop\n")
    assert "9 tokens" in said
    assert "bcd\n[" in said


def test_the_end_of_the_input_ends_it():
    assert talk("a\n").count("Context prompt") == 2


def test_prompts_of_several_lines():
    said = talk("ab\ncEND\nstop\n", prompt_end="END")
    assert "context is" not in said  # "ab\nc" has 4 letters
    assert said.count("Context prompt") == 2


@pytest.mark.parametrize(
    ("settings", "line"),
    [({"num_beams": 2}, "beam search with 2 beams"), ({"temperature": 0.5, "top_k": 4}, "temperature 0.5, top_k 4")],
)
def test_the_settings_are_said_and_beams_answer_too(settings, line):
    said = talk("abc\nstop\n", **settings)
    assert line in said
    assert "tokens/s]" in said
