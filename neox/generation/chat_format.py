"""Form of conversations with a model: its chat template, and where its answers begin and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from neox.checkpoint import find_chat_template
from neox.config import NeoXConfig
from neox.errors import GenerationError
from neox.generation.request import SamplingParams
from neox.generation.text_stream import is_text
from neox.tokenizer import Tokenizer
from neox.tokenizer.chat import ChatRenderer, ChatTemplate, find_answer_form
from neox.tokenizer.chat_messages import ChatError

NO_TEMPLATE = (
    "this model has no chat template: neither the checkpoint nor the tokenizer's directory holds one; give one with "
    "--set chat_template=FILE"
)


class ChatFormat:
    """Form of conversations with a model.

    Attributes:
        form: What the template writes around an answer.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        """Compile the template. Raises TokenizerError if it is not a valid one."""
        self.form = find_answer_form(template, tokenizer)
        self._renderer = ChatRenderer(template, _now)
        self._tokenizer = tokenizer

    def encode(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> list[int]:
        """Return the ids of a conversation, with the beginning of an answer.

        Args:
            messages: The conversation.
            variables: More variables of the template, such as `enable_thinking`.

        Raises:
            ChatError: If the template refuses the conversation, or its text is not valid Unicode.
        """
        text = self._renderer.render(messages, prompt=True, variables=variables)
        if not is_text(text):
            raise ChatError("its text contains a lone UTF-16 surrogate, half of a character")
        return self._tokenizer.encode_bare(text)

    def ending(self, params: SamplingParams) -> SamplingParams:
        """Return sampling settings that also end at the end of an answer."""
        return replace(
            params, stop=(*params.stop, *self.form.end_strings), stop_ids=(*params.stop_ids, *self.form.end_ids)
        )

    def answer(self, text: str) -> str:
        """Return an answer without the text that the template writes before it."""
        return text.removeprefix(self.form.begin)


class AnswerStream:
    """Text of an answer as it comes, without the text that the template writes before it."""

    def __init__(self, begin: str) -> None:
        """Start an answer; `begin` is the text before it."""
        self._begin = begin
        self._held = ""
        self._is_after = False

    def push(self, text: str) -> str:
        """Add text; return what belongs to the answer for certain."""
        if self._is_after:
            return text
        self._held += text
        if len(self._held) < len(self._begin) and self._begin.startswith(self._held):
            return ""
        self._is_after = True
        return self._held.removeprefix(self._begin)

    def finish(self) -> str:
        """Return what has been held back, at the end of the text."""
        if self._is_after:
            return ""
        self._is_after = True
        return self._held.removeprefix(self._begin)


def find_chat_format(config: NeoXConfig, checkpoint: Path, tokenizer: Tokenizer) -> ChatFormat | None:
    """Return the form of conversations with a checkpoint; None if there is no chat template.

    Raises:
        CheckpointError: If the checkpoint's template is damaged.
        TokenizerError: If a template cannot be read.
    """
    keys = config.tokenizer
    template = find_chat_template(keys.chat_template, checkpoint, keys.vocab_file, tokenizer)
    if template is None:
        return None
    return ChatFormat(template, tokenizer)


def chat_template_for(config: NeoXConfig, checkpoint: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template for a checkpoint.

    Raises:
        GenerationError: If there is none.
        NeoXError: If it cannot be read.
    """
    keys = config.tokenizer
    template = find_chat_template(keys.chat_template, checkpoint, keys.vocab_file, tokenizer)
    if template is None:
        raise GenerationError(NO_TEMPLATE)
    return template


def _now(form: str) -> str:
    """Return the date and time, for templates that write it."""
    return datetime.now().strftime(form)
