"""Checks by the launcher of the chat template that checkpoints of a run carry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from neox.checkpoint_files.finding import newest_checkpoint
from neox.config import NeoXConfig
from neox.errors import DataError, TokenizerError
from neox.problems import Missing, Problem

if TYPE_CHECKING:
    from neox.tokenizer import Tokenizer

_CHAT_TEMPLATE = "chat_template"


def chat_template_notes(config: NeoXConfig) -> list[str]:
    """Return a note if the training data was made with different chat templates, or with another than the given one."""
    prefixes = config.data.train_data_paths or (config.data.data_path,)
    if not any(Path(f"{prefix}.json").exists() for prefix in prefixes):
        return []
    try:
        from neox.data.token_files import sidecar  # numpy, which a dry run without data does not need

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
        problem = config.problem_about(f"{_CHAT_TEMPLATE}: {error}", _CHAT_TEMPLATE)
        return [problem] if Path(file).exists() else Missing.of([problem])
    except ModuleNotFoundError:
        return []
    return []


def carries_chat_template(save: str) -> bool:
    """Return whether the newest checkpoint in a directory includes a chat template."""
    try:
        from neox.tokenizer.chat import CHAT_TEMPLATE  # numpy, which a launcher of other hosts can do without
    except ModuleNotFoundError:
        return False
    newest = newest_checkpoint(save)
    return newest is not None and (newest / CHAT_TEMPLATE).is_file()


def label_notes(config: NeoXConfig) -> list[str]:
    """Return a note if conversations are trained on in full although there are labels that mask the users' turns."""
    data = config.data
    if data.train_label_data_paths is not None or config.preferences.on_preferences:
        return []
    prefixes = data.train_data_paths or ((data.data_path,) if data.data_path else ())
    labels = {}
    for prefix in prefixes:
        candidate = prefix.removesuffix("_document") + "_label_document"
        if prefix.endswith("_document") and Path(f"{candidate}.idx").is_file():
            labels[prefix] = candidate
    if not labels:
        return []
    keys = f"train_label_data_paths: [{', '.join(labels.values())}]"
    if data.train_data_paths is None:
        keys = f"train_data_paths: [{', '.join(labels)}]` and `{keys}"
    return [
        f"every token of {', '.join(labels)} enters the loss, including the users' turns; `{keys}` restricts the loss "
        "to the labels"
    ]


def packed_conversation_notes(config: NeoXConfig) -> list[str]:
    """Return a note on whether conversations in one sample attend to each other; none if a sample holds one."""
    data = config.data
    if data.train_label_data_paths is None or data.pack_impl == "unpacked" or config.preferences.on_preferences:
        return []
    if data.reset_attention_mask:
        return ["conversations in one sample do not attend to each other (reset_attention_mask)"]
    return [
        "conversations in one sample attend to those before them; `reset_attention_mask: true` keeps them apart, and "
        "`pack_impl: unpacked` puts one into a sample"
    ]
