"""OpenAI's protocol for conversations: checking requests and building answers, without a network."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from neox.generation.answers import GenerationRequest, envelope
from neox.generation.chat_format import NO_TEMPLATE, AnswerStream, ChatFormat
from neox.generation.decoding import Continuation, LanguageModel
from neox.generation.request_fields import (
    BadRequest,
    Limits,
    boolean,
    check_prompt,
    fields_of,
    number,
    refuse_unknown,
    sampling_of,
    stream_usage,
    token_limit,
)
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
_ROLES = ("system", "developer", "user", "assistant", "tool")
_WHOLE = "chat.completion"
_PART = "chat.completion.chunk"


def parse_chat_request(body: Any, model: LanguageModel, chat: ChatFormat | None, limits: Limits) -> GenerationRequest:
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
    stream = boolean(fields, "stream")
    with_usage = stream_usage(fields, stream)
    params = chat.ending(sampling_of(fields, limits, _longest(fields, limits)))
    refuse_unknown(fields)
    try:
        prompt = chat.encode(messages)
    except ChatError as error:
        raise BadRequest(f"`messages`: {error}", field="messages") from error
    except UnicodeEncodeError as error:
        raise BadRequest(
            "`messages` contains a lone UTF-16 surrogate (\\ud800 to \\udfff), which is not valid text",
            field="messages",
        ) from error
    check_prompt(prompt, params, model, "messages")
    prompts = (tuple(prompt),) * n
    return GenerationRequest(prompts, params, stream, with_usage, ChatAnswers(chat, n))


def _longest(fields: dict[str, Any], limits: Limits) -> int:
    """Remove `max_completion_tokens` and its older name `max_tokens`; by default as many as the server allows."""
    newer = token_limit(fields, "max_completion_tokens", limits.max_tokens, limits)
    older = token_limit(fields, "max_tokens", limits.max_tokens, limits)
    return min(newer, older)


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation. Their texts are strings, also where the request has parts."""
    if not isinstance(value, list) or not value:
        raise BadRequest("`messages` must be a list of messages, and not empty", field="messages")
    messages = []
    for index, message in enumerate(value):
        place = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise BadRequest(f"`{place}` must be an object with a `role`, one of {', '.join(_ROLES)}", field=place)
        role = message["role"]
        if role == "developer":  # OpenAI's newer name
            role = "system"
        messages.append({**message, "role": role, "content": _content(message.get("content"), place)})
    return messages


def _content(value: Any, place: str) -> str:
    """Return the text of a message: a string, or the joined texts of its parts."""
    place = f"{place}.content"
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise BadRequest(f"`{place}` must be a string or a list of texts", field=place)
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRequest(f"`{place}` must contain only parts of type text: this model reads text", field=place)
        texts.append(part["text"])
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
