"""Settings of generation of a checkpoint: those of the Hugging Face model that it began from.

An instruction model often ends its texts with several ids. They come in a `generation_config.json` next to its
tokenizer; a copy in each checkpoint keeps them if the tokenizer is read from another directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neox.config import NeoXConfig
from neox.errors import CheckpointError, os_errors
from neox.tokenizer import (
    GENERATION_CONFIG,
    Tokenizer,
    end_ids_of,
    generation_config,
    identify_configured,
    saved_tokenizer_identity,
)
from neox.tokenizer.beside_weights import read_beside_weights

END_IDS = "eos_token_id"


def write_generation_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Write settings, if there are some, into a checkpoint. Raises CheckpointError if the disk refuses."""
    if settings:
        path = directory / GENERATION_CONFIG
        with os_errors(CheckpointError, f"{path}: cannot be written"):
            path.write_text(json.dumps(dict(settings), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def saved_generation_settings(checkpoint: Path) -> dict[str, Any]:
    """Return the settings that a checkpoint carries; none if it has none. Raises CheckpointError if it is damaged."""

    def build(fields: Any) -> dict[str, Any]:
        if not isinstance(fields, dict):
            raise ValueError(f"it holds a {type(fields).__name__}")
        return fields

    return read_beside_weights(checkpoint / GENERATION_CONFIG, "settings of generation", build) or {}


def find_generation_settings(
    config: NeoXConfig, checkpoint: Path | None, vocab_file: str | Path | None, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return the settings of generation for a model: those next to its tokenizer, and the checkpoint's.

    Where both have a setting, the one next to the tokenizer counts, which a user can change. Only end ids are joined,
    because a tokenizer of another directory, such as the base model's, often comes with fewer of them.

    Args:
        config: Configuration with the keys of the tokenizer.
        checkpoint: `global_stepN` directory, if there is one.
        vocab_file: The tokenizer's vocabulary.
        tokenizer: The tokenizer; None if it is not there.

    Raises:
        CheckpointError: If the checkpoint's settings are damaged.
        TokenizerError: If those next to the tokenizer cannot be read.
    """
    beside = dict(generation_config(vocab_file)) if vocab_file is not None else {}
    saved = {} if checkpoint is None else saved_generation_settings(checkpoint)
    if not saved or checkpoint is None:
        return beside
    if tokenizer is not None and config.checkpoint.allow_other_tokenizer:
        identity = saved_tokenizer_identity(checkpoint)
        if identity is not None and not identify_configured(config, tokenizer).same_ids(identity):
            return beside  # the checkpoint's ids stand for other tokens
    ends = [*end_ids_of(beside, str(vocab_file)), *end_ids_of(saved, str(checkpoint / GENERATION_CONFIG))]
    joined = saved | beside
    if ends:
        distinct = list(dict.fromkeys(ends))
        joined[END_IDS] = distinct if len(distinct) > 1 else distinct[0]
    return joined


def add_end_ids(tokenizer: Tokenizer, settings: Mapping[str, Any], origin: str) -> None:
    """Let generation with a tokenizer end also at the end ids of some settings.

    Args:
        tokenizer: The tokenizer, which is changed.
        settings: Result of `find_generation_settings`.
        origin: Where they come from, for the message.

    Raises:
        TokenizerError: If the settings name something else than ids.
    """
    ends = (*tokenizer.further_end_ids, *end_ids_of(settings, origin))
    tokenizer.further_end_ids = tuple(dict.fromkeys(ends))
