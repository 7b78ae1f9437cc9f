"""The checkpoint named `best`: the link `SAVE/best`, and a record of why it is the best.

`SAVE/best` is a symbolic link to a `global_stepN` directory, so every command that takes a checkpoint takes it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from neox.errors import CheckpointError, os_errors
from neox.files import replace_link, write_text

BEST = "best"
"""Name of the link in the directory of checkpoints."""
_RECORD = "best.json"


@dataclass(frozen=True)
class BestCheckpoint:
    """The best checkpoint of a run so far.

    Attributes:
        checkpoint: Name of its directory.
        iteration: Its iteration.
        metric: Scalar by which checkpoints are compared.
        value: Its value of that scalar.
    """

    checkpoint: str
    iteration: int
    metric: str
    value: float


def read_best(save: Path) -> BestCheckpoint | None:
    """Return the best checkpoint in a directory; None if none has the name, or its directory is gone."""
    try:
        fields = json.loads((save / _RECORD).read_text(encoding="utf-8"))
        found = BestCheckpoint(
            str(fields["checkpoint"]), int(fields["iteration"]), str(fields["metric"]), float(fields["value"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if (save / found.checkpoint).is_dir() else None


def name_best(save: Path, best: BestCheckpoint) -> None:
    """Give a checkpoint the name `best`. Raises CheckpointError."""
    with os_errors(CheckpointError, f"{save / BEST}: cannot be written"):
        replace_link(save / BEST, best.checkpoint)
        write_text(save / _RECORD, json.dumps(asdict(best), indent=2) + "\n")


def forget_best(save: Path) -> None:
    """Remove the name, if there is one, from a directory in which a run begins anew."""
    for name in (BEST, _RECORD):
        with suppress(OSError):
            (save / name).unlink(missing_ok=True)
