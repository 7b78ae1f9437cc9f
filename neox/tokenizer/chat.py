"""Chat templates: the text that a tokenizer's own Jinja template makes of a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neox.errors import TokenizerError
from neox.tokenizer.huggingface import TOKENIZER_CONFIG, special_token, tokenizer_config

TEMPLATE_FILE = "chat_template.jinja"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# A tag of Hugging Face's around answers. What is inside is rendered as it is.
_GENERATION = re.compile(r"({%[-+]?\s*)(end)?generation(\s*[-+]?%})")


class ChatError(Exception):
    """Conversation that a template refuses; the message says why."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the special tokens that it may name.

    Attributes:
        source: Text of the template.
        tokens: Special tokens, such as `eos_token`.
    """

    source: str
    tokens: Mapping[str, str]


def read_chat_template(vocab_file: str | Path, file: str | Path | None = None) -> ChatTemplate:
    """Read the template of a Hugging Face tokenizer.

    Args:
        vocab_file: Its `tokenizer.json`. Beside it are `chat_template.jinja`, or `tokenizer_config.json` with
            `chat_template`, and the special tokens.
        file: File of a template, in place of the tokenizer's own.

    Raises:
        TokenizerError: If there is no template, or it cannot be read.
    """
    vocab = Path(vocab_file)
    found = Path(file) if file is not None else vocab.with_name(TEMPLATE_FILE)
    if file is not None or found.is_file():
        try:
            source: Any = found.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{found}: cannot be read as a chat template: {error}") from error
    else:
        source = tokenizer_config(vocab).get("chat_template")
        if isinstance(source, list):  # templates with names
            source = {each.get("name"): each.get("template") for each in source}.get("default")
    if not isinstance(source, str) or not source.strip():
        raise TokenizerError(
            f"{vocab} has no chat template: neither {TEMPLATE_FILE} nor `chat_template` in a {TOKENIZER_CONFIG} is "
            "beside it; give a template with --chat-template FILE"
        )
    tokens = {key: token for key in _TOKENS if isinstance(token := special_token(vocab, key), str)}
    return ChatTemplate(source, tokens)


class ChatRenderer:
    """Compiled chat template, in the environment that Hugging Face describes (without the time of day).

    Templates are others' code: they run in Jinja's sandbox. `strftime_now` is not defined, so that the same
    conversations give the same text on every day; templates then name a fixed date.
    """

    def __init__(self, template: ChatTemplate) -> None:
        """Compile a template. Raises TokenizerError if it is no Jinja template."""
        import jinja2.sandbox  # takes as long as the rest of a worker's imports

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        source = _GENERATION.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", template.source)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template cannot be read: line {error.lineno}: {error.message}") from error
        self._errors = (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError)
        self._tokens = dict(template.tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, prompt: bool = False) -> str:
        """Return the text of a conversation.

        Args:
            messages: Messages with `role`, `content` and whatever else the template knows.
            tools: Descriptions of tools, for templates that know them.
            prompt: Whether the beginning of an answer is added, as before generation.

        Raises:
            ChatError: If the template refuses the conversation.
        """
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._tokens
            )
        except self._errors as error:
            raise ChatError(f"the chat template refuses it: {error}") from error


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
