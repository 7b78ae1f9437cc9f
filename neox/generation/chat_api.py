"""OpenAI's protocol for conversations: checking requests and building answers, without a network."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from neox.generation.answers import GenerationRequest, envelope
from neox.generation.chat_format import NO_TEMPLATE, AnswerStream, ChatFormat
from neox.generation.decoding import Continuation, LanguageModel
from neox.generation.request_fields import (
    BadRequest,
    RequestLimits,
    boolean,
    check_prompt,
    fields_of,
    number,
    refuse_unknown,
    sampling_of,
    stream_usage,
    token_limit,
)
from neox.generation.text_stream import is_text
from neox.tokenizer.chat_messages import ChatError

# Unsupported fields of the protocol, and the values at which they have no effect.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, False, True),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "metadata": (None, {}),
}
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_NEWER_ROLES: Mapping[str, str] = {"developer": "system", "function": "tool"}
"""OpenAI's names of roles that chat templates do not know, and what they are called there."""
_WHOLE = "chat.completion"
_PART = "chat.completion.chunk"


def parse_chat_request(
    body: Any, model: LanguageModel, chat: ChatFormat | None, limits: RequestLimits
) -> GenerationRequest:
    """Check a decoded JSON body.

    Args:
        body: The decoded JSON.
        model: Model that answers.
        chat: Form of conversations with the model; None if it has no chat template.
        limits: Limits of the server.

    Raises:
        BadRequest: Naming the field that is wrong, or because the model has no chat template.
    """
    if chat is None:
        raise BadRequest(f"{NO_TEMPLATE}, or use /v1/completions")
    fields = fields_of(body, _NEUTRAL)
    n = number(fields, "n", 1, int, 1, limits.sequences)
    messages = _messages(fields.pop("messages", None))
    variables = fields.pop("chat_template_kwargs", None) or {}
    if not isinstance(variables, dict):
        raise BadRequest("`chat_template_kwargs` must be an object", field="chat_template_kwargs")
    stream = boolean(fields, "stream")
    with_usage = stream_usage(fields, stream)
    params = chat.ending(sampling_of(fields, limits, _longest(fields, limits), model.vocab_size))
    refuse_unknown(fields)
    try:
        prompt = chat.encode(messages, variables)
    except ChatError as error:
        raise BadRequest(f"`messages`: {error}", field="messages") from error
    check_prompt(prompt, params, model, "messages")
    prompts = (tuple(prompt),) * n
    return GenerationRequest(prompts, n, params, stream, with_usage, ChatAnswers(chat, n))


def _longest(fields: dict[str, Any], limits: RequestLimits) -> int:
    """Remove `max_completion_tokens` and its older name `max_tokens`; by default as many as the server allows."""
    newer = token_limit(fields, "max_completion_tokens", limits.max_tokens, limits)
    older = token_limit(fields, "max_tokens", limits.max_tokens, limits)
    return min(newer, older)


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation as chat templates take them.

    Their texts are strings, also where the request has parts. A content that is null is absent, and older names of
    roles and calls have the newer ones.
    """
    if not isinstance(value, list) or not value:
        raise BadRequest("`messages` must be a list of messages, and not empty", field="messages")
    if not is_text(json.dumps(value, ensure_ascii=False)):
        raise BadRequest(
            "`messages` contains a lone UTF-16 surrogate (\\ud800 to \\udfff), which is not valid text",
            field="messages",
        )
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(message: Any, place: str) -> dict[str, Any]:
    """Return a message as `_messages` does."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise BadRequest(f"`{place}` must be an object with a `role`, one of {', '.join(_ROLES)}", field=place)
    result = {key: field for key, field in message.items() if field is not None}
    result["role"] = _NEWER_ROLES.get(result["role"], result["role"])
    if "audio" in result:
        raise BadRequest(f"`{place}.audio` is not supported: this model reads text", field=f"{place}.audio")
    if "function_call" in result:  # the name before `tool_calls`
        result.setdefault("tool_calls", [{"type": "function", "function": result.pop("function_call")}])
    if "refusal" in result:
        result.setdefault("content", result.pop("refusal"))
    if "tool_calls" in result:
        _check_calls(result["tool_calls"], f"{place}.tool_calls")
    may_lack_content = (result["role"] == "assistant" and result.get("tool_calls")) or message["role"] == "function"
    if "content" in result or not may_lack_content:
        result["content"] = _content(result.get("content"), place)
    return result


def _check_calls(calls: Any, place: str) -> None:
    """Raise BadRequest for calls that have no name, or arguments that are neither text nor an object."""
    if not isinstance(calls, list):
        raise BadRequest(f"`{place}` must be a list", field=place)
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(f"`{place}` must contain objects with a `function` that has a `name`", field=place)
        if not isinstance(function.get("arguments"), str | dict | None):
            raise BadRequest(f"`{place}`: the `arguments` of a function must be JSON in a string", field=place)


def _content(value: Any, place: str) -> str:
    """Return the text of a message: a string, or the joined texts of its parts."""
    place = f"{place}.content"
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise BadRequest(f"`{place}` must be a string or a list of texts", field=place)
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise BadRequest(f"`{place}` must contain only parts of type text: this model reads text", field=place)
        texts.append(part[kind])
    return "".join(texts)


class ChatAnswers:
    """Writer of the answer to a request for a conversation.

    Attributes:
        id: Identifier of the answer.
    """

    def __init__(self, chat: ChatFormat, count: int) -> None:
        """Start an answer with a number of continuations."""
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self._chat = chat
        self._streams = [AnswerStream(chat.form.begin) for _ in range(count)]

    def whole(self, model: str, results: Sequence[Continuation], late: bool) -> dict[str, Any]:
        """Return the whole answer. An answer that the time limit has ended has the reason `length`, too."""
        choices = []
        for index, result in enumerate(results):
            message = {"role": "assistant", "content": self._chat.answer(result.text), "refusal": None}
            reason = _finish_reason(result)
            choices.append({"index": index, "message": message, "logprobs": None, "finish_reason": reason})
        return envelope(self.id, _WHOLE, model, choices)

    def first(self, model: str) -> Iterator[dict[str, Any]]:
        """Yield a part with the role of each continuation."""
        for index in range(len(self._streams)):
            yield self._part(model, index, {"role": "assistant", "content": "", "refusal": None})

    def piece(self, model: str, index: int, text: str) -> Iterator[dict[str, Any]]:
        """Yield the part with new text of a continuation, if some of it is certain."""
        certain = self._streams[index].push(text)
        if certain:
            yield self._part(model, index, {"content": certain})

    def last(self, model: str, results: Sequence[Continuation], late: bool) -> Iterator[dict[str, Any]]:
        """Yield a part for each continuation that says why it ended, after the rest of its text."""
        for index, result in enumerate(results):
            rest = self._streams[index].finish()
            if rest:
                yield self._part(model, index, {"content": rest})
            yield self._part(model, index, {}, _finish_reason(result))

    def counts(self, model: str) -> dict[str, Any]:
        """Return the part for token counts."""
        return envelope(self.id, _PART, model, [])

    def _part(self, model: str, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return envelope(self.id, _PART, model, [choice])


def _finish_reason(result: Continuation) -> str:
    return "stop" if result.finished else "length"
