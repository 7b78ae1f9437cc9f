"""Settings of a preprocessing run, its identity, and the state from which it resumes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from neox.corpus import Position
from neox.data import BuilderState
from neox.errors import DataError
from neox.log import get_logger
from neox.tokenizer import Tokenizer, build_tokenizer
from neox.tokenizer.chat import ChatTemplate

_log = get_logger(__name__)
_MIB = 1 << 20
_PROCESS_MIB = 160  # a process with its imports and a vocabulary of 50,000
_COPIES = 20  # bytes of memory per byte of text in progress: raw, lines, strings, ids, ids again
_COPIES_OF_A_PIECE = 130  # the same, for a piece of text that a tokenizer encodes at once
_LARGEST_BLOCK = 4 * _MIB
_SMALLEST_BLOCK = 256 << 10


@dataclass(frozen=True)
class TokenizerSpec:
    """Arguments of `build_tokenizer`, so that each process builds its own tokenizer."""

    tokenizer_type: str
    vocab_file: str | None = None
    merge_file: str | None = None
    special_in_text: bool | None = None

    def build(self) -> Tokenizer:
        """Build the tokenizer. Raises TokenizerError as `build_tokenizer`."""
        return build_tokenizer(
            self.tokenizer_type, self.vocab_file, self.merge_file, special_in_text=self.special_in_text
        )


@dataclass(frozen=True)
class ChatSettings:
    """Settings of conversations, which make a dataset of ids and one of labels.

    Attributes:
        template: The chat template.
        keys: JSON key of a list of messages, or those of a prompt and of its answer.
        role: Whose messages are counted.
        only_last: Whether only the last of them is.
        count_all: Whether every token is.
    """

    template: ChatTemplate
    keys: tuple[str, ...] = ("messages",)
    role: str = "assistant"
    only_last: bool = False
    count_all: bool = False

    @property
    def datasets(self) -> tuple[str, str]:
        """Names of the datasets of ids and of labels, in place of the JSON keys of texts."""
        name = self.keys[0] if len(self.keys) == 1 else "text"
        return name, f"{name}_label"


@dataclass(frozen=True)
class PreprocessSettings:
    """Settings of a run from inputs to `OUTPUT_PREFIX_KEY_document.{bin,idx,json}`.

    Attributes:
        inputs: Files or directories, in order.
        output_prefix: Path of the outputs without `_KEY_document`.
        tokenizer: The tokenizer.
        keys: JSON keys of texts; each makes a dataset.
        append_eod: Whether to end each document with the end-of-document id.
        ftfy: Whether to repair broken Unicode.
        sentences: How documents are split into sentences, one sequence each: by the rules of a language (`en`), or
            `lines` for one sentence a line; None keeps documents whole.
        impl: Layout of the datasets.
        workers: Processes, at most one for each core; 0 means one for each core.
        memory_mb: Memory of all processes in MiB; 0 means 3 GiB and 256 MiB for each worker.
        skip_bad: Number of bad inputs that may be skipped.
        accelerator: One of `neox.tokenizer.flat.ACCELERATORS`.
        restart: Whether to discard an interrupted run, and to write complete data again.
        num_documents: Number of documents, if known, for the progress display.
        log_interval: Documents between two log lines; None writes none.
        chat: Settings of conversations, where `keys` are their `datasets`; None for texts.
        mask_before: Ids after whose first occurrence a text is counted in the loss; then `keys` are the key of texts
            and the name of the dataset of labels. Empty for no labels.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerSpec
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    ftfy: bool = False
    sentences: str | None = None
    impl: Literal["mmap", "cached", "lazy"] = "mmap"
    workers: int = 0
    memory_mb: int = 0
    skip_bad: int = 0
    accelerator: str = "auto"
    restart: bool = False
    num_documents: int | None = None
    log_interval: int | None = None
    chat: ChatSettings | None = None
    mask_before: tuple[int, ...] = ()

    @property
    def text_keys(self) -> tuple[str, ...]:
        """JSON keys of texts."""
        return self.keys[:1] if self.mask_before else self.keys

    @property
    def label_key(self) -> str | None:
        """Name of the dataset of labels; None if there is none."""
        return self.keys[1] if self.mask_before or self.chat is not None else None

    def prefix(self, key: str) -> str:
        """Return the prefix of the dataset of a key, as Megatron-LM names it."""
        return f"{self.output_prefix}_{key}_{'document' if self.sentences is None else 'sentence'}"


@dataclass(frozen=True)
class MemoryShares:
    """Limits that keep a run within its memory.

    Attributes:
        workers: Number of processes.
        block_bytes: Text given to a worker at once.
        in_flight_bytes: Text between reading and writing; a longer line is a bad input.
        piece_bytes: Text that a tokenizer encodes at once because it cannot be cut; a longer one is a bad input.
    """

    workers: int
    block_bytes: int
    in_flight_bytes: int
    piece_bytes: int


def share_memory(workers: int, memory_mb: int) -> MemoryShares:
    """Divide the memory of `PreprocessSettings`. Raises DataError if it is too small for the workers."""
    if workers < 0 or memory_mb < 0:
        raise DataError(f"workers ({workers}) and memory ({memory_mb} MiB) cannot be negative")
    cores = len(os.sched_getaffinity(0))
    if workers > cores:
        _log.info("--workers %d: this process may use %d cores, so %d workers are started", workers, cores, cores)
    workers = min(workers or cores, cores)
    total = memory_mb or 3072 + 256 * workers
    in_flight = (total - _PROCESS_MIB * (workers + 1)) * _MIB // _COPIES
    if in_flight < _SMALLEST_BLOCK * (workers + 1):
        need = _PROCESS_MIB * (workers + 1) + _SMALLEST_BLOCK * (workers + 1) * _COPIES // _MIB + 1
        raise DataError(
            f"{total} MiB are too little for {workers} workers: give --memory-mb {need}, or fewer --workers"
        )
    block = min(_LARGEST_BLOCK, in_flight // (2 * workers + 2))
    piece = in_flight * _COPIES // _COPIES_OF_A_PIECE // workers
    return MemoryShares(workers, max(_SMALLEST_BLOCK, block), in_flight, piece)


def describe_run(settings: PreprocessSettings, files: tuple[str, ...], tokenizer_hash: str) -> Mapping[str, Any]:
    """Return everything that determines the result's bytes, as JSON; inputs by path, size and modification time."""
    # absent where they are not used, so that the names of older runs stay the same
    labels: dict[str, Any] = {} if settings.chat is None else {"chat": asdict(settings.chat)}
    if settings.mask_before:
        labels["mask_before"] = list(settings.mask_before)
    sentences = {} if settings.sentences is None else {"sentences": settings.sentences}
    return {
        **labels,
        "inputs": [[file, Path(file).stat().st_size, Path(file).stat().st_mtime_ns] for file in files],
        "keys": list(settings.keys),
        "tokenizer": tokenizer_hash,
        "special_in_text": settings.tokenizer.special_in_text,
        "append_eod": settings.append_eod,
        "ftfy": settings.ftfy,
        "impl": settings.impl,
        **sentences,
    }


def fingerprint(description: Mapping[str, Any]) -> str:
    """Return a hash of a description; equal runs have equal ones."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class RunState:
    """State of a run on disk: everything before `position` of input number `file` is done.

    Attributes:
        file: Number of the input.
        position: Line of the input.
        skipped: Bad inputs skipped.
        text_bytes: Bytes of text read.
        builders: State of the dataset of each key.
    """

    file: int = 0
    position: Position = field(default_factory=Position)
    skipped: int = 0
    text_bytes: int = 0
    builders: Mapping[str, BuilderState] = field(default_factory=dict)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> RunState:
        """Return the state with these fields, as `dataclasses.asdict` makes them."""
        return RunState(**{**fields, "position": Position(**fields["position"])})


def state_path(output_prefix: str) -> Path:
    """Return `OUTPUT_PREFIX.progress.json`."""
    return Path(f"{output_prefix}.progress.json")
