"""Preprocessing of documents to token datasets, which can be interrupted and resumed at any time."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from neox.corpus import BadInput, LineBlock, SkipBudget, first_lines, parse_texts, read_blocks
from neox.data import IndexedDatasetBuilder, best_dtype
from neox.data.token_files.columns import columns_path
from neox.data.token_files.sidecar import DOCUMENT_BYTES, Sidecar, read_sidecar, write_sidecar
from neox.errors import DataError, os_errors, refusals
from neox.log import Progress, get_logger, progress
from neox.preprocess.chat_encoder import ChatEncoder
from neox.preprocess.encode import BlockEncoder, EncodedBlock, EncodeJob, load_ftfy
from neox.preprocess.preference_encoder import PreferenceEncoder
from neox.preprocess.sentences import sentence_splitter
from neox.preprocess.settings import (
    PreprocessSettings,
    RunState,
    describe_run,
    fingerprint,
    share_memory,
    state_path,
)
from neox.resume import ResumeLog, lock_output
from neox.storage import is_remote, shown, size_of
from neox.tokenizer import HFTokenizer, Tokenizer
from neox.tokenizer.huggingface import WHOLE_TOKENIZER, tokens_beside
from neox.workers import WorkerPool, read_ahead

_log = get_logger(__name__)
_SAMPLE_BYTES = 1 << 17
_SAMPLE_CHARS = 1 << 16
_SMALL_BLOCK = 1 << 17
_LARGE_INPUT = 100_000_000  # bytes; a slow accelerator is worth a warning


@dataclass(frozen=True)
class PreprocessReport:
    """Result of a run.

    Attributes:
        documents: Number of documents of each key.
        tokens: Number of tokens of each key.
        skipped: Number of bad inputs skipped.
        text_bytes: Number of bytes of JSON lines read, after decompression.
        seconds: Duration of this run.
        accelerator: Name of the accelerator; `off` for none.
        fresh: Whether this run made the datasets. If not, an earlier run did.
        not_strict: Number of lines read by this run that are JSON for gpt-neox's parser only.
        filtered: Number of documents that filters have left out.
    """

    documents: Mapping[str, int]
    tokens: Mapping[str, int]
    skipped: int
    text_bytes: int
    seconds: float
    accelerator: str
    fresh: bool = True
    not_strict: int = 0
    filtered: int = 0

    @classmethod
    def of(
        cls,
        sidecars: Mapping[str, Sidecar],
        *,
        seconds: float,
        accelerator: str,
        fresh: bool = True,
        not_strict: int = 0,
    ) -> PreprocessReport:
        """Return the report of a run that has made datasets with given sidecars."""
        settings = next(iter(sidecars.values())).settings
        return cls(
            documents={key: sidecar.documents for key, sidecar in sidecars.items()},
            tokens={key: sidecar.tokens for key, sidecar in sidecars.items()},
            skipped=settings.get("skipped", 0),
            text_bytes=settings.get("text_bytes", 0),
            seconds=seconds,
            accelerator=accelerator,
            fresh=fresh,
            not_strict=not_strict,
            filtered=settings.get("filtered", 0),
        )


def preprocess(settings: PreprocessSettings, *, may_be_empty: bool = False) -> PreprocessReport:
    """Make the datasets of a run, or finish an interrupted run.

    The bytes are the same for any number of workers, any accelerator and any interruption. After an error the written
    data are kept, and the same settings resume the run.

    Args:
        settings: Settings of the run.
        may_be_empty: Whether inputs without text are allowed.

    Raises:
        DataError: If too many inputs are bad, the disk is full, a worker dies twice on a block, or another run writes
            the same output.
        TokenizerError: If the tokenizer cannot be built.
    """
    run = _PreprocessRun(settings, may_be_empty)
    with lock_output(settings.output_prefix):
        return run.execute()


def check_settings(settings: PreprocessSettings) -> None:
    """Raise the errors of `preprocess` that can be found before reading: missing inputs, tokenizers or packages."""
    assert _PreprocessRun(settings, may_be_empty=True).tokenizer


def finished(settings: PreprocessSettings) -> PreprocessReport | None:
    """Return the report of a complete run with the same inputs and settings; None if there is none."""
    return _PreprocessRun(settings, may_be_empty=True).finished()


class _Display:
    """Progress display, in documents if their number is known, otherwise in bytes of the inputs."""

    def __init__(self, bar: Progress, *, by_documents: bool, log_interval: int | None) -> None:
        self._bar = bar
        self._by_documents = by_documents
        self._log_interval = log_interval
        self._documents = 0
        self._logged_documents = 0
        self._started = time.monotonic()

    def read(self, size: int) -> None:
        """Count bytes read from an input."""
        if not self._by_documents:
            self._bar.update(size)

    def written(self, documents: int) -> None:
        """Show the number of documents written so far."""
        if self._by_documents:
            self._bar.update(documents - self._documents)
        self._documents = documents
        if self._log_interval and documents - self._logged_documents >= self._log_interval:
            self._logged_documents = documents
            _log.info("%d documents, %.1f documents/s", documents, documents / (time.monotonic() - self._started))


class _PreprocessRun:
    """One run.

        inputs             a line of .jsonl.zst: {"text": "To be"}
          |  _read_blocks  blocks of whole lines, with their positions                      neox.corpus
          v
        LineBlock
          |  _encode       worker processes parse and tokenize; results keep their order    encode.py, chat_encoder.py,
          v                                                                                 preference_encoder.py
        EncodedBlock       ids of all documents [1514, 307, 50256, ...], their lengths [3, ...]
          |  _collect      a builder for each key appends them, and the state is saved
          v
        PREFIX_text_document.bin, .idx
          |  _finish       the sidecar says what they are
          v
        .json              rows of training are cut from the files later (neox.data.samples)

    On disk it goes through these states; the last column is what a later run with the same settings does:

        PREFIX.*.partial                 written, but no state is saved yet             starts over
        PREFIX.*.partial, state file     interrupted: the state says where              continues there
        PREFIX.bin, .idx                 complete, but not yet described                starts over
        PREFIX.bin, .idx, .json          complete; the sidecar names the run            returns its report

    Attributes:
        settings: Settings of the run.
        may_be_empty: Whether inputs without text are allowed.
        files: Paths of all inputs.
        shares: Limits of memory.
        accelerator: Name of the accelerator; None until it is known.
        not_strict: Number of lines read so far that are JSON for gpt-neox's parser only.
        losses: What chat templates have left out so far, each with its number of lines.
    """

    def __init__(self, settings: PreprocessSettings, may_be_empty: bool) -> None:
        self.settings = settings
        self.may_be_empty = may_be_empty
        with refusals():
            _check_flags(settings)
            self.files = settings.files()
            if not self.files:
                raise DataError("no inputs: give files or directories with --input, separated by commas")
            if settings.ftfy:
                load_ftfy()
            if settings.sentences is not None:
                sentence_splitter(settings.sentences)
        self.shares = share_memory(settings.workers, settings.memory_mb)
        self.accelerator: str | None = None
        self.not_strict = 0
        self.losses: Counter[str] = Counter()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        with refusals():
            tokenizer = self.settings.tokenizer.build()
            if isinstance(tokenizer, HFTokenizer) and self.settings.tokenizer.vocab_file is not None:
                file = Path(self.settings.tokenizer.vocab_file)
                lacking = tokens_beside(file, tokenizer.backend)
                if lacking:
                    _log.warning(
                        "%s lacks %d tokens that transformers takes from the files next to it (%s), and cuts them into "
                        "pieces; if texts or templates have them, %s",
                        file,
                        len(lacking),
                        ", ".join(map(repr, lacking[:5])),
                        WHOLE_TOKENIZER,
                    )
            return tokenizer

    @cached_property
    def description(self) -> Mapping[str, Any]:
        return describe_run(self.settings, self.files, self.tokenizer.content_hash)

    @cached_property
    def name(self) -> str:
        """Fingerprint of the run. It is computed on demand, because hashing a vocabulary takes a while."""
        return fingerprint(self.description)

    @cached_property
    def log(self) -> ResumeLog[RunState]:
        return ResumeLog(state_path(self.settings.output_prefix), self.name, RunState.from_json)

    @cached_property
    def dtype(self) -> np.dtype:
        if self.settings.label_keys:
            return np.dtype(np.int32)  # labels hold IGNORED, a negative number; gpt-neox uses int32 too
        if self.settings.impl == "mmap":
            return best_dtype(self.tokenizer.vocab_size)
        return best_dtype(None)

    def execute(self) -> PreprocessReport:
        """Make the datasets, unless they are complete, and return the report."""
        started = time.monotonic()
        if not self.settings.restart:
            report = self.finished()
            if report is not None:
                return report
            with refusals():
                self._check_existing()
        try:
            with refusals(), os_errors(DataError, f"{self.settings.output_prefix} cannot be written"):
                state, builders = self._open_builders()
            state = self._collect(builders, state)
            return self._finish(builders, state, started)
        except OSError as error:
            path = error.filename or self.settings.output_prefix
            raise DataError(f"{path} cannot be written: {error.strerror}") from error

    def finished(self) -> PreprocessReport | None:
        """Return the report of a complete run with the same inputs and settings; None if there is none."""
        sidecars: dict[str, Sidecar] = {}
        for key in self.settings.keys:
            prefix = self.settings.prefix(key)
            sidecar = read_sidecar(prefix)
            if sidecar is None or not Path(f"{prefix}.idx").exists():
                return None
            if sidecar.settings.get("run") != self.name:
                return None
            if sidecar.settings.get("skipped", 0) > self.settings.skip_bad:
                return None
            if self.settings.kept_columns and not columns_path(prefix).exists():
                return None
            sidecars[key] = sidecar
        return PreprocessReport.of(sidecars, seconds=0.0, accelerator=self.settings.accelerator, fresh=False)

    def _check_existing(self) -> None:
        """Warn if complete data, which runs may read, is replaced. Raises DataError if it is of other inputs or ids."""
        for key in self.settings.keys:
            prefix = self.settings.prefix(key)
            sidecar = read_sidecar(prefix)
            if sidecar is None or not Path(f"{prefix}.idx").exists():
                continue
            if sidecar.tokenizer_hash != self.tokenizer.content_hash:
                raise DataError(
                    f"{prefix} holds data of another tokenizer ({sidecar.tokenizer_type}, {sidecar.vocab_size:,} ids): "
                    "name another --output-prefix, or replace it with --restart"
                )
            contents = f"{prefix} holds {sidecar.documents:,} documents of {', '.join(sidecar.inputs)}"
            if not set(sidecar.inputs) & set(map(shown, self.files)):
                raise DataError(f"{contents}: name another --output-prefix, or replace them with --restart")
            _log.warning(
                "%s, or was made with other settings: it is replaced, and runs that were trained on it continue "
                "with other data",
                contents,
            )

    def _open_builders(self) -> tuple[RunState, dict[str, IndexedDatasetBuilder]]:
        """Return the state of an interrupted run and the builders that continue it, or a new state and new builders."""
        state = None
        # A state needs the name of the run, whose vocabulary is hashed for it: not without a file.
        if not self.settings.restart and state_path(self.settings.output_prefix).exists():
            state = self.log.read()
        if state is not None:
            try:
                builders = self._builders(state)
            except DataError as error:
                _log.warning("the interrupted run cannot be resumed (%s): starting over", error)
            else:
                _log.info("resuming at %s:%d", self.files[state.file], state.position.line)
                return state, builders
        state = RunState()
        return state, self._builders(state)

    def _builders(self, state: RunState) -> dict[str, IndexedDatasetBuilder]:
        """Return the builder of each key in the given state. Raises DataError if the partial files hold less."""
        builders = {}
        for key in self.settings.keys:
            builders[key] = IndexedDatasetBuilder(
                self.settings.prefix(key),
                self.dtype,
                impl=self.settings.impl,
                resume=state.builders.get(key),
                sentences=self.settings.sentences is not None,
                columns=bool(self.settings.kept_columns),
            )
        return builders

    def _read_blocks(
        self, start: RunState, file_numbers: deque[int], display: _Display
    ) -> Iterator[LineBlock | BadInput]:
        """Yield the blocks of all inputs from a state on.

        Args:
            start: State from which to read.
            file_numbers: Queue to which the number of the input of each block is appended.
            display: Display that counts the bytes.
        """
        for number in range(start.file, len(self.files)):
            blocks = read_blocks(
                self.files[number],
                block_bytes=self.shares.block_bytes,
                max_line_bytes=self.shares.in_flight_bytes,
                start=start.position if number == start.file else None,
                consumed=display.read,
                filters=self.settings.filters,
                columns=self.settings.columns,
            )
            for block in blocks:
                file_numbers.append(number)
                yield block

    def _encode(self, blocks: Iterator[LineBlock | BadInput]) -> Generator[EncodedBlock | BadInput]:
        """Encode blocks in order.

        If the first block is small, it is encoded in this process by the tokenizer itself. Its ids are on disk before
        workers have started and loaded an accelerator.
        """
        job = EncodeJob(self.settings, self.dtype.str, tuple(self._sample()), self.shares.piece_bytes)
        first = next(blocks, None)
        may_encode_here = self.settings.accelerator in ("auto", "off")
        if isinstance(first, LineBlock) and may_encode_here and len(first.data) <= _SMALL_BLOCK:
            settings = replace(self.settings, accelerator="off")
            encoder = build_encoder(replace(job, settings=settings), self.tokenizer)
            yield replace(encoder.encode(first), accelerator=None)
            first = next(blocks, None)
        if first is None:
            return
        items = read_ahead(chain([first], blocks))
        with WorkerPool(EncodeWork(job), self.shares.workers, name=lines_of) as pool:
            for _, result in pool.map(items, limit=self.shares.in_flight_bytes, size=text_size):
                yield result

    def _sample(self) -> list[str]:
        """Return the first texts of the first input, with which an accelerator is checked."""
        if self.settings.chat is not None or self.settings.preferences is not None:
            return []
        block = first_lines(self.files[0], _SAMPLE_BYTES, filters=self.settings.filters, columns=self.settings.columns)
        if block is None:
            return []
        sample: list[str] = []
        characters = 0
        for text in chain.from_iterable(parse_texts(block, self.settings.text_keys).columns):
            characters += len(text)
            if characters > _SAMPLE_CHARS:
                break
            sample.append(text)
        return sample

    def _collect(self, builders: Mapping[str, IndexedDatasetBuilder], start: RunState) -> RunState:
        """Read, encode and write everything from a state on. The state is saved every few seconds and after an error.

        Args:
            builders: Builder of each key.
            start: State of the builders.

        Returns:
            State at the end.
        """
        budget = SkipBudget(self.settings.skip_bad, lambda bad: _log.warning("skipped %s", bad), skipped=start.skipped)
        state = start
        file_numbers: deque[int] = deque()  # of the blocks that are read and not yet written; results keep their order
        input_bytes = sum(map(size_of, self.files))
        documents = self.settings.num_documents
        total = documents or input_bytes
        with progress("tokenizing", total, "documents" if documents else "B") as bar:
            display = _Display(bar, by_documents=bool(documents), log_interval=self.settings.log_interval)
            with closing(self._encode(self._read_blocks(start, file_numbers, display))) as results:
                try:
                    for result in results:
                        file_number = file_numbers.popleft()
                        if isinstance(result, BadInput):
                            budget.add(result)
                            continue
                        for bad in result.bad:
                            budget.add(bad)
                        self.not_strict += result.not_strict
                        self.losses.update(result.losses)
                        if self.accelerator is None and result.note and input_bytes >= _LARGE_INPUT:
                            _log.warning(result.note)  # the accelerator is slow or not there
                        self.accelerator = self.accelerator or result.accelerator
                        written = {}
                        counted = None if state.document_bytes is None else dict(state.document_bytes)
                        for (key, builder), encoded in zip(builders.items(), result.keys, strict=True):
                            builder.add_documents(encoded.ids, encoded.lengths, encoded.counts, encoded.metadata)
                            written[key] = builder.progress
                            if counted is not None and encoded.document_bytes is not None:
                                counted[key] = counted.get(key, 0) + encoded.document_bytes
                        state = RunState(
                            file=file_number,
                            position=result.end,
                            skipped=budget.skipped,
                            text_bytes=state.text_bytes + result.text_bytes,
                            builders=written,
                            filtered=state.filtered + result.filtered,
                            document_bytes=counted,
                        )
                        display.written(builders[self.settings.keys[0]].num_documents)
                        if self.log.is_due:
                            self._save_state(state, builders)
                except BaseException:
                    self._save_last_state(state, builders)
                    raise
        return replace(state, skipped=budget.skipped)

    def _save_state(self, state: RunState, builders: Mapping[str, IndexedDatasetBuilder]) -> None:
        for builder in builders.values():
            builder.state()  # waits until the data are on disk
        self.log.write(state)

    def _save_last_state(self, state: RunState, builders: Mapping[str, IndexedDatasetBuilder]) -> None:
        """Save the state after an error, if possible. If nothing was written, remove the partial files."""
        try:
            if not state.builders:
                for builder in builders.values():
                    builder.discard()
                return
            self._save_state(state, builders)
            file = self.files[state.file]
            _log.warning("stopped at %s:%d: the same command resumes there", file, state.position.line)
        except (OSError, DataError) as error:
            _log.warning("the state of the run could not be written (%s)", error)

    def _finish(
        self, builders: Mapping[str, IndexedDatasetBuilder], state: RunState, started: float
    ) -> PreprocessReport:
        """Complete the datasets and write their sidecars. Raises DataError if the inputs hold no text."""
        is_empty = not any(builder.num_documents for builder in builders.values())
        if is_empty and not self.may_be_empty:
            for builder in builders.values():
                builder.discard()
            self.log.remove()
            keys = self.settings.text_keys
            if self.settings.chat is not None:
                keys = self.settings.chat.keys
            raise DataError(f"the inputs hold no text under {' or '.join(keys)}: nothing was written")
        seconds = time.monotonic() - started
        sidecars = {}
        for key, builder in builders.items():
            details = {
                **self.description,
                "run": self.name,
                "dtype": self.dtype.name,
                "skipped": state.skipped,
                "text_bytes": state.text_bytes,
                "key": key,
            }
            if self.settings.filters:
                details["filtered"] = state.filtered
            if state.document_bytes is not None and key in state.document_bytes:
                details[DOCUMENT_BYTES] = state.document_bytes[key]
            if key in self.settings.label_keys:
                details["labels"] = True
            details.update(builder.columns_state)
            sidecars[key] = Sidecar(
                tokenizer_type=self.settings.tokenizer.tokenizer_type,
                tokenizer_hash=self.tokenizer.content_hash,
                vocab_size=self.tokenizer.vocab_size,
                eod=self.tokenizer.eod,
                append_eod=self.settings.append_eod,
                inputs=tuple(map(shown, self.files)),
                settings=details,
                **builder.totals,
            )
            builder.finalize()
            write_sidecar(self.settings.prefix(key), sidecars[key])  # last: a dataset with a sidecar is complete
        self.log.remove()
        plain_texts = self.settings.chat is None and self.settings.preferences is None
        if plain_texts and self.settings.append_eod and self.tokenizer.after_text[-1:] == (self.tokenizer.eod,):
            _log.warning(
                "each document ends twice, as in gpt-neox: the tokenizer writes its end after a text, and --append-eod "
                "another one; leave --append-eod out and use --restart for one end"
            )
        for loss, lines in self.losses.items():
            _log.warning("%s lines lose %s; what is left out is not trained", f"{lines:,}", loss)
        accelerator = self.accelerator or "off"
        return PreprocessReport.of(sidecars, seconds=seconds, accelerator=accelerator, not_strict=self.not_strict)


def _check_flags(settings: PreprocessSettings) -> None:
    """Raise DataError for flags that do not go together."""
    if len(set(settings.keys)) != len(settings.keys) or not settings.keys:
        raise DataError(f"--jsonl-keys {' '.join(settings.keys)}: give at least one key, and each key once")
    if is_remote(settings.output_prefix):
        raise DataError(f"--output-prefix {settings.output_prefix}: token files are written on this machine; copy them")
    if settings.text_key is not None and len(settings.keys) - bool(settings.mask_before) != 1:
        raise DataError("--text-key finds the text of one key: give one with --jsonl-keys, which names the dataset")
    if settings.mask_before and len(settings.keys) != 2:
        raise DataError("--mask-before-token writes labels of one key: give one with --jsonl-keys")
    if settings.sentences is None:
        return
    if settings.append_eod:
        raise DataError("--append-eod is for whole documents, not for sentences; leave it out")
    if settings.mask_before:
        raise DataError("--mask-before-token is for whole documents, not for sentences; leave it out")


@dataclass(frozen=True)
class EncodeWork:
    """Function that encodes a block, for a `WorkerPool`. Each process builds its encoder for its first block."""

    job: EncodeJob

    def __call__(self, item: LineBlock | BadInput) -> EncodedBlock | BadInput:
        """Return the encoded block. A bad input is returned unchanged, so that it keeps its place in the order."""
        if isinstance(item, BadInput):
            return item
        return self.encoder.encode(item)

    @cached_property
    def encoder(self) -> BlockEncoder | ChatEncoder | PreferenceEncoder:
        """Encoder of this process."""
        return build_encoder(self.job)


def build_encoder(job: EncodeJob, tokenizer: Tokenizer | None = None) -> BlockEncoder | ChatEncoder | PreferenceEncoder:
    """Return the encoder of texts, conversations or preferences. Arguments and errors are those of the encoders."""
    settings = job.settings
    if settings.chat is not None:
        return ChatEncoder(job, settings.chat, tokenizer)
    if settings.preferences is not None:
        return PreferenceEncoder(job, settings.preferences, tokenizer)
    return BlockEncoder(job, tokenizer)


def text_size(item: LineBlock | BadInput) -> int:
    """Return the number of bytes of text in an item."""
    if isinstance(item, BadInput):
        return 0
    return len(item.data)


def lines_of(item: LineBlock | BadInput) -> str:
    """Return the name of an item in messages: its file and lines."""
    if isinstance(item, BadInput):
        return str(item)
    return f"{item.file}:{item.start.line} to line {item.end.line - 1}"
