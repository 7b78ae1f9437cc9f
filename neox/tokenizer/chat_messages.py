"""Messages, tools and their nested values in the form that a chat template takes.

Who writes a conversation follows OpenAI's protocol, a data set's habits or a table's columns: arguments of calls are
JSON texts or objects, contents are texts or lists of parts, and what is absent may be null. A template takes some of
these forms. Which ones is found by rendering short conversations with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
"""Function from messages to the text of a template. It raises ChatError if the template refuses them."""

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names for the thoughts of a message
_CALLS = "tool_calls"
_ARGUMENTS = "arguments"
_END_OF_THOUGHTS = "</think>"
_PROBE_ARGUMENTS = {"probe-key": "probe value", "other-key": "other value"}
_PROBE_TEXTS = (" probe-one ", " probe-two ")


class ChatError(Exception):
    """The template refuses a conversation. The message says why."""


class DateNeededError(ChatError):
    """The template writes today's date, and none is given."""


class Contents(Enum):
    """Form of contents that a template takes."""

    AS_GIVEN = "texts and parts"
    TEXTS = "texts"
    PARTS = "lists of parts"


class Arguments(Enum):
    """Form of a call's arguments that a template takes."""

    AS_GIVEN = "JSON texts and objects"
    TEXTS = "JSON texts"
    OBJECTS = "objects"


@dataclass(frozen=True)
class MessageForms:
    """Forms that a template takes.

    Attributes:
        contents: Form of contents.
        arguments: Form of the arguments of calls.
        needs_content: Whether a message with calls needs a content, if only an empty one.
    """

    contents: Contents = Contents.AS_GIVEN
    arguments: Arguments = Arguments.AS_GIVEN
    needs_content: bool = False


def find_forms(render: Render) -> MessageForms:
    """Find the forms that a template takes. `render` gets messages in the forms to try."""
    arguments = _arguments_form(render)
    question, call = _probe_call(json.dumps(_PROBE_ARGUMENTS) if arguments is Arguments.TEXTS else _PROBE_ARGUMENTS)
    without_content = {key: value for key, value in call.items() if key != "content"}
    needs_content = bool(_tried(render, [question, call])) and not _tried(render, [question, without_content])
    return MessageForms(_contents_form(render), arguments, needs_content)


def _contents_form(render: Render) -> Contents:
    """Find the form of contents.

    If a template writes the same for a text and for its parts, or writes parts as Python shows them, parts are joined.
    """
    parts = [{"type": "text", "text": text} for text in _PROBE_TEXTS]
    by_text = _tried(render, [{"role": "user", "content": "".join(_PROBE_TEXTS)}])
    by_parts = _tried(render, [{"role": "user", "content": parts}])
    parts_are_read = _has_probe(by_parts) and "'text'" not in by_parts
    if not _has_probe(by_text):
        return Contents.PARTS if parts_are_read else Contents.AS_GIVEN
    if parts_are_read and by_parts != by_text:
        return Contents.AS_GIVEN
    return Contents.TEXTS


def _arguments_form(render: Render) -> Arguments:
    """Find the form of a call's arguments.

    If a template writes a text as it is, as with Qwen 3, both forms are left as they are. If it would write the text
    as a JSON string inside JSON, as with Qwen 2.5, or fails, arguments have to be objects.
    """
    by_object = _tried(render, _probe_call(_PROBE_ARGUMENTS))
    by_text = _tried(render, _probe_call(json.dumps(_PROBE_ARGUMENTS)))
    if not by_object:
        return Arguments.TEXTS if by_text else Arguments.AS_GIVEN
    return Arguments.AS_GIVEN if by_text == by_object else Arguments.OBJECTS


def _probe_call(arguments: Any) -> list[Message]:
    call = {"id": "call00000", "type": "function", "function": {"name": "probe", _ARGUMENTS: arguments}}
    return [{"role": "user", "content": "probe"}, {"role": "assistant", "content": "", _CALLS: [call]}]


def _tried(render: Render, messages: Sequence[Message]) -> str:
    """Return the text of a conversation; nothing if the template refuses it."""
    try:
        return render(messages)
    except ChatError:
        return ""


def _has_probe(text: str) -> bool:
    return all(probe.strip() in text for probe in _PROBE_TEXTS)


def with_forms(messages: Sequence[Message], forms: MessageForms) -> list[Message]:
    """Return messages in the forms that a template takes, without nulls, and with both names for thoughts.

    Raises:
        ChatError: If a value cannot be brought into its form, or is none of a text.
    """
    return [_with_forms(message, number, forms) for number, message in enumerate(messages)]


def _with_forms(message: Message, number: int, forms: MessageForms) -> Message:
    """Return a message as `with_forms` does."""
    result = {key: value for key, value in message.items() if value is not None}  # as transformers
    for name in _REASONING:
        if name in result:
            result = {"thinking": result[name], **result, "reasoning_content": result[name]}
            break
    if "content" in result:
        result["content"] = _content(result["content"], f"message {number}", forms.contents)
    if _CALLS in result:
        calls = from_json_text(result.pop(_CALLS), f"{_CALLS} of message {number}")
        if not isinstance(calls, list | None):
            raise ChatError(f"{_CALLS} of message {number} is no list")
        if calls:
            if forms.needs_content:
                result.setdefault("content", "")
            result[_CALLS] = [_call(call, f"message {number}", forms.arguments) for call in calls]
    return result


def _content(content: Any, place: str, form: Contents) -> Any:
    """Return a content in the form that the template takes. Raises ChatError for parts that are no texts."""
    if isinstance(content, str):
        if form is Contents.PARTS:
            return [{"type": "text", "text": content}]
        return content
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if not isinstance(part, dict):
            raise ChatError(f"{place} has a content with a part that is no object with `type` and `text`")
        part = {key: value for key, value in part.items() if value is not None}
        kind = part.get("type")
        if kind not in ("text", "thinking") or not isinstance(part.get(kind), str):
            raise ChatError(f"{place} has a part of type {kind!r}; this model reads parts of type 'text'")
        parts.append(part)
    if form is not Contents.TEXTS:
        return parts
    if any(part["type"] != "text" for part in parts):
        raise ChatError(f"{place} has a part of type 'thinking', and the chat template takes texts only")
    return "".join(part["text"] for part in parts)


def _call(call: Any, place: str, form: Arguments) -> Any:
    """Return a call whose arguments have the form that the template takes."""
    if not isinstance(call, dict):
        raise ChatError(f"{place} has a call that is no object")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"], place, form)}
    if _ARGUMENTS not in call:
        return call
    arguments = call[_ARGUMENTS]
    if form is Arguments.OBJECTS and isinstance(arguments, str | None):
        parsed = from_json_text(arguments or "{}", f"arguments of a call of {place}")
        if parsed is None:
            parsed = {}
        if not isinstance(parsed, dict):
            raise ChatError(f"arguments of a call of {place} are no JSON object, which the chat template needs")
        arguments = parsed
    elif form is Arguments.TEXTS and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, _ARGUMENTS: arguments}


def from_json_text(value: Any, what: str) -> Any:
    """Return the value of a JSON text; other values as they are. Raises ChatError for another text."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise ChatError(f"{what} is text that is not JSON ({error})") from None


def tools_of(value: Any) -> list[Any] | None:
    """Return descriptions of tools: a list, also if it is stored as a JSON text, or its elements are.

    Raises:
        ChatError: If it is anything else.
    """
    if isinstance(value, str) and not value.strip():
        return None
    tools = from_json_text(value, "`tools`")
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise ChatError("`tools` is no list of descriptions")
    tools = [from_json_text(tool, "an element of `tools`") for tool in tools]
    if not all(isinstance(tool, dict) for tool in tools):
        raise ChatError("an element of `tools` is no object")
    return tools


def thoughts_of(message: Message) -> str:
    """Return the thoughts of a message: those under a name of their own, or before `</think>` in its text."""
    for name in _REASONING:
        thoughts = message.get(name)
        if thoughts is not None:
            return thoughts.strip() if isinstance(thoughts, str) else ""
    content = message.get("content")
    if isinstance(content, str) and _END_OF_THOUGHTS in content:
        return content.partition(_END_OF_THOUGHTS)[0].removeprefix("<think>").strip()
    return ""


def names_of_calls(message: Message) -> list[str]:
    """Return the names of the functions that a message calls."""
    names = []
    calls = message.get(_CALLS)
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            function = call.get("function", call)
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                names.append(function["name"])
    return names
