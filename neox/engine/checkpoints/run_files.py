"""What every checkpoint says of its run: identity, tokenizer, chat template and settings of generation."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neox.checkpoint import (
    find_generation_settings,
    saved_chat_template,
    write_chat_template,
    write_generation_settings,
    write_run,
)
from neox.data.token_files.sidecar import chat_templates
from neox.errors import TokenizerError
from neox.plan import RunPlan
from neox.plan.run_identity import RunIdentity
from neox.tokenizer import TokenizerIdentity, identify_configured, tokenizer_of, write_tokenizer_identity
from neox.tokenizer.chat import ChatTemplate, read_chat_template


@dataclass(frozen=True)
class RunFiles:
    """What rank 0 writes of the run into each of its checkpoints.

    Attributes:
        run: Identity of the run.
        chat_template: Template of conversations with the model; None if there is none.
        generation_settings: Settings of generation, such as end ids.
        tokenizer: Identity of the run's tokenizer; None for a model that is trained on ids without one.
        samples_per_step: Samples of a step; None if they are not recorded.
    """

    run: RunIdentity
    chat_template: ChatTemplate | None = None
    generation_settings: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: TokenizerIdentity | None = None
    samples_per_step: int | None = None

    def write(self, directory: Path) -> None:
        """Write the files into a checkpoint. Raises CheckpointError if the disk refuses."""
        write_run(directory, self.run, self.samples_per_step)
        write_chat_template(directory, self.chat_template)
        write_generation_settings(directory, self.generation_settings)
        write_tokenizer_identity(directory, self.tokenizer)


def files_of_run(plan: RunPlan, run: RunIdentity, checkpoint: Path | None) -> RunFiles:
    """Return what the checkpoints of a run say of it. Only one rank calls it.

    Args:
        plan: The run.
        run: Its identity.
        checkpoint: Checkpoint that it loads, if any.

    Raises:
        NeoXError: If a file cannot be read.
    """
    identity: TokenizerIdentity | None = None
    with suppress(TokenizerError):  # a model that is trained on ids: the launcher refuses to start one on texts
        identity = identify_configured(plan.config, tokenizer_of(plan.config))
    template = template_to_save(plan, checkpoint)
    settings = settings_to_save(plan, checkpoint)
    return RunFiles(run, template, settings, identity, plan.batch.train_batch_size)


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
