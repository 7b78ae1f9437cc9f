"""The protocol of conversations over HTTP, with OpenAI's own client: answers, streams, refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from neox.generation.chat_api import parse_chat_request
from neox.generation.chat_format import AnswerStream, ChatFormat
from neox.generation.decoding import decode
from neox.generation.request import SamplingParams
from neox.generation.request_fields import RequestLimits
from neox.tokenizer import build_tokenizer
from neox.tokenizer.chat import ChatTemplate
from tests.unit.generation.toy import CHAT_TEMPLATE, ToyModel, hashed, shouting

pytest.importorskip("starlette", reason="starlette (requirements/requirements-serve.txt) is not installed")
pytest.importorskip("uvicorn", reason="uvicorn (requirements/requirements-serve.txt) is not installed")
httpx = pytest.importorskip("httpx", reason="httpx, which the tests speak to the server with, is not installed")

from neox.generation.server import make_app  # noqa: E402 (after the skips)
from tests.unit.generation.served import served  # noqa: E402

VOCAB = Path(__file__).parents[2] / "golden" / "data" / "tokenizer.json"
CODEC = build_tokenizer("CharLevelTokenizer", None)
CHAT = ChatFormat(ChatTemplate(CHAT_TEMPLATE, {}), CODEC)
MODEL = ToyModel(shouting, vocab_size=512, max_length=400)
HISTORY = [
    {"role": "system", "content": "Be loud."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1ONE"},
    {"role": "user", "content": "two é"},
]


@pytest.fixture(scope="module")
def openai() -> Any:
    """The package, which takes seconds to import: only in the process that runs these tests."""
    return pytest.importorskip("openai", reason="openai (requirements/requirements-dev.txt) is not installed")


@pytest.fixture(scope="module")
def client(openai: Any) -> Iterator[Any]:
    with served(make_app(MODEL, CODEC, name="toy", chat=CHAT, limits=RequestLimits(max_tokens=300))) as address:
        yield openai.OpenAI(base_url=f"{address}v1", api_key="none", max_retries=0)


def post(body: Any, *, chat: ChatFormat | None = CHAT, model: ToyModel = MODEL) -> Any:
    async def call() -> Any:
        app = make_app(model, CODEC, name="toy", chat=chat)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            headers = {"content-type": "application/json"}
            return await http.post("/v1/chat/completions", content=json.dumps(body), headers=headers)

    return asyncio.run(call())


def test_a_conversation_ends_before_the_next_question(client: Any) -> None:
    answer = client.chat.completions.create(model="toy", messages=HISTORY)
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "2TWO É", "stop")
    prompt = "system: Be loud.\n\nuser: one\n\nassistant: 1ONE\n\nuser: two é\n\nassistant:"
    assert answer.usage.prompt_tokens == len(prompt.encode())
    assert answer.usage.completion_tokens >= len(" 2TWO É\n\nuser:")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert [model.id for model in client.models.list()] == ["toy"]


def test_a_stream_has_a_role_text_and_a_reason_for_each_continuation(client: Any) -> None:
    chunks = list(
        client.chat.completions.create(
            model="toy", messages=HISTORY, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = ["", ""]
    reasons: dict[int, str] = {}
    for chunk in chunks:
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    assert texts == ["2TWO É", "2TWO É"]
    assert reasons == {0: "stop", 1: "stop"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0


def test_limits_and_stops(client: Any) -> None:
    create = client.chat.completions.create
    for limit in ("max_tokens", "max_completion_tokens"):
        short = create(model="toy", messages=HISTORY, **{limit: 4}).choices[0]
        assert (short.message.content, short.finish_reason) == ("2TW", "length")
    assert create(model="toy", messages=HISTORY, stop="O").choices[0].message.content == "2TW"
    ids = {"stop_token_ids": [ord("W")]}
    assert create(model="toy", messages=HISTORY, extra_body=ids).choices[0].message.content == "2T"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = create(model="toy", messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}])
    assert answer.choices[0].message.content == "1AB"


def test_the_seed_decides_what_is_drawn() -> None:
    model = ToyModel(lambda ids: hashed(ids).repeat(19)[:512], vocab_size=512, max_length=400)
    body = {"messages": HISTORY, "temperature": 1.0, "top_p": 0.9, "max_tokens": 12, "n": 2}
    one, two, other = (
        [choice["message"]["content"] for choice in post({**body, "seed": seed}, model=model).json()["choices"]]
        for seed in (1, 1, 2)
    )
    assert one == two != other
    assert one[0] != one[1]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": HISTORY, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": HISTORY, "n": 9}, "n"),
        ({"messages": HISTORY, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": HISTORY, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": HISTORY, "logprobs": True}, "logprobs"),
        ({"messages": HISTORY, "stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"messages": HISTORY, "temprature": 1}, None),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_name_of_the_field(body: Any, field: str | None) -> None:
    answer = post(body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)


def test_errors_reach_the_client_as_its_own_exceptions(openai: Any, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "x" * 500}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="toy", input="x")


def test_a_model_without_a_template_and_a_template_that_refuses() -> None:
    answer = post({"messages": HISTORY}, chat=None)
    assert answer.status_code == 400
    assert "chat_template" in answer.json()["error"]["message"]
    strict = ChatFormat(ChatTemplate("{{ raise_exception('roles must alternate') }}", {}), CODEC)
    answer = post({"messages": HISTORY}, chat=strict)
    assert answer.status_code == 400
    assert "roles must alternate" in answer.json()["error"]["message"]


def test_a_special_token_ends_an_answer(tmp_path: Path) -> None:
    backend = Tokenizer.from_file(str(VOCAB))
    backend.add_special_tokens(["<|im_end|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    chat = ChatFormat(ChatTemplate(template, {}), tokenizer)
    model = ToyModel(shouting, vocab_size=tokenizer.vocab_size)
    request = parse_chat_request({"messages": HISTORY[-1:], "max_tokens": 5}, model, chat, RequestLimits())
    assert request.params.stop_ids == (end,)
    assert request.prompts == (tuple(tokenizer.encode_bare("user\ntwo é<|im_end|>")),)


def test_stop_tokens_end_a_continuation_after_its_least_length() -> None:
    model = ToyModel(lambda ids: hashed([len(ids)]).repeat(19)[:512], vocab_size=512)
    (free,) = decode(model, [[1]], SamplingParams(max_new_tokens=8), CODEC)
    third = free.tokens[2]
    (ended,) = decode(model, [[1]], SamplingParams(max_new_tokens=8, stop_ids=(third,)), CODEC)
    assert ended.tokens == free.tokens[: free.tokens.index(third)]
    assert ended.finished
    (longer,) = decode(model, [[1]], SamplingParams(max_new_tokens=8, min_new_tokens=4, stop_ids=(third,)), CODEC)
    assert third not in longer.tokens[:4]
    assert len(longer.tokens) >= 4


@pytest.mark.parametrize(
    ("begin", "pieces", "text"),
    [(" ", [" ", "a"], "a"), (" ", ["a"], "a"), ("<t>", ["<", "t", ">a", "b"], "ab"), ("<t>", ["<", "x"], "<x")],
)
def test_the_text_before_an_answer_is_left_out_as_it_comes(begin: str, pieces: list[str], text: str) -> None:
    stream = AnswerStream(begin)
    shown = "".join(map(stream.push, pieces))
    assert shown + stream.finish() == text
