"""Chat templates, which turn a conversation into text."""

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
# Hugging Face's tag around answers. It is replaced by a condition that always holds.
_GENERATION = re.compile(r"({%[-+]?\s*)(end)?generation(\s*[-+]?%})")


class ChatError(Exception):
    """The template refuses a conversation. The message says why."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the special tokens that it may use.

    Attributes:
        source: Text of the template, in Jinja's language.
        tokens: Special tokens by name, such as `eos_token`.
    """

    source: str
    tokens: Mapping[str, str]


def read_chat_template(vocab_file: str | Path, file: str | Path | None = None) -> ChatTemplate:
    """Read the template of a Hugging Face tokenizer.

    Args:
        vocab_file: Its `tokenizer.json`. The same directory holds the template, either in `chat_template.jinja` or
            under `chat_template` in `tokenizer_config.json`. The latter file also names the special tokens.
        file: File of a template that replaces the tokenizer's own.

    Raises:
        TokenizerError: If there is no template, or it cannot be read.
    """
    vocab = Path(vocab_file)
    own_file = vocab.with_name(TEMPLATE_FILE)
    source: str | None
    if file is not None:
        source = _read_template(Path(file))
    elif own_file.is_file():
        source = _read_template(own_file)
    else:
        source = _configured_template(vocab)
    if source is None or not source.strip():
        raise TokenizerError(
            f"{vocab} has no chat template: its directory has no {TEMPLATE_FILE} and no {TOKENIZER_CONFIG} with "
            "`chat_template`; give a template with --chat-template FILE"
        )
    tokens = {}
    for key in _TOKENS:
        token = special_token(vocab, key)
        if isinstance(token, str):
            tokens[key] = token
    return ChatTemplate(source, tokens)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read as a chat template: {error}") from error


def _configured_template(vocab_file: Path) -> str | None:
    """Return `chat_template` of `tokenizer_config.json`: one template, or the default one of a list with names."""
    source: Any = tokenizer_config(vocab_file).get("chat_template")
    if isinstance(source, list):
        by_name = {entry.get("name"): entry.get("template") for entry in source}
        source = by_name.get("default")
    if isinstance(source, str):
        return source
    return None


class ChatRenderer:
    """Compiled chat template.

    It runs in the environment that Hugging Face documents, inside Jinja's sandbox, because templates are code written
    by others. `strftime_now` is left out, so that a conversation gives the same text on every day. Templates use a
    fixed date without it.
    """

    def __init__(self, template: ChatTemplate) -> None:
        """Compile a template. Raises TokenizerError if it is not a valid Jinja template."""
        import jinja2.sandbox  # slow: as long as all other imports of a worker

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        try:
            self._template = environment.from_string(_GENERATION.sub(_condition, template.source))
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template cannot be read: line {error.lineno}: {error.message}") from error
        self._errors = (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError)
        self._tokens = dict(template.tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, prompt: bool = False) -> str:
        """Return the text of a conversation.

        Args:
            messages: Messages with `role`, `content` and other fields that the template uses.
            tools: Descriptions of tools, for templates that use them.
            prompt: Whether to add the beginning of an answer, as for generation.

        Raises:
            ChatError: If the template refuses the conversation.
        """
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._tokens
            )
        except self._errors as error:
            raise ChatError(f"the chat template refuses it: {error}") from error


def _condition(generation_tag: re.Match[str]) -> str:
    """Return `{% if true %}` for `{% generation %}`, and `{% endif %}` for `{% endgeneration %}`."""
    opening, end, closing = generation_tag.groups()
    if end:
        return f"{opening}endif{closing}"
    return f"{opening}if true{closing}"


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
