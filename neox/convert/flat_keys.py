"""The keys of configuration files before they are validated, for looking at models that do not run here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neox.config.flat import texts
from neox.config.loader import find_file, merge_files
from neox.errors import ConfigError


def read_flat(files: Sequence[str | Path]) -> dict[str, Any]:
    """All keys of the files, unvalidated, with `-` as `_`. Raises ConfigError for missing files and duplicate keys."""
    values, _, problems = merge_files([find_file(file) for file in files])
    if problems:
        raise ConfigError(texts(problems))
    return values
