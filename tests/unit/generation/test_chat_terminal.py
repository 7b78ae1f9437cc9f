"""The conversation on a terminal: history, commands, lines that go on, and its ends."""

from __future__ import annotations

import io
import os
import signal

import pytest
import torch

from neox.errors import GenerationError
from neox.generation.chat_format import ChatFormat
from neox.generation.chat_terminal import Conversation, converse
from neox.generation.request import SamplingParams, check_generation
from neox.parallel import ParallelGrid
from neox.tokenizer import build_tokenizer
from neox.tokenizer.chat import ChatTemplate
from tests.unit.generation.toy import CHAT_TEMPLATE, ToyModel, shouting

CODEC = build_tokenizer("CharLevelTokenizer", None)


def talk(typed: str, model: ToyModel | None = None, tokens: int = 100) -> tuple[str, Conversation]:
    """Return what was shown, and the conversation."""
    sink = io.StringIO()
    conversation = converse(
        model or ToyModel(shouting, vocab_size=512, max_length=300),
        SamplingParams(max_new_tokens=tokens),
        ChatFormat(ChatTemplate(CHAT_TEMPLATE, {}), CODEC),
        CODEC,
        ParallelGrid.single(),
        source=io.StringIO(typed),
        sink=sink,
    )
    return sink.getvalue(), conversation


def test_the_history_is_kept_until_it_is_reset() -> None:
    said, conversation = talk("one\n\ntwo\n/reset\nthree\n")
    assert ">>> one\n1ONE\n[" in said
    assert ">>> \n>>> two\n2TWO\n[" in said  # an empty line is no question
    assert "1THREE\n[" in said
    assert conversation.messages == [
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "1THREE"},
    ]


def test_the_system_message_stays_and_lines_go_on() -> None:
    said, conversation = talk("/system Be loud.\nfirst \\\nsecond\n/reset\n/usr/bin\n/nothing\n/help\n/system\nx\\\n")
    assert "1FIRST \nSECOND\n[" in said
    assert "1/USR/BIN\n[" in said  # no command
    assert said.count("/reset ") == 2  # in the answers to /nothing and /help
    assert conversation.system is None
    assert conversation.turns[-1]["content"] == "2X"


def test_questions_that_do_not_fit_leave_no_trace() -> None:
    said, conversation = talk("one\n" + "x" * 300 + "\ntwo\n")
    assert "/reset forgets" in said
    assert [turn["content"] for turn in conversation.turns] == ["one", "1ONE", "two", "2TWO"]


def test_a_failing_model_leaves_no_trace() -> None:
    def rule(ids: list[int]) -> torch.Tensor:
        return shouting(ids) * (float("nan") if b"two" in bytes(ids) else 1)

    said, conversation = talk("two\n/reset\none\n", ToyModel(rule, vocab_size=512, max_length=300))
    assert "not finite" in said
    assert [turn["content"] for turn in conversation.turns] == ["one", "1ONE"]


def test_an_answer_that_reaches_its_limit_says_so() -> None:
    said, _ = talk("one\n", tokens=3)
    assert "reached maximum_tokens" in said


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    steps: list[int] = []

    def rule(ids: list[int]) -> torch.Tensor:
        steps.append(len(ids))
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return shouting(ids)

    before = signal.getsignal(signal.SIGINT)
    said, conversation = talk("one\ntwo\n", ToyModel(rule, vocab_size=512, max_length=300))
    assert "(stopped)" in said
    assert [turn["content"] for turn in conversation.turns] == ["one", "1O", "two", "2TWO"]
    assert signal.getsignal(signal.SIGINT) is before


def test_beams_are_refused_in_a_conversation() -> None:
    from neox.config import NeoXConfig

    config = NeoXConfig.from_flat({"text_gen_type": "chat", "num_beams": 2})
    with pytest.raises(GenerationError, match="num_beams"):
        check_generation(config, None)


def test_an_answer_without_text_is_told() -> None:
    def ends_at_once(ids: list[int]) -> torch.Tensor:
        scores = torch.zeros(512)
        scores[CODEC.eod] = 1.0
        return scores

    said, _ = talk("one\n", ToyModel(ends_at_once, vocab_size=512, max_length=300))
    assert "ended at once" in said
