"""Checks by the launcher of the chat template that checkpoints of a run carry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from neox.config import NeoXConfig
from neox.errors import DataError, TokenizerError
from neox.problems import Problem

if TYPE_CHECKING:
    from neox.tokenizer import Tokenizer

_CHAT_TEMPLATE = "chat_template"


def chat_template_notes(config: NeoXConfig) -> list[str]:
    """Return a note if the training data was made with different chat templates, or with another than the given one."""
    try:
        from neox.data import sidecar  # numpy, which a dry run without data does not need

        templates = sidecar.chat_templates(config.data)
    except (DataError, ModuleNotFoundError):
        return []
    if not templates:
        return []
    first = next(iter(templates))
    chosen = templates[first]
    carried = f"checkpoints carry that of {first}"
    if config.tokenizer.chat_template is not None:
        carried = f"checkpoints carry {config.describe_setting(_CHAT_TEMPLATE)}"
        try:
            chosen = replace(chosen, source=Path(config.tokenizer.chat_template).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            return []  # a problem of its own
    others = [prefix for prefix, template in templates.items() if template != chosen]
    if not others:
        return []
    return [f"{carried}, but {', '.join(others)} was made with another chat template; `{_CHAT_TEMPLATE}: FILE` chooses"]


def chat_template_problems(config: NeoXConfig, tokenizer: Tokenizer | None) -> list[Problem]:
    """Return the problem that the file of `chat_template` cannot be used."""
    file = config.tokenizer.chat_template
    if file is None:
        return []
    try:
        from neox.tokenizer.chat import ChatRenderer, read_chat_template  # numpy, which a plan can do without

        ChatRenderer(read_chat_template(config.tokenizer.vocab_file or "", file, tokenizer))
    except TokenizerError as error:
        return [config.problem_about(f"{_CHAT_TEMPLATE}: {error}", _CHAT_TEMPLATE)]
    except ModuleNotFoundError:
        return []
    return []
