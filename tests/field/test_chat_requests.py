"""Requests of OpenAI's protocol for conversations as clients send them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from neox.generation.chat_api import parse_chat_request
from neox.generation.chat_format import ChatFormat
from neox.generation.request_fields import BadRequest, RequestLimits
from neox.tokenizer import build_tokenizer
from neox.tokenizer.chat import ChatTemplate
from tests.unit.generation.toy import ToyModel, hashed

CODEC = build_tokenizer("CharLevelTokenizer", None)
MODEL = ToyModel(hashed, vocab_size=512, max_length=4000)
QWEN = (
    "{%- for m in messages %}{{ '<' + m.role + '>' + (m.content or '') }}{%- for c in m.tool_calls or [] %}"
    "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' }}{{ c.function.arguments | tojson }}{{ '}' }}"
    "{%- endfor %}{%- endfor %}{%- if add_generation_prompt %}<assistant>{%- endif %}"
)
DEEPSEEK = QWEN.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
GLM = QWEN.replace(
    "{{ c.function.arguments | tojson }}",
    "{%- for k, v in c.function.arguments.items() %}{{ '[' + k + '=' + v + ']' }}{%- endfor %}",
)
STRICT = QWEN.replace("(m.content or '')", "m.content")
USER = {"role": "user", "content": "weather?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"town": "Paris"}'}}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "sun"}
HISTORY = '<user>weather?<assistant>{"name": "get_weather", "arguments": {"town": "Paris"}}<tool>sun<assistant>'


def prompt_of(messages: list[Any], template: str = QWEN, **fields: Any) -> str:
    """Text that the model gets."""
    chat = ChatFormat(ChatTemplate(template, {}), CODEC)
    request = parse_chat_request({"messages": messages, "max_tokens": 4, **fields}, MODEL, chat, RequestLimits())
    return CODEC.decode(list(request.prompts[0]))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "refusal": None, "audio": None},
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
    ],
    ids=["null", "absent", "empty", "function_call"],
)
@pytest.mark.parametrize("template", [QWEN, DEEPSEEK, STRICT])
def test_calls_in_the_history(message: dict[str, Any], template: str) -> None:
    """mistral-common#324, autogen#6788, sglang#6556, transformers#45419: null contents; arguments are JSON texts."""
    assert prompt_of([USER, message, TOOL], template) == HISTORY


def test_templates_that_walk_through_arguments() -> None:
    """mlx-openai-server#234: a template reads the arguments as an object."""
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert "[town=Paris]" in prompt_of([USER, message, TOOL], GLM)
    for arguments in ("", "null", None):
        function = {"name": "now", "arguments": arguments}
        assert '"now"' in prompt_of([USER, {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}], GLM)


@pytest.mark.parametrize("arguments", ['"Beijing"', '["Beijing"]', '{"town": ', "Beijing"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    """sglang#28035: refused before the template fails on them."""
    call = {**CALL, "function": {"name": "get_weather", "arguments": arguments}}
    with pytest.raises(BadRequest) as caught:
        prompt_of([USER, {"role": "assistant", "content": None, "tool_calls": [call]}], GLM)
    assert caught.value.field == "messages"


def test_parts_refusals_roles_and_fields_of_newer_clients() -> None:
    parts = [{"type": "text", "text": "weather"}, {"type": "text", "text": "?"}]
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    assert prompt_of([{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]) == (
        "<system>x<user>weather?<assistant>"
    )
    assert prompt_of([USER, refused, USER]) == "<user>weather?<assistant>No.<user>weather?<assistant>"
    assert prompt_of([USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}]).count("No.")
    assert prompt_of([USER, {"role": "function", "name": "f", "content": "sun"}]).count("<tool>sun")
    thinking = "{%- if enable_thinking is defined and not enable_thinking %}[off]{%- endif %}" + QWEN
    more = {"chat_template_kwargs": {"enable_thinking": False}, "safety_identifier": "x", "prompt_cache_key": "y"}
    assert prompt_of([USER], thinking, **more).startswith("[off]")


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "tool", "tool_call_id": "c1"}], "messages[0].content"),
        ([USER, {"role": "assistant", "content": None}], "messages[1].content"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}], "messages[1].content"),
        ([USER, {"role": "assistant", "tool_calls": "get_weather"}], "messages[1].tool_calls"),
        ([USER, {"role": "assistant", "tool_calls": [{"name": "x"}]}], "messages[1].tool_calls"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "user", "content": "a \ud83d"}], "messages"),
        ([{"role": "user", "content": "a", "name": "\udc00"}], "messages"),
        ([USER, {"role": "assistant", "tool_calls": [{**CALL, "id": "\ud800"}]}], "messages"),
    ],
)
def test_what_is_refused(messages: list[Any], field: str) -> None:
    """tiktoken#82, transformers#8886: a lone surrogate anywhere is the client's mistake."""
    with pytest.raises(BadRequest) as caught:
        prompt_of(messages)
    assert (caught.value.status, caught.value.field) == (400, field)


@pytest.mark.parametrize("where", ["content", "role", "stop", "model", "unknown"])
def test_a_lone_surrogate_over_http(where: str, tmp_path: Path) -> None:
    httpx = pytest.importorskip("httpx", reason="httpx, which the test speaks to the server with, is not installed")
    pytest.importorskip("starlette", reason="starlette (requirements/requirements-serve.txt) is not installed")
    from tests.field.test_chat_data import as_saved_tokenizer

    codec = build_tokenizer("HFTokenizer", as_saved_tokenizer(tmp_path))
    template = "{{ raise_exception(messages[0].content) if messages[0].role == 'system' else messages[0].content }}"
    bodies: dict[str, dict[str, Any]] = {
        "content": {"messages": [{"role": "user", "content": "a \ud83d"}]},
        "role": {"messages": [{"role": "system", "content": "a \ud83d"}]},
        "stop": {"messages": [USER], "stop": ["\ud83d"]},
        "model": {"messages": [USER], "model": "\ud83d"},
        "unknown": {"messages": [USER], "\ud83d": 1},
    }

    async def call() -> Any:
        from neox.generation.server import make_app

        app = make_app(MODEL, codec, name="toy", chat=ChatFormat(ChatTemplate(template, {}), codec))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            headers = {"content-type": "application/json"}
            content = json.dumps({"max_tokens": 2, **bodies[where]})
            return await http.post("/v1/chat/completions", content=content, headers=headers)

    assert asyncio.run(call()).status_code == (200 if where == "model" else 400)
