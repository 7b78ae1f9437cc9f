"""Chat templates, which turn a conversation into text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neox.errors import TokenizerError
from neox.tokenizer.base import Tokenizer
from neox.tokenizer.huggingface import TOKENIZER_CONFIG, HFTokenizer, special_token, tokenizer_config

if TYPE_CHECKING:
    from neox.tokenizer.chat_environment import Clock

TEMPLATE_FILE = "chat_template.jinja"
CHAT_TEMPLATE = "chat_template.json"
"""Name of the file in a checkpoint: the text of the template, and the special tokens that it was used with."""
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Tokens that an export names for a tokenizer without a configuration: all are the end of a document.
_ENDS = ("bos_token", "eos_token", "unk_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names for the thoughts of a message
_QUESTION = "question-0"
_ANSWER = "answer-0"
_NEXT_QUESTION = "question-1"


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

    @staticmethod
    def from_json(fields: Any) -> ChatTemplate:
        """Return the template with given fields, the result of `dataclasses.asdict`.

        Raises:
            ValueError: If they are others.
        """
        if not isinstance(fields, dict) or set(fields) != {"source", "tokens"}:
            raise ValueError("a chat template has the fields source and tokens")
        tokens = fields["tokens"]
        if not isinstance(fields["source"], str) or not isinstance(tokens, dict):
            raise ValueError("a field of the chat template has the wrong type")
        return ChatTemplate(fields["source"], tokens)


def read_chat_template(
    vocab_file: str | Path, file: str | Path | None = None, tokenizer: Tokenizer | None = None
) -> ChatTemplate:
    """Read the template of a Hugging Face tokenizer.

    Args:
        vocab_file: Its `tokenizer.json`. The same directory holds the template, either in `chat_template.jinja` or
            under `chat_template` in `tokenizer_config.json`. The latter file also names the special tokens.
        file: File of a template that replaces the tokenizer's own.
        tokenizer: The tokenizer. Without a `tokenizer_config.json`, its end of a document is the `bos_token`,
            `eos_token` and `unk_token` of templates that use them, as in an export.

    Raises:
        TokenizerError: If there is no template, or it cannot be read.
    """
    if file is not None:
        return with_tokens(_read_template(Path(file)), Path(vocab_file), tokenizer)
    found = own_chat_template(vocab_file, tokenizer)
    if found is None:
        raise TokenizerError(
            f"{vocab_file} has no chat template: its directory has no {TEMPLATE_FILE} and no {TOKENIZER_CONFIG} with "
            "`chat_template`; give a template with --chat-template FILE"
        )
    return found


def own_chat_template(vocab_file: str | Path, tokenizer: Tokenizer | None = None) -> ChatTemplate | None:
    """Return the template next to a tokenizer; None if there is none. Arguments as for `read_chat_template`."""
    vocab = Path(vocab_file)
    own_file = vocab.with_name(TEMPLATE_FILE)
    if own_file.is_file():
        source = _read_template(own_file)
    else:
        source = _configured_template(vocab) or ""
    if not source.strip():
        return None
    return with_tokens(source, vocab, tokenizer)


def with_tokens(source: str, vocab_file: Path, tokenizer: Tokenizer | None) -> ChatTemplate:
    """Return a template with the special tokens of a tokenizer. Arguments as for `read_chat_template`."""
    tokens = {}
    for key in _TOKENS:
        token = special_token(vocab_file, key)
        if isinstance(token, str):
            tokens[key] = token
    if not tokenizer_config(vocab_file) and isinstance(tokenizer, HFTokenizer):
        for key in _ENDS:
            if key in source:  # others are left out, so that the identities of data stay those of older versions
                tokens[key] = tokenizer.eod_token
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
    """Compiled chat template, which gives the text that Hugging Face's `apply_chat_template` gives."""

    def __init__(self, template: ChatTemplate, clock: Clock | None = None) -> None:
        """Compile a template.

        Args:
            template: The template.
            clock: What `strftime_now` does in templates. None leaves the function out, so that a conversation gives
                the same text on every day: templates use a fixed date without it.

        Raises:
            TokenizerError: If it is not a valid Jinja template.
        """
        import jinja2  # slow: as long as all other imports of a worker

        from neox.tokenizer.chat_environment import ERRORS, compile_template

        try:
            self._template = compile_template(template.source, clock)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template cannot be read: line {error.lineno}: {error.message}") from error
        self._errors = ERRORS
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
        conversation = [_with_reasoning(message) for message in messages]
        try:
            return self._template.render(
                messages=conversation, tools=tools, documents=None, add_generation_prompt=prompt, **self._tokens
            )
        except self._errors as error:
            raise ChatError(f"the chat template refuses it: {error}") from error


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose thoughts have the names `reasoning_content` and `thinking`, as transformers gives them."""
    for name in _REASONING:
        thoughts = message.get(name)
        if thoughts is not None:
            return {"thinking": thoughts, **message, "reasoning_content": thoughts}
    return message


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
    renderer = ChatRenderer(template)
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
        for token in tokenizer.encode_chat(after):
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
