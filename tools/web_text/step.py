"""Definition of a step, its settings, its outcomes and its report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from neox.config.sections.base import Section
from neox.corpus import BadInput, SkipBudget, expand_inputs
from neox.errors import ConfigError
from neox.log import get_logger
from neox.storage import is_remote

_log = get_logger(f"neox.{__name__}")
_BAD_EXAMPLES = 20

Record = dict[str, Any]


def _local_as_path(value: Any) -> Any:
    """Return a path that is no address as a Path, and an address unchanged: a Path would lose a slash of it."""
    if isinstance(value, str) and not is_remote(value):
        return Path(value)
    return value


Input = Annotated[Path | str, BeforeValidator(_local_as_path)]
"""Local path, or an address."""


class Settings(Section):
    """Settings that every step has."""

    model_config = ConfigDict(use_attribute_docstrings=True)  # the flags' help

    input: tuple[Input, ...] = Field(min_length=1)
    """Files, directories or addresses (s3://, gs://, hf://, https://), in this order."""

    output: Path
    """File to write. Its report and the hashes of the inputs go to `OUTPUT.step.json`."""

    report: Path | None = None
    """File for a copy of the report."""

    workers: int = Field(1, ge=0, le=1024)
    """Number of processes; 0 means one for each core. The output does not depend on it."""

    seed: int = Field(0, ge=0)
    """Seed of all random choices; steps without any ignore it."""

    skip_bad: int = Field(0, ge=0)
    """Number of bad inputs (lines, or the damaged rest of a file) that may be skipped; the report names them."""

    max_line_mb: int = Field(64, ge=1, le=1024)
    """Longest line of the input, which is held in memory; a longer line is a bad input."""

    # Fields that change no byte of the output.
    RUNTIME: ClassVar[frozenset[str]] = frozenset({"input", "output", "report", "workers", "skip_bad"})
    # Field -> another field, and the value that the other must have for the first to have an effect.
    ONLY_WITH: ClassVar[Mapping[str, tuple[str, Any]]] = {}

    @field_validator("*", mode="before")
    @classmethod
    def _paths_between_commas(cls, value: Any, info: Any) -> Any:
        """Accept `a,b` where several paths or words are expected."""
        annotation = str(cls.model_fields[info.field_name].annotation)
        if isinstance(value, str) and annotation.startswith("tuple["):
            return tuple(part for part in value.split(",") if part)
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _only_inputs_are_remote(cls, value: Any, info: Any) -> Any:
        """Refuse an address where a local path is expected: a Path would lose a slash of it."""
        if "Path" in str(cls.model_fields[info.field_name].annotation) and info.field_name != "input":
            values = str(value).split(",")
            if isinstance(value, tuple | list):
                values = list(map(str, value))
            for entry in values:
                if is_remote(entry):
                    raise ValueError("must be on this machine; only --input reads addresses")
        return value

    def fingerprint(self) -> Mapping[str, Any]:
        """Return the settings that determine the output's bytes, as JSON."""
        return self.model_dump(mode="json", exclude=set(self.RUNTIME))


S = TypeVar("S", bound=Settings)


def without(record: Mapping[str, Any], *keys: str) -> Record:
    """Return a copy of a record without some keys."""
    return {key: value for key, value in record.items() if key not in keys}


@dataclass(frozen=True)
class Outcome:
    """Result of a step for one document.

    Attributes:
        record: The document, perhaps changed.
        dropped: Reason why it is dropped; None if it is kept.
        changed: Names of the changes that were made.
    """

    record: Record
    dropped: str | None = None
    changed: tuple[str, ...] = ()


DocumentFunction = Callable[[Record], Iterable[Outcome]]
"""Function from one document to its outcomes: one, or one for each piece."""


@dataclass
class Counts:
    """Counts of a step, or of a part of it.

    Attributes:
        documents_in: Number of documents (URLs, pages) read.
        documents_out: Number of documents written.
        bytes_in: UTF-8 bytes of the texts read.
        bytes_out: UTF-8 bytes of the texts written.
        dropped: Reason -> number of documents and bytes of their texts.
        changed: Change -> number of documents.
        bad: Number of bad inputs.
        bad_examples: The first bad inputs, with location and reason.
        details: Figures that only one kind of step has.
    """

    documents_in: int = 0
    documents_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    dropped: dict[str, list[int]] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    bad: int = 0
    bad_examples: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def drop(self, reason: str, size: int, documents: int = 1) -> None:
        """Count dropped documents with `size` bytes of text."""
        entry = self.dropped.setdefault(reason, [0, 0])
        entry[0] += documents
        entry[1] += size

    def change(self, name: str, documents: int = 1) -> None:
        """Count changed documents."""
        self.changed[name] = self.changed.get(name, 0) + documents

    def add_bad(self, bad: BadInput, limit: int) -> None:
        """Count a bad input. Raises DataError with its location if there are more than `limit`."""
        SkipBudget(limit, skipped=self.bad).add(bad)
        _log.warning("skipped %s", bad)
        self.bad += 1
        if len(self.bad_examples) < _BAD_EXAMPLES:
            self.bad_examples.append(str(bad))

    def add(self, other: Counts) -> None:
        """Add the counts of another part; `details` and bad inputs are not added."""
        self.documents_in += other.documents_in
        self.documents_out += other.documents_out
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out
        for reason, (documents, size) in other.dropped.items():
            self.drop(reason, size, documents)
        for name, documents in other.changed.items():
            self.change(name, documents)

    def as_json(self) -> dict[str, Any]:
        """Return the counts with sorted reasons, so that equal counts give equal text."""
        fields = asdict(self)
        fields["dropped"] = dict(sorted(self.dropped.items()))
        fields["changed"] = dict(sorted(self.changed.items()))
        return fields


@dataclass
class Job(Generic[S]):
    """One run of a step.

    Attributes:
        name: Name of the step.
        settings: Settings of the step.
        files: Inputs; directories are replaced by their files.
        identity: Hash of the step, its settings and the contents of its inputs.
        counts: Counts to fill in.
        shard: Number of a task and number of tasks, if this job only computes the task's share of the chunks.
    """

    name: str
    settings: S
    files: tuple[str, ...]
    identity: str
    counts: Counts = field(default_factory=Counts)
    shard: tuple[int, int] | None = None

    @property
    def work(self) -> Path:
        """Directory of intermediate files. An interrupted job leaves it for its next run; a complete one removes it."""
        return self.settings.output.with_name(f"{self.settings.output.name}.work")

    @property
    def dropped(self) -> Path:
        """File for the dropped documents."""
        return dropped_path(self.settings.output)


def dropped_path(output: Path) -> Path:
    """Return the file for dropped documents: in `dropped/` next to the output, with its name.

    Dropped URLs of a WARC file are written as JSON lines.
    """
    name = output.name
    if ".warc" in name:
        name += ".jsonl"
    return output.parent / "dropped" / name


def one_output(settings: Settings) -> tuple[Path, ...]:
    """Return the output as the only file that the next step reads."""
    return (settings.output,)


@dataclass(frozen=True)
class Step(Generic[S]):
    """One step of a recipe: a sub-command of `tools/web_text.py`.

    Attributes:
        name: Name in commands and recipes.
        settings: Class of its settings, whose docstring describes the step.
        run: Function that writes the outputs of a job atomically and fills in its counts. After an interruption it is
            called again for the same job. It always makes the same bytes, for any number of workers.
        build: Function that makes the function of a document; None if the step does not treat documents one by one.
        suffixes: Endings that the name of the output may have; they give its format. Recipes use the first. Without
            any, every name is allowed.
        expand: Function that replaces directories among the inputs by their files.
        outputs: Function that returns the files that the next step reads.
        packages: Packages whose versions determine the output, too.
        sharded: Whether `run` can compute a share of the chunks, for a job with a `shard`.
    """

    name: str
    settings: type[S]
    run: Callable[[Job[S]], None]
    build: Callable[[S], DocumentFunction] | None = None
    suffixes: tuple[str, ...] = (".jsonl.zst", ".jsonl")
    expand: Callable[[Sequence[Path | str]], tuple[str, ...]] = expand_inputs
    outputs: Callable[[S], tuple[Path, ...]] = one_output
    packages: tuple[str, ...] = ()
    sharded: bool = False

    def make_settings(self, values: Mapping[str, Any], where: Callable[[str], str]) -> S:
        """Return checked settings.

        Args:
            values: Names of fields and their values, as from a recipe or a command line.
            where: Function that returns what messages call a field.

        Raises:
            ConfigError: If a value is missing, unknown or unsuitable; all of them are named.
        """
        try:
            settings = self.settings(**values)
        except ValidationError as error:
            sentences = []
            for problem in error.errors():
                name = str(problem["loc"][0]) if problem["loc"] else ""
                message = problem["msg"]
                sentence = f"{where(name)}: {message[:1].lower()}{message[1:]}"
                if problem["type"] != "missing":
                    sentence += f" (given: {problem['input']!r:.80})"
                sentences.append(sentence)
            raise ConfigError(sentences) from None
        if (wrong := self.output_problem(settings)) is not None:
            raise ConfigError(f"{where('output')}: {wrong}")
        unused = []
        for name, (other, value) in settings.ONLY_WITH.items():
            if name in values and getattr(settings, other) != value:
                unused.append(f"{where(name)} has no effect unless {where(other)} is {value}: remove it")
        if unused:
            raise ConfigError(unused)
        return settings

    def output_problem(self, settings: S) -> str | None:
        """Return why the output cannot have its name; None if it can."""
        name = settings.output.name
        if not name:
            return f"'{settings.output}' names no file"
        if self.suffixes and not name.endswith(self.suffixes):
            return f"{settings.output} must end with {' or '.join(self.suffixes)}, which give its format"
        return None
