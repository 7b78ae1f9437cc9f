"""Conversations as others write them: OpenAI's and TRL's messages, ShareGPT's and Alpaca's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from neox.corpus import BadRecord, find_value, kind_of, missing_key
from neox.tokenizer.chat_messages import ChatError, Message, from_json_text

USER = "user"
ASSISTANT = "assistant"
SYSTEM = "system"
MESSAGES = "messages"
_SHAREGPT = ("conversations", "conversation")
_INSTRUCTION = "instruction"
_OUTPUT = "output"
# ShareGPT's names of speakers, also those of LLaMA-Factory and axolotl.
_SPEAKERS: Mapping[str, str] = {
    "human": USER,
    "user": USER,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "assistant": ASSISTANT,
    "function_call": ASSISTANT,
    "system": SYSTEM,
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_SPEAKERS_AS_ROLES = ("human", "gpt")  # ShareGPT's names that also occur under `role`
_CALL_SPEAKER = "function_call"
# Keys of a message that say whether it is trained, or which parts of it.
_WEIGHT = "weight"  # OpenAI's
_TRAIN_FLAGS = ("train", "training")  # axolotl's
_TRAIN_DETAILS = ("train_detail", "training_detail")  # axolotl's, for parts


class Conversation(NamedTuple):
    """Conversation of a line.

    Attributes:
        messages: Messages in OpenAI's form, each with `role`.
        tools: Descriptions of tools, as the line has them; None if there are none.
        variables: More variables for the chat template.
        begin: Index of the first message that may be trained, behind those of a prompt with a completion.
    """

    messages: list[Message]
    tools: Any = None
    variables: Mapping[str, Any] = {}
    begin: int = 0


def without_nulls(value: Any) -> Any:
    """Return a value without the keys of its objects whose values are null.

    In a table (Parquet, Arrow) each object has the keys of all rows, and null stands for a key that is absent.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return list(map(without_nulls, value))
    return value


def read_conversation(record: Mapping[str, Any], keys: Sequence[str], role: str) -> Conversation:
    """Return the conversation of a line.

    With the key `messages` alone, lines without it may be ShareGPT's (`conversations`), Alpaca's (`instruction`,
    `input`, `output`) or TRL's (`prompt` and `completion`, both lists of messages).

    Args:
        record: The line.
        keys: Key of a list of messages, or the two keys of a prompt and its answer: texts, or lists of messages.
        role: Role that is trained, which an answer that is a text gets.

    Raises:
        BadRecord: If the line has no conversation under these keys.
    """
    tools, variables = tools_and_variables(record)
    begin = 0
    if tuple(keys) == (MESSAGES,) and record.get(MESSAGES) is None:
        messages, begin = _messages_by_other_names(record, role)
    else:
        messages = []
        is_pair = len(keys) == 2  # a prompt and its answer
        for key, text_role in zip(keys, (USER, role), strict=False):
            value = find_value(record, key)
            if is_pair and isinstance(value, str):
                value = [{"role": text_role, "content": value}]
            messages += read_messages(value, key, role)
    with_system = add_system(record, messages)
    return Conversation(with_system, tools, variables, begin + len(with_system) - len(messages))


def tools_and_variables(record: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the tools of a line, and the variables for its template (`chat_template_kwargs`). Raises BadRecord."""
    tools = record.get("tools")
    try:
        functions = from_json_text(record.get("functions"), "'functions'")
        variables = from_json_text(record.get("chat_template_kwargs"), "'chat_template_kwargs'")
    except ChatError as error:
        raise BadRecord(str(error)) from None
    if tools is None and isinstance(functions, list):  # OpenAI's older name and form
        tools = [{"type": "function", "function": function} for function in functions]
    if variables is None:
        variables = {}
    if not isinstance(variables, dict):
        raise BadRecord(f"'chat_template_kwargs' is {kind_of(variables)}, not an object")
    return tools, without_nulls(variables)


def _messages_by_other_names(record: Mapping[str, Any], role: str) -> tuple[list[Message], int]:
    """Return the messages of a line without `messages`, and how many of them are a prompt. Raises BadRecord."""
    for key in _SHAREGPT:
        if record.get(key) is not None:
            return read_messages(record[key], key, role), 0
    if record.get(_INSTRUCTION) is not None and _OUTPUT in record:
        answer = record[_OUTPUT]
        if not isinstance(answer, str) or not answer:
            raise BadRecord(f"{_OUTPUT!r} is {kind_of(answer) if answer else 'empty'}, not a text")
        return [*instruction_messages(record), {"role": role, "content": answer}], 0
    if isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list):
        prompt = read_messages(record["prompt"], "prompt", role)
        return prompt + read_messages(record["completion"], "completion", role), len(prompt)
    raise missing_key(record, MESSAGES)


def instruction_messages(record: Mapping[str, Any]) -> list[Message]:
    """Return the messages before the answer in Alpaca's form: system, history, and instruction with input.

    Instruction and input are joined with a newline, as in LLaMA-Factory. Raises BadRecord if they are not texts.
    """
    texts = []
    for key in (_INSTRUCTION, "input"):
        text = record.get(key)
        if not isinstance(text, str | None):
            raise BadRecord(f"{key!r} is {kind_of(text)}, not a text")
        if text:
            texts.append(text)
    if not texts:
        raise BadRecord(f"{_INSTRUCTION!r} is empty")
    messages: list[Message] = []
    history = record.get("history") or []
    if not isinstance(history, list):
        raise BadRecord(f"'history' is {kind_of(history)}, not a list of questions with answers")
    for turn in history:
        is_pair = isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)
        if not is_pair:
            raise BadRecord("'history' has an element that is not a question with its answer")
        question, answer = turn
        messages += [{"role": USER, "content": question}, {"role": ASSISTANT, "content": answer}]
    messages.append({"role": USER, "content": "\n".join(texts)})
    return add_system(record, messages)


def add_system(record: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Return messages with the system message that a line has beside them, as axolotl and LLaMA-Factory read it."""
    system = record.get(SYSTEM)
    if isinstance(system, str) and system and messages[0]["role"] != SYSTEM:
        return [{"role": SYSTEM, "content": system}, *messages]
    return messages


def read_messages(value: Any, key: str, role: str = ASSISTANT) -> list[Message]:
    """Return the messages under a key, each with `role`.

    Args:
        value: List of messages, its JSON, or one message.
        key: The key.
        role: Role that is trained. It keeps its name, also if ShareGPT's `human` or `gpt` is meant as the role itself.

    Raises:
        BadRecord: If the value is not a list of messages.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = from_json_text(value, repr(key))
        except ChatError as error:
            raise BadRecord(str(error)) from None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadRecord(f"{key!r} is {'empty' if value == [] else kind_of(value)}, not a list of messages")
    return [_message(message, f"message {number} of {key!r}", role) for number, message in enumerate(value)]


def _message(message: Any, place: str, role: str) -> Message:
    """Return a message of OpenAI's or ShareGPT's form in OpenAI's. Raises BadRecord for other forms."""
    if not isinstance(message, dict):
        raise BadRecord(f"{place} is {kind_of(message)}, not an object with `role` and `content`")
    for detail in _TRAIN_DETAILS:
        if message.get(detail) is not None:
            raise BadRecord(f"{place} has {detail!r}, which is not supported: whole messages are trained or not")
    own_role = message.get("role")
    if isinstance(own_role, str):
        if own_role in _SPEAKERS_AS_ROLES and own_role != role:
            own_role = _SPEAKERS[own_role]
        message = {**message, "role": own_role}
        if "value" in message and "content" not in message:
            message["content"] = message.pop("value")
        return message
    if not isinstance(message.get("from"), str):
        raise BadRecord(f"{place} has no `role`")
    return _sharegpt_message(message, place, role)


def _sharegpt_message(message: Mapping[str, Any], place: str, role: str) -> Message:
    """Return a message in OpenAI's form from one with `from` and `value`. Raises BadRecord for an unknown speaker."""
    speaker = message["from"]
    known = role if speaker == role else _SPEAKERS.get(speaker)
    if known is None:
        raise BadRecord(f"{place} is from {speaker!r}, which is none of {', '.join(_SPEAKERS)}")
    rest = {name: item for name, item in message.items() if name not in ("from", "value", "role")}
    result = {"role": known, "content": message.get("value", message.get("content")), **rest}
    if speaker == _CALL_SPEAKER:
        return {**result, "content": "", "tool_calls": _calls(result["content"], place)}
    return result


def _calls(value: Any, place: str) -> list[dict[str, Any]]:
    """Return calls in OpenAI's form from ShareGPT's: a JSON object with `name` and `arguments`, or a list of them."""
    try:
        calls = from_json_text(value, place)
    except ChatError as error:
        raise BadRecord(str(error)) from None
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        raise BadRecord(f"{place} is from {_CALL_SPEAKER!r}, but holds no call")
    result = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise BadRecord(f"{place} holds a call without `name`")
        result.append({"type": "function", "function": call})
    return result


def trained_messages(conversation: Conversation, role: str) -> list[int]:
    """Return the indices of the messages that are trained: those of a role, unless a key of the message decides.

    OpenAI's `weight`, 0 or 1, takes messages of the role out. axolotl's `train` or `training` decides for any message.
    Raises BadRecord for other values.
    """
    numbers = []
    for number, message in enumerate(conversation.messages):
        if number < conversation.begin:
            continue
        is_trained = message["role"] == role
        weight = message.get(_WEIGHT)
        if weight is not None and is_trained:
            if weight not in (0, 1):
                raise BadRecord(f"message {number} has the weight {weight!r}; it can be 0 or 1")
            is_trained = bool(weight)
        for name in _TRAIN_FLAGS:
            flag = message.get(name)
            if flag is not None:
                if not isinstance(flag, bool):
                    raise BadRecord(f"message {number} has {name!r}, which is {kind_of(flag)}, not true or false")
                is_trained = flag
        if is_trained:
            numbers.append(number)
    return numbers
