"""Steps on single documents: chunks of lines, worker processes, and output that an interrupted run continues.

The inputs are cut into chunks at positions that depend on their bytes only. Each chunk becomes one zstd frame of the
output, in order. So the output is the same for any number of workers, and a run that was killed continues after the
last chunk that its state file counts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, Generic

from neox.corpus import BadInput, LineBlock, Position, parse_records
from neox.errors import DataError
from neox.files import fsync_file, partial_path, replace_file, write_text
from neox.log import get_logger, progress
from tools.web_text.chunks import RESULT_AS_JSON, Chunk, Reader, read_chunks
from tools.web_text.lines import compress_lines, empty_file, encode_line, text_bytes
from tools.web_text.pool import ordered_map
from tools.web_text.shards import with_shards, write_shard
from tools.web_text.step import Counts, DocumentFunction, Job, Record, S, Step

_log = get_logger(f"neox.{__name__}")
_CHUNKS_BETWEEN_STATES = 16
_SECONDS_BETWEEN_STATES = 10.0
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


@dataclass(frozen=True)
class ChunkWork(Generic[S]):
    """What a worker does with a chunk.

    Attributes:
        build: Makes the function of a document; called once in each process.
        settings: Settings of the step.
        key: Key of the text in the input.
        keep_text: Whether dropped documents are written with their text.
        identity: Identity of the job: another job may have equal settings, but other files that they name.
    """

    build: Callable[[S], DocumentFunction]
    settings: S
    key: str = "text"
    keep_text: bool = True
    identity: str = ""

    def __call__(self, chunk: Chunk) -> ChunkResult:
        """Process the documents of a chunk."""
        function = _built(self.build, self.settings, self.identity)
        counts, bad = Counts(), list[BadInput]()
        kept, dropped = list[bytes](), list[bytes]()
        for record in _records(chunk.content, self.key):
            if isinstance(record, BadInput):
                bad.append(record)
                continue
            counts.documents_in += 1
            counts.bytes_in += text_bytes(record, self.key)
            for outcome in function(record):
                size = text_bytes(outcome.record, self.key if self.key in outcome.record else "text")
                for name in outcome.changed:
                    counts.change(name)
                if outcome.dropped is None:
                    counts.documents_out += 1
                    counts.bytes_out += size
                    kept.append(encode_line(outcome.record))
                else:
                    counts.drop(outcome.dropped, size)
                    shown = {k: v for k, v in outcome.record.items() if self.keep_text or k != self.key}
                    dropped.append(encode_line({**shown, "dropped": outcome.dropped}))
        path = self.settings.output
        return ChunkResult(compress_lines(kept, path), compress_lines(dropped, path), tuple(bad), counts)


@lru_cache(maxsize=1)
def _built(build: Callable[[S], DocumentFunction], settings: S, identity: str) -> DocumentFunction:
    return build(settings)


def _records(content: LineBlock | tuple[Record, ...] | None, key: str) -> Iterator[Record | BadInput]:
    if isinstance(content, LineBlock):
        yield from parse_records(content, key)
    elif content is not None:
        yield from content


@dataclass
class _State:
    """State of an interrupted run: the partial outputs hold `sizes` bytes, made from everything before `next`."""

    identity: str
    next: tuple[int, Position] = (0, Position())
    sizes: tuple[int, int] = (0, 0)
    counts: Counts = field(default_factory=Counts)

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path, identity: str) -> _State:
        """Return the state of the same job, or the state of its start."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields["identity"] == identity:
                (number, position), (kept, dropped) = fields["next"], fields["sizes"]
                return _State(identity, (number, Position(**position)), (kept, dropped), Counts(**fields["counts"]))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            _log.warning("%s cannot be read (%s): starting over", path, error)
        return _State(identity)


def map_documents(job: Job[S], work: ChunkWork[S], read: Reader = read_chunks) -> None:
    """Write what a function makes of each document; the dropped ones are written with their reasons.

    Args:
        job: The job; its counts are filled in.
        work: What is done with a chunk.
        read: Reader of the inputs.

    Raises:
        DataError: If too many inputs are bad, or a worker was killed.
    """
    if job.shard is not None:
        chunks = read(job.files, (0, Position()), job.settings.max_line_mb * _MIB, lambda _: None)
        return write_shard(job, work, job.files, chunks)
    function, workers = with_shards(job, work, job.files)

    def produce(start: tuple[int, Position], consumed: Callable[[int], Any]) -> Results:
        chunks = read(job.files, start, job.settings.max_line_mb * _MIB, consumed)
        try:
            yield from ordered_map(function, chunks, workers)
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process was killed, perhaps for lack of memory: the same command resumes; give fewer "
                "--workers"
            ) from error

    write_results(job, produce, "B", sum(os.path.getsize(file) for file in job.files))


def write_results(
    job: Job[S],
    produce: Callable[[tuple[int, Position], Callable[[int], Any]], Results],
    unit: str,
    total: float | None = None,
) -> None:
    """Append results to the outputs, from where an interrupted run of the same job stopped.

    Args:
        job: The job; its counts are filled in.
        produce: Yields chunks with their results from a position on. It calls a function with what it has consumed.
        unit: Unit of consumption.
        total: Consumption of the whole job; None if it is not known.
    """
    path = job.work / "state.progress.json"
    state = _State.read(path, job.identity)
    targets = (job.settings.output, job.dropped)
    job.dropped.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        files = [stack.enter_context(_open_partial(t, size)) for t, size in zip(targets, state.sizes, strict=True)]
        if None in files:
            _log.warning("the partial output of an interrupted run is missing: starting over")
            state = _State(job.identity)
            files = [stack.enter_context(_open_partial(target, 0)) for target in targets]
        outputs = [file for file in files if file is not None]
        bar = stack.enter_context(progress(job.name, total, unit))
        results = stack.enter_context(closing(produce(state.next, bar.update)))
        _append(results, state, outputs, path, job.settings.skip_bad)
        for target, output, size in zip(targets, outputs, state.sizes, strict=True):
            if not size:
                output.write(empty_file(target))
            fsync_file(output)
            replace_file(partial_path(target), target)
    job.counts = state.counts


def _append(results: Results, state: _State, outputs: list[IO[bytes]], path: Path, skip_bad: int) -> None:
    """Append results, and write the state now and then."""
    written = time.monotonic()
    for number, (chunk, result) in enumerate(results, start=1):
        for bad in (*chunk.bad, *result.bad):
            state.counts.add_bad(bad, skip_bad)
        for output, data in zip(outputs, (result.kept, result.dropped), strict=True):
            output.write(data)
        state.counts.add(result.counts)
        state.sizes = (state.sizes[0] + len(result.kept), state.sizes[1] + len(result.dropped))
        state.next = chunk.next
        if number % _CHUNKS_BETWEEN_STATES == 0 or time.monotonic() - written > _SECONDS_BETWEEN_STATES:
            for output in outputs:
                fsync_file(output)
            state.write(path)
            written = time.monotonic()


@contextmanager
def _open_partial(target: Path, size: int) -> Iterator[IO[bytes] | None]:
    """Open the partial file of a target after its first `size` bytes; None if it has fewer."""
    path = partial_path(target)
    if size and (not path.exists() or path.stat().st_size < size):
        yield None
        return
    with open(path, "r+b" if size else "wb") as file:
        file.truncate(size)
        file.seek(size)
        yield file


def document_step(
    name: str, settings: type[S], build: Callable[[S], DocumentFunction], *, packages: tuple[str, ...] = ()
) -> Step[S]:
    """Return a step that is a function of single documents.

    Args:
        name: Name of the step.
        settings: Class of its settings.
        build: Makes the function from the settings; a function of a module, since worker processes import it.
        packages: Packages whose versions determine the output.
    """
    return Step(name, settings, partial(_run_documents, build=build), build=build, packages=packages, sharded=True)


def _run_documents(job: Job[S], build: Callable[[S], DocumentFunction]) -> None:
    map_documents(job, ChunkWork(build, job.settings, identity=job.identity))
