"""Chat templates, which turn a conversation into text.

    chat_template.jinja, or tokenizer_config.json     own_chat_template -> ChatTemplate: source, special tokens
         |  ChatRenderer        compiled in Jinja's sandbox (chat_environment.py)
         |  with_forms          messages in the forms that this template takes (chat_messages.py)
         v
    render(messages)            <|user|>How many?<|end|><|assistant|>Twelve.<|end|>
    render(..., prompt=True)    the same, and the beginning of an answer
    render_marked(messages)     the text, and the characters inside `{% generation %}`

Which text of a conversation is trained, `neox.preprocess.chat_encoder` decides. `find_answer_form` finds what ends an
answer in generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date as Date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neox.errors import TokenizerError
from neox.tokenizer.base import Tokenizer
from neox.tokenizer.chat_messages import (
    ChatError,
    DateNeededError,
    MessageForms,
    find_forms,
    tools_of,
    with_forms,
)
from neox.tokenizer.huggingface import TOKENIZER_CONFIG, HFTokenizer, special_tokens, tokenizer_config

if TYPE_CHECKING:
    from neox.tokenizer.chat_environment import Clock

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_DIRECTORY = "additional_chat_templates"
"""Directory of templates with other names than `default`, in files `NAME.jinja`."""
_DEFAULT = "default"
TOOL_USE = "tool_use"
"""Name of the template that replaces the default one for conversations with tools."""
CHAT_TEMPLATE = "chat_template.json"
"""Name of the file in a checkpoint: the text of the template, and the special tokens that it was used with."""
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Tokens that an export names for a tokenizer without a configuration: all are the end of a document.
_ENDS = ("bos_token", "eos_token", "unk_token")
_OWN_VARIABLES = ("messages", "add_generation_prompt")
_QUESTION = "question-0"
_ANSWER = "answer-0"
_NEXT_QUESTION = "question-1"
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}, "required": []}},
}
_CLOCK = "strftime_now"
_ANY_DATE = "2025-01-01"


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the special tokens that it may use.

    Attributes:
        source: Text of the template, in Jinja's language.
        tokens: Special tokens by name, such as `eos_token`.
        tool_use: Text of the template for conversations with tools; None if it is the same.
    """

    source: str
    tokens: Mapping[str, str]
    tool_use: str | None = None

    @staticmethod
    def from_json(fields: Any) -> ChatTemplate:
        """Return the template with given fields, the result of `as_json` or `dataclasses.asdict`.

        Raises:
            ValueError: If they are others.
        """
        if not isinstance(fields, dict) or set(fields) | {TOOL_USE} != {"source", "tokens", TOOL_USE}:
            raise ValueError(f"a chat template has the fields source, tokens and perhaps {TOOL_USE}")
        tokens = fields["tokens"]
        tool_use = fields.get(TOOL_USE)
        if (
            not isinstance(fields["source"], str)
            or not isinstance(tokens, dict)
            or not isinstance(tool_use, str | None)
        ):
            raise ValueError("a field of the chat template has the wrong type")
        return ChatTemplate(fields["source"], tokens, tool_use)

    def as_json(self) -> dict[str, Any]:
        """Return the fields for JSON. One that is not used is absent, so that older data keep their fingerprints."""
        fields: dict[str, Any] = {"source": self.source, "tokens": dict(self.tokens)}
        if self.tool_use is not None:
            fields[TOOL_USE] = self.tool_use
        return fields


def read_chat_template(
    vocab_file: str | Path, file: str | Path | None = None, tokenizer: Tokenizer | None = None
) -> ChatTemplate:
    """Read the template of a Hugging Face tokenizer.

    Args:
        vocab_file: Its `tokenizer.json`. The same directory holds the template, either in `chat_template.jinja` (and
            named ones in `additional_chat_templates`) or under `chat_template` in `tokenizer_config.json`. The latter
            file also names the special tokens.
        file: File of a template that replaces the tokenizer's own.
        tokenizer: The tokenizer. Without a `tokenizer_config.json`, its end of a document is the `bos_token`,
            `eos_token` and `unk_token` of templates that use them, as in an export.

    Raises:
        TokenizerError: If there is no template, or it cannot be read.
    """
    if file is not None:
        return _with_tokens({_DEFAULT: _read_template(Path(file))}, Path(vocab_file), tokenizer)
    found = own_chat_template(vocab_file, tokenizer)
    if found is None:
        raise TokenizerError(
            f"{vocab_file} has no chat template: its directory has no {TEMPLATE_FILE} and no {TOKENIZER_CONFIG} with "
            "`chat_template`; give a template with --chat-template FILE"
        )
    return found


def own_chat_template(vocab_file: str | Path, tokenizer: Tokenizer | None = None) -> ChatTemplate | None:
    """Return the template next to a tokenizer; None if there is none. Arguments as for `read_chat_template`.

    Raises:
        TokenizerError: If a file cannot be read, or there are only templates with other names than `default`.
    """
    vocab = Path(vocab_file)
    directory = vocab.parent

    # Files of templates go before the entry of the configuration, as in transformers.
    sources: dict[str, str] = {}
    if (directory / TEMPLATE_FILE).is_file():
        sources[_DEFAULT] = _read_template(directory / TEMPLATE_FILE)
    for file in sorted((directory / TEMPLATE_DIRECTORY).glob("*.jinja")):
        sources[file.stem] = _read_template(file)
    sources = {name: source for name, source in sources.items() if source.strip()}
    if not sources:
        # That entry is one template, a list of templates with names, or an object.
        configured: Any = tokenizer_config(vocab).get("chat_template")
        if isinstance(configured, str):
            configured = {_DEFAULT: configured}
        elif isinstance(configured, list):
            configured = {entry.get("name"): entry.get("template") for entry in configured if isinstance(entry, dict)}
        for name, source in (configured or {}).items():
            if isinstance(name, str) and isinstance(source, str) and source.strip():
                sources[name] = source
    if not sources:
        return None
    if _DEFAULT not in sources:
        raise TokenizerError(
            f"{vocab}: its chat templates are named {', '.join(sorted(sources))}, and none is the {_DEFAULT!r} one; "
            "write the one to use to a file, and give it with --chat-template FILE"
        )
    return _with_tokens(sources, vocab, tokenizer)


def _with_tokens(sources: Mapping[str, str], vocab_file: Path, tokenizer: Tokenizer | None) -> ChatTemplate:
    """Return templates by name with the special tokens of a tokenizer. Arguments as for `read_chat_template`."""
    tool_use = sources.get(TOOL_USE)
    text = sources[_DEFAULT] + (tool_use or "")
    found = special_tokens(vocab_file)
    tokens = {}
    for key in (*_TOKENS, *sorted(set(found) - set(_TOKENS))):
        # names of a model's own are left out where nothing reads them, so that the identities of older data stay
        if key in found and (key in _TOKENS or key in text):
            tokens[key] = found[key]
    if not tokenizer_config(vocab_file) and isinstance(tokenizer, HFTokenizer):
        for key in _ENDS:
            # others are left out, so that the identities of data stay those of older versions
            if key in text:
                tokens.setdefault(key, tokenizer.eod_token)
    return ChatTemplate(sources[_DEFAULT], tokens, tool_use)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read as a chat template: {error}") from error


def fixed_clock(date: str | None) -> Clock | None:
    """Return what `strftime_now` does where it is always the same day, at midnight; None without a date.

    Args:
        date: The day, such as `2025-01-31`.

    Raises:
        ValueError: There is no such day.
    """
    if date is None:
        return None
    return Date.fromisoformat(date).strftime


class ChatRenderer:
    """Compiled chat template, which gives the text that Hugging Face's `apply_chat_template` gives."""

    def __init__(self, template: ChatTemplate, clock: Clock | None = None) -> None:
        """Compile a template.

        Args:
            template: The template.
            clock: What `strftime_now` does in templates. None leaves the function out, so that a conversation gives
                the same text on every day: most templates use a fixed date without it.

        Raises:
            TokenizerError: If it is not a valid Jinja template.
        """
        self._default = _CompiledTemplate(template.source, template.tokens, clock)
        self._tool_use = self._default
        if template.tool_use is not None:
            self._tool_use = _CompiledTemplate(template.tool_use, template.tokens, clock)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        *,
        prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: Messages with `role`, `content` and other fields that the template uses. Fields that are null
                count as absent. Contents may be lists of parts, and arguments of calls JSON texts: they are brought
                into the form that the template takes.
            tools: Descriptions of tools, for templates that use them: a list, or its JSON.
            prompt: Whether to add the beginning of an answer, as for generation.
            variables: More variables of the template, such as `enable_thinking`.

        Raises:
            ChatError: If the template refuses the conversation.
        """
        tools = tools_of(tools)
        return self._chosen(tools).render(messages, tools, prompt, variables or {})

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, variables: Mapping[str, Any] | None = None
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Return the text of a conversation, and the ranges of characters that the template marks as answers.

        The ranges are None if the template has no tag `{% generation %}`. Arguments and errors as for `render`.
        """
        tools = tools_of(tools)
        chosen = self._chosen(tools)
        if not chosen.marks_answers:
            return chosen.render(messages, tools, False, variables or {}), None
        return chosen.render_marked(messages, tools, variables or {})

    def check_date(self) -> None:
        """Raise TokenizerError if the template, or the one for tools, needs a date and there is none.

        Every text, or every text with tools, would fail.
        """
        chat = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
        for template, tools in ((self._default, None), (self._tool_use, [_TOOL])):
            try:
                template.render(chat, tools, False, {})
            except DateNeededError as error:
                raise TokenizerError(str(error)) from error
            except ChatError:
                pass  # it may refuse these messages

    def _chosen(self, tools: list[Any] | None) -> _CompiledTemplate:
        return self._default if tools is None else self._tool_use


class _CompiledTemplate:
    """One compiled template.

    Attributes:
        marks_answers: Whether it has a tag `{% generation %}`.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], clock: Clock | None) -> None:
        import jinja2  # slow: as long as all other imports of a worker

        from neox.tokenizer.chat_environment import ERRORS, compile_template

        try:
            self._template, self._tag = compile_template(source, clock)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template cannot be read: line {error.lineno}: {error.message}") from error
        self.marks_answers = self._tag.is_used
        self._errors = ERRORS
        self._tokens = dict(tokens)

    @cached_property
    def _forms(self) -> MessageForms:
        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            return "".join(self._pieces(list(messages), None, False, {}))

        return find_forms(render)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        return "".join(self._pieces(with_forms(messages, self._forms), tools, prompt, variables))

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, variables: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        conversation = with_forms(messages, self._forms)
        pieces: list[str] = []
        with self._tag.recorded(pieces) as ranges:
            for piece in self._pieces(conversation, tools, False, variables):
                pieces.append(piece)
        return "".join(pieces), ranges

    def _pieces(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, prompt: bool, variables: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield the text in pieces. Raises ChatError if the template refuses the conversation."""
        for name in _OWN_VARIABLES:
            if name in variables:
                raise ChatError(f"`chat_template_kwargs` cannot hold {name!r}")
        names = {**self._tokens, "tools": tools, "documents": None, **variables}
        try:
            yield from self._template.generate(messages=messages, add_generation_prompt=prompt, **names)
        except self._errors as error:
            if f"{_CLOCK!r} is undefined" in str(error):
                raise DateNeededError(
                    f"the chat template writes today's date ({_CLOCK}), so that the same conversations would be other "
                    "data tomorrow: give the date that it is to write with --date YYYY-MM-DD"
                ) from error
            raise ChatError(f"the chat template refuses it: {error}") from error


@dataclass(frozen=True)
class AnswerForm:
    """What a template writes around an answer.

    Attributes:
        begin: Text between the beginning that `render(prompt=True)` adds and the answer, such as a space.
        end_ids: Ids of tokens that end an answer, in addition to the end of a document.
        end_strings: Strings that end an answer, if the template writes no token of its own after it.
    """

    begin: str = ""
    end_ids: tuple[int, ...] = ()
    end_strings: tuple[str, ...] = ()


def find_answer_form(template: ChatTemplate, tokenizer: Tokenizer) -> AnswerForm:
    """Find what a template writes around an answer, by rendering short conversations.

    The end is the first special token after an answer, such as `<|im_end|>`. Without one it is the text up to the end
    of the conversation or, if that is empty, up to the next question.

    Args:
        template: The template.
        tokenizer: Its tokenizer.

    Raises:
        TokenizerError: If it is not a valid Jinja template.
    """
    renderer = ChatRenderer(template, fixed_clock(_ANY_DATE))  # some templates write one before the messages
    question = {"role": "user", "content": _QUESTION}
    answer = {"role": "assistant", "content": _ANSWER}
    next_question = {"role": "user", "content": _NEXT_QUESTION}
    before, _, after = _rendered(renderer, [question, answer]).partition(_ANSWER)
    prompt = _rendered(renderer, [question], prompt=True)
    begin = ""
    if prompt and before.startswith(prompt):
        begin = before.removeprefix(prompt)
    if not after.strip():
        rest = _rendered(renderer, [question, answer, next_question]).partition(_ANSWER)[2]
        after = rest.partition(_NEXT_QUESTION)[0]
    if isinstance(tokenizer, HFTokenizer):
        added = tokenizer.backend.get_added_tokens_decoder()
        for token in tokenizer.encode_bare(after):
            if token == tokenizer.eod:
                return AnswerForm(begin)
            if token in added:
                return AnswerForm(begin, end_ids=(token,))
    after = after.rstrip()
    if not after:
        return AnswerForm(begin)
    return AnswerForm(begin, end_strings=(after,))


def _rendered(renderer: ChatRenderer, chat: Sequence[Mapping[str, str]], *, prompt: bool = False) -> str:
    """Return the text of a conversation; nothing if the template refuses it."""
    try:
        return renderer.render(chat, prompt=prompt)
    except ChatError:
        return ""
