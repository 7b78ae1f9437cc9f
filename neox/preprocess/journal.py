"""How far an interrupted run came, so that the next one goes on there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from neox.corpus import Position
from neox.data import BuilderState
from neox.errors import DataError
from neox.files import lock_file, write_text
from neox.log import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True)
class RunState:
    """What is safely on disk: all lines before `position` of input number `file`.

    run: the fingerprint of the run this belongs to, filled in when it is written.
    skipped: bad inputs passed over so far. text_bytes: read so far.
    builders: for each key, how far its dataset is.
    """

    run: str = ""
    file: int = 0
    position: Position = field(default_factory=Position)
    skipped: int = 0
    text_bytes: int = 0
    builders: Mapping[str, BuilderState] = field(default_factory=dict)


class Journal:
    """`OUTPUT_PREFIX.progress.json`, replaced by rename."""

    def __init__(self, output_prefix: str) -> None:
        self.path = Path(f"{output_prefix}.progress.json")

    def read(self, run: str) -> RunState | None:
        """Return the progress of the interrupted run with this fingerprint; None if there is none (another run's is
        dropped, with a warning)."""
        try:
            fields = json.loads(self.path.read_text(encoding="utf-8"))
            progress = RunState(**{**fields, "position": Position(**fields["position"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            _log.warning("%s cannot be understood (%s): starting over", self.path, error)
            return None
        if progress.run != run:
            _log.warning("an interrupted run left %s, but with other inputs or settings: starting over", self.path)
            return None
        return progress

    def write(self, progress: RunState) -> None:
        """Replace what is there; the data it speaks of must be on disk already."""
        write_text(self.path, json.dumps(asdict(progress)))

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


@contextmanager
def only_run(output_prefix: str) -> Iterator[None]:
    """Hold the output for this process; DataError if another run is writing it. The lock dies with its process."""
    path = Path(f"{output_prefix}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")  # noqa: SIM115 (closed below; an error here is not one of the run)
    except OSError as error:
        raise DataError(f"nothing can be written at {output_prefix}: {error.strerror}") from error
    with file:
        try:
            lock_file(file, wait=False)
        except BlockingIOError:
            raise DataError(f"another run is writing {output_prefix}: wait for it, or choose another prefix") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
