"""Inputs to datasets: read, hand out, collect in order, write; and go on where an interrupted run was."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from neox.corpus import BadInput, LineBlock, SkipBudget, expand_inputs, first_lines, parse_texts, read_blocks
from neox.data import BuilderState, IndexedDatasetBuilder, best_dtype
from neox.data.sidecar import Sidecar, read_sidecar, write_sidecar
from neox.errors import DataError
from neox.log import get_logger
from neox.preprocess.display import Display, show_progress
from neox.preprocess.journal import Journal, RunState, only_run
from neox.preprocess.pool import BlockPool
from neox.preprocess.settings import PreprocessSettings, describe_run, fingerprint, share_memory
from neox.preprocess.worker import BlockEncoder, EncodedBlock, EncodeJob, load_ftfy
from neox.tokenizer import Tokenizer

_log = get_logger(__name__)
_SECONDS_BETWEEN_JOURNALS = 5.0
_SAMPLE_BYTES = 1 << 17
_SMALL_BLOCK = 1 << 17
_SAMPLE_CHARS = 1 << 16


@dataclass(frozen=True)
class PreprocessReport:
    """What a run made. documents, tokens: for each key. skipped: bad inputs passed over. text_bytes: JSON lines read,
    decompressed. seconds: of this run. accelerator: used, `off` for none. fresh: False if all was there already."""

    documents: Mapping[str, int]
    tokens: Mapping[str, int]
    skipped: int
    text_bytes: int
    seconds: float
    accelerator: str
    fresh: bool = True


def preprocess(settings: PreprocessSettings, *, may_be_empty: bool = False) -> PreprocessReport:
    """Make the datasets of a run; the same bytes for any number of workers, any accelerator and any interruption.

    Raises DataError for bad input beyond the budget, a disk that is full, a worker that dies twice; TokenizerError for
    a tokenizer that cannot be built. What is done by then is kept, and the same settings go on there.
    """
    run = _Run(settings, may_be_empty)
    with only_run(settings.output_prefix):
        return run.go()


def finished(settings: PreprocessSettings) -> PreprocessReport | None:
    """Return the report of an earlier, equal run whose datasets are all in place; None if there is none."""
    return _Run(settings, may_be_empty=True).finished()


class _Run:
    """The parts of one run that several steps need."""

    def __init__(self, settings: PreprocessSettings, may_be_empty: bool) -> None:
        if len(set(settings.keys)) != len(settings.keys) or not settings.keys:
            raise DataError(f"--jsonl-keys {' '.join(settings.keys)}: each key once, and at least one")
        self.settings, self.may_be_empty = settings, may_be_empty
        self.files = expand_inputs(settings.inputs)
        if not self.files:
            raise DataError("no inputs: give --input with files or directories, commas between them")
        if settings.ftfy:
            load_ftfy()
        self.shares = share_memory(settings.workers, settings.memory_mb)
        self.journal = Journal(settings.output_prefix)
        self.accelerator: str | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.settings.tokenizer.build()

    @cached_property
    def description(self) -> Mapping[str, Any]:
        return describe_run(self.settings, self.files, self.tokenizer.content_hash)

    @cached_property
    def name(self) -> str:
        """The run's fingerprint; hashing a vocabulary takes a while, so it is asked for late."""
        return fingerprint(self.description)

    @cached_property
    def dtype(self) -> np.dtype:
        return best_dtype(self.tokenizer.vocab_size if self.settings.impl == "mmap" else None)

    def go(self) -> PreprocessReport:
        started = time.monotonic()
        wanted = self.settings
        if not wanted.restart and (done := self.finished()) is not None:
            return done
        try:
            so_far, builders = self._open()
            end = self._collect(builders, so_far)
            return self._finish(builders, end, time.monotonic() - started)
        except OSError as error:
            raise DataError(f"{error.filename or wanted.output_prefix} cannot be written: {error.strerror}") from error

    def _job(self) -> EncodeJob:
        s = self.settings
        sample = tuple(self._sample())
        return EncodeJob(
            s.tokenizer, s.accelerator, s.keys, s.append_eod, s.ftfy, self.dtype.str, sample, self.shares.piece_bytes
        )

    def finished(self) -> PreprocessReport | None:
        """Return the report of an earlier, equal run whose datasets are all in place; None if there is none."""
        sidecars = {key: read_sidecar(self.settings.prefix(key)) for key in self.settings.keys}
        if not all(sidecars.values()) or not all(
            sidecar
            and sidecar.settings.get("run") == self.name
            and sidecar.settings.get("skipped", 0) <= self.settings.skip_bad
            and Path(f"{self.settings.prefix(key)}.idx").exists()
            for key, sidecar in sidecars.items()
        ):
            return None
        made = {key: sidecar for key, sidecar in sidecars.items() if sidecar}
        any_one = next(iter(made.values())).settings
        return PreprocessReport(
            {key: sidecar.documents for key, sidecar in made.items()},
            {key: sidecar.tokens for key, sidecar in made.items()},
            any_one.get("skipped", 0),
            any_one.get("text_bytes", 0),
            0.0,
            self.settings.accelerator,
            fresh=False,
        )

    def _sample(self) -> list[str]:
        """The first texts of the first input, to check an accelerator with; errors are met again later, in order."""
        block = first_lines(self.files[0], _SAMPLE_BYTES)
        texts = [text for column in parse_texts(block, self.settings.keys)[0] for text in column] if block else []
        lengths = accumulate(len(text) for text in texts)
        return [text for text, length in zip(texts, lengths, strict=True) if length <= _SAMPLE_CHARS]

    def _open(self) -> tuple[RunState, dict[str, IndexedDatasetBuilder]]:
        """Open the datasets where an interrupted run left them, or anew."""
        so_far = self.journal.read(self.name) if self.journal.path.exists() and not self.settings.restart else None
        if so_far is not None:
            try:
                builders = {key: self._builder(key, so_far.builders[key]) for key in self.settings.keys}
            except DataError as error:
                _log.warning("the interrupted run cannot be continued (%s): starting over", error)
            else:
                _log.info("continuing at %s:%d", self.files[so_far.file], so_far.position.line)
                return so_far, builders
        return RunState(), {key: self._builder(key, None) for key in self.settings.keys}

    def _builder(self, key: str, state: BuilderState | None) -> IndexedDatasetBuilder:
        return IndexedDatasetBuilder(self.settings.prefix(key), self.dtype, impl=self.settings.impl, resume=state)

    def _blocks(self, start: RunState, order: deque[int], shown: Display) -> Iterator[LineBlock | BadInput]:
        """Read every input from `start` on; the number of the input of each item goes to `order`."""
        for number in range(start.file, len(self.files)):
            for item in read_blocks(
                self.files[number],
                block_bytes=self.shares.block_bytes,
                max_line_bytes=self.shares.in_flight_bytes,
                start=start.position if number == start.file else None,
                consumed=shown.read,
            ):
                order.append(number)
                yield item

    def _results(self, blocks: Iterator[LineBlock | BadInput]) -> Iterator[EncodedBlock | BadInput]:
        """Encode blocks, in order. A small first one is done here, by the tokenizer itself: its ids are on disk before
        workers have started and loaded an accelerator."""
        job, first = self._job(), next(blocks, None)
        if isinstance(first, LineBlock) and len(first.data) <= _SMALL_BLOCK and job.accelerator in ("auto", "off"):
            encoder = BlockEncoder(replace(job, accelerator="off"), self.tokenizer)
            yield replace(encoder.encode(first), accelerator=None)
            first = next(blocks, None)
        if first is not None:
            with BlockPool(self.shares.workers, self.shares.in_flight_bytes) as pool:
                yield from pool.map(chain([first], blocks), job)

    def _collect(self, builders: Mapping[str, IndexedDatasetBuilder], start: RunState) -> RunState:
        """Write results as they come; note the progress every few seconds, and when something goes wrong."""
        budget = SkipBudget(self.settings.skip_bad, lambda bad: _log.warning("skipped %s", bad), skipped=start.skipped)
        at, noted = start, float("-inf")  # the first lines are on disk, and noted, at once
        order: deque[int] = deque()
        with (
            show_progress(self.files, self.settings.num_documents, self.settings.log_interval) as shown,
            closing(self._results(self._blocks(start, order, shown))) as results,
        ):
            try:
                for result in results:
                    file = order.popleft()
                    if isinstance(result, BadInput):
                        budget.add(result)
                        continue
                    self._tell(result)
                    for bad in result.bad:
                        budget.add(bad)
                    states = {}
                    for (key, builder), encoded in zip(builders.items(), result.keys, strict=True):
                        builder.add_documents(encoded.ids, encoded.lengths)
                        states[key] = builder.progress
                    read = at.text_bytes + result.text_bytes
                    at = RunState("", file, result.end, budget.skipped, read, states)
                    shown.written(next(iter(builders.values())).num_documents)
                    if time.monotonic() - noted > _SECONDS_BETWEEN_JOURNALS:
                        self._note(at, builders)
                        noted = time.monotonic()
            except BaseException:
                self._note_if_possible(at, builders)
                raise
        return replace(at, skipped=budget.skipped)

    def _tell(self, result: EncodedBlock) -> None:
        """Say once what tokenizes, where that is not what a user expects."""
        if self.accelerator is None and result.note:
            _log.warning(result.note)
        self.accelerator = self.accelerator or result.accelerator

    def _note(self, at: RunState, builders: Mapping[str, IndexedDatasetBuilder]) -> None:
        for builder in builders.values():
            builder.state()  # on disk first
        self.journal.write(replace(at, run=self.name))

    def _note_if_possible(self, at: RunState, builders: Mapping[str, IndexedDatasetBuilder]) -> None:
        try:
            if not at.builders:
                for builder in builders.values():
                    builder.discard()
                return
            self._note(at, builders)
            _log.warning("stopped at %s:%d; the same command goes on there", self.files[at.file], at.position.line)
        except (OSError, DataError) as error:
            _log.warning("the progress could not be noted (%s)", error)

    def _finish(self, builders: Mapping[str, IndexedDatasetBuilder], end: RunState, seconds: float) -> PreprocessReport:
        """Put the datasets in place, each with its sidecar."""
        report = PreprocessReport(
            {key: builder.num_documents for key, builder in builders.items()},
            {key: builder.num_tokens for key, builder in builders.items()},
            end.skipped,
            end.text_bytes,
            seconds,
            self.accelerator or "off",
        )
        if not any(report.documents.values()) and not self.may_be_empty:
            for builder in builders.values():
                builder.discard()
            self.journal.remove()
            raise DataError(f"the inputs hold no text under {' or '.join(self.settings.keys)}: nothing was written")
        facts = {"run": self.name, "dtype": self.dtype.name, "skipped": end.skipped, "text_bytes": end.text_bytes}
        for key, builder in builders.items():
            builder.finalize()
            write_sidecar(self.settings.prefix(key), self._sidecar(key, builder, facts))
        self.journal.remove()
        return report

    def _sidecar(self, key: str, builder: IndexedDatasetBuilder, facts: Mapping[str, object]) -> Sidecar:
        return Sidecar(
            tokenizer_type=self.settings.tokenizer.tokenizer_type,
            tokenizer_hash=self.tokenizer.content_hash,
            vocab_size=self.tokenizer.vocab_size,
            eod=self.tokenizer.eod,
            append_eod=self.settings.append_eod,
            inputs=self.files,
            settings={**self.description, **facts, "key": key},
            **builder.progress,
        )
