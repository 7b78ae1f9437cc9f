"""Checks of a configuration: the problems of its keys together with those of the plan that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from neox.config.loader import Draft, draft_config
from neox.config.neox_config import NeoXConfig
from neox.errors import ConfigError
from neox.plan.resolve import resolve
from neox.plan.rules import static_problems

# Where one of these has an unknown value, so has the number of ranks, the degrees or the vocabulary.
_DECIDING = frozenset(
    {
        *("pipe_parallel_size", "model_parallel_size", "global_num_gpus", "num_gpus", "num_nodes", "hostfile"),
        *("include", "exclude", "launcher", "tokenizer_type", "vocab_file", "merge_file", "padded_vocab_size"),
    }
)


def load_config(
    files: Sequence[str | Path], *, conf_dir: str | Path | None = None, overrides: Sequence[str] = ()
) -> NeoXConfig:
    """Read configuration files and overrides into a NeoXConfig.

    Args:
        files: Configuration files, as `draft_config` takes them.
        conf_dir: Directory prefixed to each file.
        overrides: `key=value`, which win over files.

    Raises:
        ConfigError: Every problem found.
    """
    draft = draft_config(files, conf_dir=conf_dir, overrides=overrides)
    if draft.problems:
        raise ConfigError([*draft.problems, *draft.certain(static_problems(draft.config))])
    return draft.config


def further_problems(draft: Draft, world_size: int, vocab_size: int) -> list[str]:
    """Return the rules that the valid keys of a draft break, apart from what one of its bad keys may have caused."""
    if draft.doubtful & _DECIDING:
        return draft.certain(static_problems(draft.config))
    try:
        resolve(draft.config, world_size, vocab_size)
    except ConfigError as error:
        return draft.certain(error.problems)
    return []
