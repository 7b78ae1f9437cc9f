"""Steps that treat documents one by one: in chunks, by worker processes, with output that a later run continues.

The inputs are cut into chunks at positions that depend on their bytes only. Each chunk becomes one zstd frame of the
output, in order. So the output is the same for any number of workers, and a run that was killed continues after the
last chunk that its state file counts.

    read_chunks                 chunks.py; of WARC or HTML files: pages.py; of dumps: wikipedia.py
        |  ordered_map          worker processes, results in order
        |    ChunkWork            each document -> `Outcome`s: kept, or dropped with a reason
        v
    ChunkResult                 lines kept and dropped, compressed; counts; bad inputs
        |  write_results        appends them, and saves the state every few seconds
        v
    OUTPUT, dropped/OUTPUT      renamed when complete
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Generic, Self

from neox.corpus import BadInput, LineBlock, Position, parse_records
from neox.errors import DataError
from neox.files import fsync_file, partial_path, replace_file
from neox.log import get_logger, progress
from neox.resume import ResumeLog, open_truncated
from neox.workers import ordered_map
from tools.web_text.chunks import RESULT_AS_JSON, START, Chunk, Place, Reader, read_chunks, with_shards, write_shard
from tools.web_text.lines import compress_lines, empty_file, encode_line, text_bytes, total_bytes
from tools.web_text.step import Counts, DocumentFunction, Job, Record, S, Step, without

_log = get_logger(f"neox.{__name__}")
_MIB = 1 << 20


@dataclass(frozen=True)
class ChunkResult:
    """Output of a chunk.

    Attributes:
        kept: Lines of the documents kept, compressed if the output is.
        dropped: Lines of the documents dropped, with their reasons.
        bad: Bad lines.
        counts: Counts of the chunk.
    """

    __pydantic_config__ = RESULT_AS_JSON

    kept: bytes
    dropped: bytes
    bad: tuple[BadInput, ...]
    counts: Counts


Results = Generator[tuple[Chunk, ChunkResult]]


class ChunkOutput:
    """Output of a chunk while its documents are processed."""

    def __init__(self, path: Path) -> None:
        """Start without documents.

        Args:
            path: Output of the step; its name says whether lines are compressed.
        """
        self.counts = Counts()
        self._path = path
        self._kept: list[bytes] = []
        self._dropped: list[bytes] = []

    def keep(self, line: bytes, size: int) -> None:
        """Add a document that is kept, with the bytes of its text."""
        self._kept.append(line)
        self.counts.documents_out += 1
        self.counts.bytes_out += size

    def drop(self, record: Record, reason: str, size: int) -> None:
        """Add a document that is dropped, with the bytes of its text."""
        self._dropped.append(encode_line({**record, "dropped": reason}))
        self.counts.drop(reason, size)

    def result(self, bad: Iterable[BadInput] = ()) -> ChunkResult:
        """Return the output, with the bad lines of the chunk."""
        kept = compress_lines(self._kept, self._path)
        dropped = compress_lines(self._dropped, self._path)
        return ChunkResult(kept, dropped, tuple(bad), self.counts)


@dataclass(frozen=True)
class ChunkWork(Generic[S]):
    """Function of a chunk, for worker processes: applies the function of a document to each of its documents.

    Attributes:
        build: Function that makes the function of a document; called once in each process.
        settings: Settings of the step.
        key: Key of the text in the input.
        keep_text: Whether dropped documents are written with their text.
        identity: Identity of the job. Another job may have equal settings that name files with other contents.
    """

    build: Callable[[S], DocumentFunction]
    settings: S
    key: str = "text"
    keep_text: bool = True
    identity: str = ""

    def __call__(self, chunk: Chunk) -> ChunkResult:
        """Process the documents of a chunk."""
        function = _built(self.build, self.settings, self.identity)
        output = ChunkOutput(self.settings.output)
        bad: list[BadInput] = []
        records: Iterable[Record | BadInput] = ()
        if isinstance(chunk.content, LineBlock):
            records = parse_records(chunk.content, self.key)
        elif chunk.content is not None:
            records = chunk.content
        for record in records:
            if isinstance(record, BadInput):
                bad.append(record)
                continue
            output.counts.documents_in += 1
            output.counts.bytes_in += text_bytes(record, self.key)
            for outcome in function(record):
                result = outcome.record
                size = text_bytes(result, self.key if self.key in result else "text")
                for name in outcome.changed:
                    output.counts.change(name)
                if outcome.dropped is None:
                    output.keep(encode_line(result), size)
                elif self.keep_text:
                    output.drop(result, outcome.dropped, size)
                else:
                    output.drop(without(result, self.key), outcome.dropped, size)
        return output.result(bad)


@lru_cache(maxsize=1)
def _built(build: Callable[[S], DocumentFunction], settings: S, identity: str) -> DocumentFunction:
    return build(settings)


@dataclass
class ChunkState:
    """State of a run over chunks: everything before `next` is done.

    Attributes:
        next: Place of the next chunk.
        counts: Counts of the chunks done.
    """

    next: Place = START
    counts: Counts = field(default_factory=Counts)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the state with these fields, as `dataclasses.asdict` makes them."""
        number, position = fields["next"]
        return cls(**{**fields, "next": (number, Position(**position)), "counts": Counts(**fields["counts"])})


@dataclass
class _OutputState(ChunkState):
    """State of an interrupted run.

    Attributes:
        sizes: Bytes of the partial files of kept and of dropped documents.
    """

    sizes: tuple[int, int] = (0, 0)


def map_documents(job: Job[S], work: ChunkWork[S], read: Reader = read_chunks) -> None:
    """Apply a function to each document. Dropped documents are written, too, with their reasons.

    Args:
        job: The job; its counts are filled in.
        work: Function of a chunk.
        read: Reader of the inputs.

    Raises:
        DataError: If too many inputs are bad, or a worker died twice on a chunk.
    """
    if job.shard is not None:
        chunks = read(job.files, START, job.settings.max_line_mb * _MIB, lambda _: None)
        return write_shard(job, work, job.files, chunks)
    function, workers = with_shards(job, work, job.files)

    def produce(start: Place, consumed: Callable[[int], Any]) -> Results:
        chunks = read(job.files, start, job.settings.max_line_mb * _MIB, consumed)
        return ordered_map(function, chunks, workers)

    write_results(job, produce, "B", total_bytes(job.files))


def write_results(
    job: Job[S],
    produce: Callable[[Place, Callable[[int], Any]], Results],
    unit: str,
    total: float | None = None,
) -> None:
    """Append results to the outputs, from where an interrupted run of the same job stopped.

    Args:
        job: The job; its counts are filled in.
        produce: Generator of the chunks from a position on, with their results. It gets a function too, and calls it
            with the amount of input that it has newly read.
        unit: Unit of that amount.
        total: Amount of input of the whole job; None if it is not known.
    """
    log = ResumeLog(job.work / "state.progress.json", job.identity, _OutputState.from_json)
    targets = (job.settings.output, job.dropped)
    job.dropped.parent.mkdir(parents=True, exist_ok=True)
    state = log.read() or _OutputState()
    kept, dropped = map(partial_path, targets)
    try:
        outputs = [open_truncated(kept, state.sizes[0]), open_truncated(dropped, state.sizes[1])]
    except DataError as error:
        _log.warning("the interrupted run cannot be resumed (%s): starting over", error)
        state = _OutputState()
        outputs = [open_truncated(kept, 0), open_truncated(dropped, 0)]
    with ExitStack() as stack:
        for output in outputs:
            stack.enter_context(output)
        bar = stack.enter_context(progress(job.name, total, unit))
        results = stack.enter_context(closing(produce(state.next, bar.update)))
        for chunk, result in results:
            for bad in (*chunk.bad, *result.bad):
                state.counts.add_bad(bad, job.settings.skip_bad)
            for output, data in zip(outputs, (result.kept, result.dropped), strict=True):
                output.write(data)
            state.counts.add(result.counts)
            state.sizes = (state.sizes[0] + len(result.kept), state.sizes[1] + len(result.dropped))
            state.next = chunk.next
            if log.is_due:
                for output in outputs:
                    fsync_file(output)  # what the state counts must be on disk
                log.write(state)
        for target, output, size in zip(targets, outputs, state.sizes, strict=True):
            if not size:
                output.write(empty_file(target))
            fsync_file(output)
            replace_file(partial_path(target), target)
    job.counts = state.counts


def document_step(
    name: str, settings: type[S], build: Callable[[S], DocumentFunction], *, packages: tuple[str, ...] = ()
) -> Step[S]:
    """Return a step that is a function of single documents.

    Args:
        name: Name of the step.
        settings: Class of its settings.
        build: Function that makes the function of a document. It must be a module's function, because worker processes
            import it.
        packages: Packages whose versions determine the output.
    """
    return Step(name, settings, partial(_run_documents, build=build), build=build, packages=packages, sharded=True)


def _run_documents(job: Job[S], build: Callable[[S], DocumentFunction]) -> None:
    map_documents(job, ChunkWork(build, job.settings, identity=job.identity))
