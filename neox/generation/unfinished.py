"""Completions of a run that is not through yet, beside its output: the same run, started again, goes on from them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from neox.errors import GenerationError
from neox.files import write_text
from neox.generation.completion import Completion
from neox.log import get_logger

_log = get_logger(__name__)


class UnfinishedRun:
    """`OUTPUT.partial`: a line that tells the run, then `[number, completion]` a line, as they come.

    out: the run's output file. run: what is the same for two runs exactly where their completions are. One rank reads
    and writes.
    """

    def __init__(self, out: Path, run: str) -> None:
        self.path, self.run = out.with_name(f"{out.name}.partial"), run
        self.begun = False
        self.read_before: dict[int, Completion] = {}

    def add(self, completions: Mapping[int, Completion]) -> None:
        """Keep finished completions. Raises GenerationError where they cannot be written."""
        try:
            if self.begun:
                with self.path.open("a", encoding="utf-8") as file:
                    file.writelines(_lines(completions))
            else:  # whole: without the line that an interruption cut, and without another run's
                write_text(self.path, [self._title(), *_lines({**self.read_before, **completions})])
        except OSError as error:
            raise GenerationError(f"{self.path}: cannot be written ({error.strerror or error})") from error
        self.begun = True

    def remove(self) -> None:
        """Forget the run, whose output is written."""
        self.path.unlink(missing_ok=True)

    def _title(self) -> str:
        return json.dumps({"unfinished_run": self.run}) + "\n"

    def read(self) -> dict[int, Completion]:
        """Return what an interrupted run has finished, by the number of the prompt.

        What comes behind the last line's end was cut. Raises GenerationError for a file that cannot be read.
        """
        try:
            *lines, _ = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise GenerationError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        if not lines or lines[0] + b"\n" != self._title().encode():
            _log.warning(
                "%s is of a run with other prompts, settings or weights: not used, and will be written over", self.path
            )
            return {}
        try:
            self.read_before = {number: Completion(**record) for number, record in map(json.loads, lines[1:])}
        except (ValueError, TypeError) as error:
            raise GenerationError(f"{self.path}: is broken ({error}); remove it to start over") from error
        _log.info("going on with an interrupted run: %s holds %d completion(s)", self.path, len(self.read_before))
        return dict(self.read_before)


def _lines(completions: Mapping[int, Completion]) -> Iterator[str]:
    return (json.dumps([number, done.to_json()], ensure_ascii=False) + "\n" for number, done in completions.items())
