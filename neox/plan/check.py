"""Checks of a configuration: the problems of its keys together with those of the rules and of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from neox.config import LoadedConfig, NeoXConfig, load_config
from neox.config.keys import TOKENIZER_KEYS
from neox.errors import ConfigError
from neox.plan.resolve import resolve
from neox.plan.rules import static_problems
from neox.problems import Problem, in_file_order

# Keys that decide the number of ranks, the degrees of parallelism, or the vocabulary.
_DECIDING = frozenset(
    {
        "pipe_parallel_size",
        "model_parallel_size",
        "global_num_gpus",
        "num_gpus",
        "num_nodes",
        "hostfile",
        "include",
        "exclude",
        "launcher",
        *TOKENIZER_KEYS,
        "padded_vocab_size",
    }
)


def config_from_files(
    files: Sequence[str | Path], *, conf_dir: str | Path | None = None, overrides: Sequence[str] = ()
) -> NeoXConfig:
    """Return the configuration of files and overrides.

    Args:
        files: Configuration files, as `load_config` takes them.
        conf_dir: Directory prefixed to each file.
        overrides: `key=value`, which win over files.

    Raises:
        ConfigError: A key is unknown or has a wrong value; with every problem that can be found.
    """
    loaded = load_config(files, conf_dir=conf_dir, overrides=overrides)
    if loaded.problems:
        raise ConfigError(check_config(loaded))
    return loaded.config


def check_config(loaded: LoadedConfig) -> list[Problem]:
    """Return the problems of the keys, and the rules that the valid keys certainly break, in file order."""
    broken = static_problems(loaded.config)
    return in_file_order([*loaded.problems, *loaded.certain(broken)])


def check_run(loaded: LoadedConfig, world_size: int, vocab_size: int) -> list[Problem]:
    """Return what `check_config` returns, and the problems of a run, in file order.

    Args:
        loaded: The configuration with the problems of its keys.
        world_size: Number of ranks.
        vocab_size: Number of ids the tokenizer can produce.
    """
    if not decides_run(loaded):
        return check_config(loaded)
    try:
        resolve(loaded.config, world_size, vocab_size)
    except ConfigError as error:
        return in_file_order([*loaded.problems, *loaded.certain(error.problems)])
    return list(loaded.problems)


def decides_run(loaded: LoadedConfig) -> bool:
    """Return whether the number of ranks, the degrees and the vocabulary follow from keys that could be read."""
    return not loaded.doubtful & _DECIDING
