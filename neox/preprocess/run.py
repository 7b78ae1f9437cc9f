"""Preprocessing of documents to token datasets, resumable after any interruption."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
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
from neox.log import Progress, get_logger, progress
from neox.preprocess.encode import EncodedBlock, EncodeJob, load_ftfy
from neox.preprocess.sentences import sentence_splitter
from neox.preprocess.settings import (
    PreprocessSettings,
    RunState,
    describe_run,
    fingerprint,
    share_memory,
    state_path,
)
from neox.preprocess.work import EncodeWork, build_encoder, lines_of, text_size
from neox.resume import ResumeLog, only_run
from neox.tokenizer import Tokenizer
from neox.workers import WorkerPool, read_ahead

_log = get_logger(__name__)
_SAMPLE_BYTES = 1 << 17
_SMALL_BLOCK = 1 << 17
_SAMPLE_CHARS = 1 << 16


@dataclass(frozen=True)
class PreprocessReport:
    """Result of a run.

    Attributes:
        documents: Number of documents of each key.
        tokens: Number of tokens of each key.
        skipped: Bad inputs skipped.
        text_bytes: Decompressed JSON lines read.
        seconds: Duration of this run.
        accelerator: Accelerator used, `off` for none.
        fresh: False if an earlier run had made everything.
        not_strict: Lines read in this run that are JSON for gpt-neox's parser only.
    """

    documents: Mapping[str, int]
    tokens: Mapping[str, int]
    skipped: int
    text_bytes: int
    seconds: float
    accelerator: str
    fresh: bool = True
    not_strict: int = 0


def preprocess(settings: PreprocessSettings, *, may_be_empty: bool = False) -> PreprocessReport:
    """Make the datasets of a run, or finish an interrupted one.

    The bytes are the same for any number of workers, any accelerator and any interruption. After an error the data
    written are kept, and the same settings resume the run.

    Args:
        settings: Settings of the run.
        may_be_empty: Whether inputs without text are allowed.

    Raises:
        DataError: If too many inputs are bad, the disk is full, a worker dies twice on a block, or another run writes
            the same output.
        TokenizerError: If the tokenizer cannot be built.
    """
    run = _Run(settings, may_be_empty)
    with only_run(settings.output_prefix):
        return run.go()


def check_settings(settings: PreprocessSettings) -> None:
    """Raise what `preprocess` would raise before it reads: for missing inputs, tokenizers or packages."""
    assert _Run(settings, may_be_empty=True).tokenizer


def finished(settings: PreprocessSettings) -> PreprocessReport | None:
    """Return the report of an equal, complete run; None if there is none."""
    return _Run(settings, may_be_empty=True).finished()


class _Display:
    """Progress display, by bytes of the inputs or, where their number is known, by documents."""

    def __init__(self, bar: Progress, *, by_documents: bool, log_interval: int | None) -> None:
        self._bar, self._by_documents, self._interval = bar, by_documents, log_interval
        self._documents = self._logged = 0
        self._started = time.monotonic()

    def read(self, size: int) -> None:
        """Count bytes read from an input."""
        if not self._by_documents:
            self._bar.update(size)

    def written(self, documents: int) -> None:
        """Show that so many documents are written in all."""
        if self._by_documents:
            self._bar.update(documents - self._documents)
        self._documents = documents
        if self._interval and documents - self._logged >= self._interval:
            self._logged = documents
            _log.info("%d documents, %.1f documents/s", documents, documents / (time.monotonic() - self._started))


class _Run:
    """One run: its settings and everything derived from them."""

    def __init__(self, settings: PreprocessSettings, may_be_empty: bool) -> None:
        if len(set(settings.keys)) != len(settings.keys) or not settings.keys:
            raise DataError(f"--jsonl-keys {' '.join(settings.keys)}: give at least one key, and each key once")
        if settings.mask_before and len(settings.keys) != 2:
            raise DataError("--mask-before-token writes labels of one key: give one with --jsonl-keys")
        self.settings, self.may_be_empty = settings, may_be_empty
        self.files = expand_inputs(settings.inputs)
        if not self.files:
            raise DataError("no inputs: give files or directories with --input, separated by commas")
        if settings.ftfy:
            load_ftfy()
        if settings.sentences is not None:
            for flag, value in (("--append-eod", settings.append_eod), ("--mask-before-token", settings.mask_before)):
                if value:
                    raise DataError(f"{flag} is for whole documents, not for sentences; leave it out")
            sentence_splitter(settings.sentences)
        self.shares = share_memory(settings.workers, settings.memory_mb)
        self.accelerator: str | None = None
        self.not_strict = 0

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.settings.tokenizer.build()

    @cached_property
    def description(self) -> Mapping[str, Any]:
        return describe_run(self.settings, self.files, self.tokenizer.content_hash)

    @cached_property
    def name(self) -> str:
        """Fingerprint of the run; hashing a vocabulary takes a while, so that it is computed on demand."""
        return fingerprint(self.description)

    @cached_property
    def log(self) -> ResumeLog[RunState]:
        return ResumeLog(state_path(self.settings.output_prefix), self.name, RunState.from_json)

    @cached_property
    def dtype(self) -> np.dtype:
        if self.settings.label_key is not None:
            return np.dtype(np.int32)  # of labels too, which hold IGNORED; as gpt-neox's
        return best_dtype(self.tokenizer.vocab_size if self.settings.impl == "mmap" else None)

    def go(self) -> PreprocessReport:
        started = time.monotonic()
        if not self.settings.restart and (done := self.finished()) is not None:
            return done
        try:
            so_far, builders = self._open()
            end = self._collect(builders, so_far)
            return self._finish(builders, end, time.monotonic() - started)
        except OSError as error:
            raise DataError(
                f"{error.filename or self.settings.output_prefix} cannot be written: {error.strerror}"
            ) from error

    def finished(self) -> PreprocessReport | None:
        """Return the report of an equal, complete run; None if there is none."""
        made: dict[str, Sidecar] = {}
        for key in self.settings.keys:
            prefix = self.settings.prefix(key)
            sidecar = read_sidecar(prefix)
            if sidecar is None or not Path(f"{prefix}.idx").exists():
                return None
            if sidecar.settings.get("run") != self.name or sidecar.settings.get("skipped", 0) > self.settings.skip_bad:
                return None
            made[key] = sidecar
        first = made[self.settings.keys[0]].settings
        return PreprocessReport(
            {key: sidecar.documents for key, sidecar in made.items()},
            {key: sidecar.tokens for key, sidecar in made.items()},
            first.get("skipped", 0),
            first.get("text_bytes", 0),
            0.0,
            self.settings.accelerator,
            fresh=False,
        )

    def _sample(self) -> list[str]:
        """Return the first texts of the first input, to check an accelerator with; errors in it are reported later."""
        block = None if self.settings.chat is not None else first_lines(self.files[0], _SAMPLE_BYTES)
        texts = (
            [text for column in parse_texts(block, self.settings.text_keys).columns for text in column] if block else []
        )
        lengths = accumulate(len(text) for text in texts)
        return [text for text, length in zip(texts, lengths, strict=True) if length <= _SAMPLE_CHARS]

    def _open(self) -> tuple[RunState, dict[str, IndexedDatasetBuilder]]:
        """Open the datasets in the state of an interrupted run, or new ones."""
        so_far = None
        if state_path(self.settings.output_prefix).exists() and not self.settings.restart:
            so_far = self.log.read()
        if so_far is not None:
            try:
                builders = {key: self._builder(key, so_far.builders[key]) for key in self.settings.keys}
            except DataError as error:
                _log.warning("the interrupted run cannot be resumed (%s): starting over", error)
            else:
                _log.info("resuming at %s:%d", self.files[so_far.file], so_far.position.line)
                return so_far, builders
        return RunState(), {key: self._builder(key, None) for key in self.settings.keys}

    def _builder(self, key: str, state: BuilderState | None) -> IndexedDatasetBuilder:
        sentences = self.settings.sentences is not None
        return IndexedDatasetBuilder(
            self.settings.prefix(key), self.dtype, impl=self.settings.impl, resume=state, sentences=sentences
        )

    def _blocks(self, start: RunState, order: deque[int], display: _Display) -> Iterator[LineBlock | BadInput]:
        """Read every input from `start` on; the number of each item's input is appended to `order`."""
        for number in range(start.file, len(self.files)):
            for item in read_blocks(
                self.files[number],
                block_bytes=self.shares.block_bytes,
                max_line_bytes=self.shares.in_flight_bytes,
                start=start.position if number == start.file else None,
                consumed=display.read,
            ):
                order.append(number)
                yield item

    def _results(self, blocks: Iterator[LineBlock | BadInput]) -> Generator[EncodedBlock | BadInput]:
        """Encode blocks in order.

        A small first block is encoded here, by the tokenizer itself: its ids are on disk before workers have started
        and loaded an accelerator.
        """
        job = EncodeJob(self.settings, self.dtype.str, tuple(self._sample()), self.shares.piece_bytes)
        first, accelerator = next(blocks, None), self.settings.accelerator
        if isinstance(first, LineBlock) and len(first.data) <= _SMALL_BLOCK and accelerator in ("auto", "off"):
            plain = replace(self.settings, accelerator="off")
            encoder = build_encoder(replace(job, settings=plain), self.tokenizer)
            yield replace(encoder.encode(first), accelerator=None)
            first = next(blocks, None)
        if first is not None:
            items = read_ahead(chain([first], blocks))
            with WorkerPool(EncodeWork(job), self.shares.workers, name=lines_of) as pool:
                for _, result in pool.map(items, limit=self.shares.in_flight_bytes, size=text_size):
                    yield result

    def _collect(self, builders: Mapping[str, IndexedDatasetBuilder], start: RunState) -> RunState:
        """Write results as they come, and the state every few seconds and after an error."""
        budget = SkipBudget(self.settings.skip_bad, lambda bad: _log.warning("skipped %s", bad), skipped=start.skipped)
        at = start
        order: deque[int] = deque()
        documents = self.settings.num_documents
        total = documents or sum(os.path.getsize(file) for file in self.files)
        with progress("tokenizing", total, "documents" if documents else "B") as bar:
            display = _Display(bar, by_documents=bool(documents), log_interval=self.settings.log_interval)
            with closing(self._results(self._blocks(start, order, display))) as results:
                try:
                    for result in results:
                        file = order.popleft()
                        if isinstance(result, BadInput):
                            budget.add(result)
                            continue
                        if self.accelerator is None and result.note:
                            _log.warning(result.note)
                        self.accelerator = self.accelerator or result.accelerator
                        self.not_strict += result.not_strict
                        for bad in result.bad:
                            budget.add(bad)
                        states = {}
                        for (key, builder), encoded in zip(builders.items(), result.keys, strict=True):
                            builder.add_documents(encoded.ids, encoded.lengths, encoded.counts)
                            states[key] = builder.progress
                        read = at.text_bytes + result.text_bytes
                        at = RunState(file, result.end, budget.skipped, read, states)
                        display.written(next(iter(builders.values())).num_documents)
                        if self.log.is_due:
                            self._write_state(at, builders)
                except BaseException:
                    self._write_last_state(at, builders)
                    raise
        return replace(at, skipped=budget.skipped)

    def _write_state(self, at: RunState, builders: Mapping[str, IndexedDatasetBuilder]) -> None:
        for builder in builders.values():
            builder.state()  # the data must be on disk first
        self.log.write(at)

    def _write_last_state(self, at: RunState, builders: Mapping[str, IndexedDatasetBuilder]) -> None:
        """Write the state after an error, if possible; without data, remove the partial files."""
        try:
            if not at.builders:
                for builder in builders.values():
                    builder.discard()
                return
            self._write_state(at, builders)
            _log.warning("stopped at %s:%d: the same command resumes there", self.files[at.file], at.position.line)
        except (OSError, DataError) as error:
            _log.warning("the state of the run could not be written (%s)", error)

    def _finish(self, builders: Mapping[str, IndexedDatasetBuilder], end: RunState, seconds: float) -> PreprocessReport:
        """Finalize the datasets and write their sidecars."""
        report = PreprocessReport(
            {key: builder.num_documents for key, builder in builders.items()},
            {key: builder.num_tokens for key, builder in builders.items()},
            end.skipped,
            end.text_bytes,
            seconds,
            self.accelerator or "off",
            not_strict=self.not_strict,
        )
        if not any(report.documents.values()) and not self.may_be_empty:
            for builder in builders.values():
                builder.discard()
            self.log.remove()
            keys = self.settings.text_keys if self.settings.chat is None else self.settings.chat.keys
            raise DataError(f"the inputs hold no text under {' or '.join(keys)}: nothing was written")
        result = {"run": self.name, "dtype": self.dtype.name, "skipped": end.skipped, "text_bytes": end.text_bytes}
        for key, builder in builders.items():
            builder.finalize()
            write_sidecar(self.settings.prefix(key), self._sidecar(key, builder, result))
        self.log.remove()
        return report

    def _sidecar(self, key: str, builder: IndexedDatasetBuilder, result: Mapping[str, object]) -> Sidecar:
        labels = {"labels": True} if key == self.settings.label_key else {}
        return Sidecar(
            tokenizer_type=self.settings.tokenizer.tokenizer_type,
            tokenizer_hash=self.tokenizer.content_hash,
            vocab_size=self.tokenizer.vocab_size,
            eod=self.tokenizer.eod,
            append_eod=self.settings.append_eod,
            inputs=self.files,
            settings={**self.description, **result, "key": key, **labels},
            **builder.totals,
        )
