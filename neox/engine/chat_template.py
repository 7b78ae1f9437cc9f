"""Chat template and settings of generation that the checkpoints of a run carry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from neox.checkpoint import find_generation_settings, saved_chat_template
from neox.data.token_files.sidecar import chat_templates
from neox.errors import TokenizerError
from neox.plan import RunPlan
from neox.tokenizer import tokenizer_of
from neox.tokenizer.chat import ChatTemplate, read_chat_template


def template_to_save(plan: RunPlan, checkpoint: Path | None) -> ChatTemplate | None:
    """Return the template of a run: that of the key `chat_template`, else the data's, else the loaded checkpoint's.

    If datasets were made with different templates, it is that of the first one. The launcher has said so.

    Args:
        plan: The run.
        checkpoint: Checkpoint that the run loads, if any.

    Raises:
        NeoXError: If a file cannot be read.
    """
    keys = plan.config.tokenizer
    if keys.chat_template is not None:
        return read_chat_template(keys.vocab_file or "", keys.chat_template, tokenizer_of(plan.config))
    for template in chat_templates(plan.config.data).values():
        return template
    if checkpoint is None:
        return None
    return saved_chat_template(checkpoint)


def settings_to_save(plan: RunPlan, checkpoint: Path | None) -> dict[str, Any]:
    """Return the settings of generation of a run: those next to its tokenizer, and the loaded checkpoint's.

    Args:
        plan: The run.
        checkpoint: Checkpoint that the run loads, if any.

    Raises:
        NeoXError: If a file cannot be read.
    """
    try:
        tokenizer = tokenizer_of(plan.config)
    except TokenizerError:  # a model that is trained on ids alone
        tokenizer = None
    return find_generation_settings(plan.config, checkpoint, plan.config.tokenizer.vocab_file, tokenizer)
