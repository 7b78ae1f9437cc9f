"""Settings of a preprocessing run, its identity, and its state when it is interrupted."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from neox.corpus import Filter, Position, columns_of, expand_inputs
from neox.data import BuilderState
from neox.errors import DataError
from neox.log import get_logger
from neox.storage import shown, state_of
from neox.tokenizer import Tokenizer, build_tokenizer
from neox.tokenizer.chat import ChatTemplate

_log = get_logger(__name__)
_MIB = 1 << 20
_PROCESS_MIB = 160  # memory of a process with its imports and a vocabulary of 50,000
_MEMORY_PER_BYTE = 20  # bytes of memory for each byte of text in progress: raw, lines, strings, ids and a copy of them
_MEMORY_PER_PIECE_BYTE = 130  # the same for a piece of text that a tokenizer encodes at once
_LARGEST_BLOCK = 4 * _MIB
_SMALLEST_BLOCK = 256 << 10


@dataclass(frozen=True)
class TokenizerSpec:
    """Arguments of `build_tokenizer`. Each process builds its own tokenizer from them."""

    tokenizer_type: str
    vocab_file: str | None = None
    merge_file: str | None = None
    special_in_text: bool | None = None
    added_tokens: tuple[str, ...] = ()

    def build(self) -> Tokenizer:
        """Build the tokenizer. Raises the same errors as `build_tokenizer`."""
        return build_tokenizer(
            self.tokenizer_type,
            self.vocab_file,
            self.merge_file,
            special_in_text=self.special_in_text,
            added_tokens=self.added_tokens,
        )


@dataclass(frozen=True)
class ChatSettings:
    """Settings of conversations, from which a dataset of ids and one of labels are made.

    Attributes:
        template: Chat template.
        keys: JSON key of a list of messages, or the two keys of a prompt and its answer; also paths with dots.
        role: Role whose messages are trained.
        only_last: Whether only the last message of this role is trained.
        count_all: Whether every token is trained.
        split_answers: Whether each trained answer becomes a sample: the conversation up to it, as the template renders
            that, with only this answer trained.
        date: Day that templates write as today's (`strftime_now`); None leaves the function out.
    """

    template: ChatTemplate
    keys: tuple[str, ...] = ("messages",)
    role: str = "assistant"
    only_last: bool = False
    count_all: bool = False
    split_answers: bool = False
    date: str | None = None

    @property
    def datasets(self) -> tuple[str, str]:
        """Names of the datasets of ids and of labels."""
        name = "messages"
        if len(self.keys) == 1 and self.keys[0].isidentifier():
            name = self.keys[0]
        return name, f"{name}_label"

    def as_json(self) -> dict[str, Any]:
        """Return the settings for JSON. Those that older versions had not are absent if they are off."""
        fields = {**asdict(self), "template": self.template.as_json()}
        for name in ("split_answers", "date"):
            if not fields[name]:
                del fields[name]
        return fields


@dataclass(frozen=True)
class PreferenceSettings:
    """Settings of preferences, from which datasets of answers and of labels are made.

    Attributes:
        template: Chat template; None if the tokenizer has none, which texts do not need.
        labelled: Whether a line holds one answer and says whether it is good, instead of two answers.
        seq_length: Number of tokens of a row in training, which must hold both answers; None for no limit.
        fields: Names that lines are to have (`prompt`), each with the key, path with dots or template that finds its
            value; other names are as they are.
        date: As in `ChatSettings`.
    """

    template: ChatTemplate | None = None
    labelled: bool = False
    seq_length: int | None = None
    fields: tuple[tuple[str, str], ...] = ()
    date: str | None = None

    @property
    def datasets(self) -> tuple[str, ...]:
        """Names of the datasets, most of which are gpt-neox's."""
        if self.labelled:
            return ("completion", "completion_label", "completion_reward")
        return ("chosen", "chosen_label", "rejected", "rejected_label")

    def as_json(self) -> dict[str, Any]:
        """Return the settings for JSON. Those that older versions had not are absent if they are off."""
        fields = asdict(self)
        if self.template is not None:
            fields["template"] = self.template.as_json()
        for name in ("fields", "date"):
            if not fields[name]:
                del fields[name]
        return fields


@dataclass(frozen=True)
class PreprocessSettings:
    """Settings of a run that makes `OUTPUT_PREFIX_KEY_document.{bin,idx,json}` from inputs.

    Attributes:
        inputs: Files, directories or addresses, in order.
        output_prefix: Path of the outputs without `_KEY_document`.
        tokenizer: Tokenizer of the texts.
        keys: JSON keys of texts. Each becomes a dataset. For conversations and preferences they are `datasets` of their
            settings; with `mask_before` they are the key of the texts and the name of the dataset of labels.
        append_eod: Whether each document ends with the end-of-document id.
        ftfy: Whether broken Unicode is repaired.
        sentences: Language whose rules divide documents into sentences (`en`), or `lines` for one sentence per line.
            Each sentence is one sequence. None keeps documents whole.
        impl: Layout of the datasets.
        workers: Number of processes, at most one per core; 0 means one per core.
        memory_mb: Memory of all processes together in MiB; 0 means 3 GiB, and 256 MiB for each worker.
        skip_bad: Number of bad inputs that may be skipped.
        accelerator: Name of an accelerator, one of `neox.tokenizer.accelerators.ACCELERATORS`.
        restart: Whether an interrupted run is discarded, and complete data are written again.
        num_documents: Number of documents for the progress display, if it is known.
        log_interval: Number of documents between two log lines; None writes none.
        chat: Settings of conversations; None for texts.
        preferences: Settings of preferences; None for texts and conversations.
        mask_before: Ids that mark the start of the trained part of a text: tokens up to the first occurrence of these
            ids are not trained. Empty if there are no labels.
        text_key: Path with dots or template that finds the text of the only key; None if the key itself finds it.
        filters: Conditions that a document must meet.
        split: Split of data sets that have several.
        config: Configuration of data sets of the hub that have several.
        kept_columns: Fields of documents, names or paths with dots, that are written beside the datasets.
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
    preferences: PreferenceSettings | None = None
    mask_before: tuple[int, ...] = ()
    text_key: str | None = None
    filters: tuple[Filter, ...] = ()
    split: str | None = None
    config: str | None = None
    kept_columns: tuple[str, ...] = ()

    @property
    def text_keys(self) -> tuple[str, ...]:
        """Keys that find texts: JSON keys, paths with dots, or templates."""
        if self.text_key is not None:
            return (self.text_key,)
        if self.mask_before:
            return self.keys[:1]
        return self.keys

    @property
    def label_keys(self) -> tuple[str, ...]:
        """Names of the datasets that hold labels or rewards of the tokens of another one."""
        if self.preferences is not None:
            return tuple(key for key in self.keys if key.endswith(("_label", "_reward")))
        if self.mask_before or self.chat is not None:
            return self.keys[1:]
        return ()

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Columns of tables that are read; None for all of them."""
        if self.chat is not None or self.preferences is not None:
            return None
        return columns_of((*self.text_keys, *self.kept_columns), self.filters)

    def files(self) -> tuple[str, ...]:
        """Return the paths and addresses of all inputs. Raises DataError as `expand_inputs`."""
        return expand_inputs(self.inputs, split=self.split, config=self.config)

    def prefix(self, key: str) -> str:
        """Return the prefix of the dataset of a key. The names are Megatron-LM's."""
        kind = "document" if self.sentences is None else "sentence"
        return f"{self.output_prefix}_{key}_{kind}"


@dataclass(frozen=True)
class MemoryShares:
    """Limits that keep a run within its memory.

    Attributes:
        workers: Number of processes.
        block_bytes: Size of the text that a worker gets at once.
        in_flight_bytes: Size of all text between reading and writing. A longer line is a bad input.
        piece_bytes: Size of a text that is encoded at once because it cannot be cut. A longer text is a bad input.
    """

    workers: int
    block_bytes: int
    in_flight_bytes: int
    piece_bytes: int


def share_memory(workers: int, memory_mb: int) -> MemoryShares:
    """Divide the memory of a run.

    Args:
        workers: Number of processes as in `PreprocessSettings`.
        memory_mb: Memory in MiB as in `PreprocessSettings`.

    Raises:
        DataError: If the memory is too small for the workers, or a number is negative.
    """
    if workers < 0 or memory_mb < 0:
        raise DataError(f"workers ({workers}) and memory ({memory_mb} MiB) cannot be negative")
    cores = len(os.sched_getaffinity(0))
    if workers > cores:
        _log.info("--workers %d: this process may use %d cores, so %d workers are started", workers, cores, cores)
    workers = min(workers or cores, cores)
    total = memory_mb or 3072 + 256 * workers
    processes = workers + 1
    memory_for_text = (total - _PROCESS_MIB * processes) * _MIB
    in_flight = memory_for_text // _MEMORY_PER_BYTE
    least_in_flight = _SMALLEST_BLOCK * processes
    if in_flight < least_in_flight:
        needed = _PROCESS_MIB * processes + least_in_flight * _MEMORY_PER_BYTE // _MIB + 1
        raise DataError(
            f"{total} MiB are too little for {workers} workers: give --memory-mb {needed}, or fewer --workers"
        )
    block = min(_LARGEST_BLOCK, in_flight // (2 * processes))
    return MemoryShares(
        workers=workers,
        block_bytes=max(_SMALLEST_BLOCK, block),
        in_flight_bytes=in_flight,
        piece_bytes=in_flight * _MEMORY_PER_BYTE // _MEMORY_PER_PIECE_BYTE // workers,
    )


def describe_run(settings: PreprocessSettings, files: tuple[str, ...], tokenizer_hash: str) -> Mapping[str, Any]:
    """Return everything that determines the bytes of the result, as JSON.

    Inputs are described by path, size and modification time, or the server's tag of their content.

    Args:
        settings: Settings of the run.
        files: Paths of all inputs.
        tokenizer_hash: `content_hash` of the tokenizer.
    """
    inputs = []
    for file in files:
        state = state_of(file)
        inputs.append([shown(file), state.size, state.version])
    description: dict[str, Any] = {
        "inputs": inputs,
        "keys": list(settings.keys),
        "tokenizer": tokenizer_hash,
        "special_in_text": settings.tokenizer.special_in_text,
        "append_eod": settings.append_eod,
        "ftfy": settings.ftfy,
        "impl": settings.impl,
    }
    # Newer settings are absent if they are not used, so that the fingerprints of older runs stay the same.
    if settings.chat is not None:
        description["chat"] = settings.chat.as_json()
    if settings.preferences is not None:
        description["preferences"] = settings.preferences.as_json()
    if settings.mask_before:
        description["mask_before"] = list(settings.mask_before)
    if settings.sentences is not None:
        description["sentences"] = settings.sentences
    if settings.text_key is not None:
        description["text_key"] = settings.text_key
    if settings.filters:
        description["filters"] = list(map(str, settings.filters))
    if settings.kept_columns:
        description["columns"] = list(settings.kept_columns)
    return description


def fingerprint(description: Mapping[str, Any]) -> str:
    """Return a hash of a description. It does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class RunState:
    """State of a run on disk. Everything before `position` of input number `file` is done.

    Attributes:
        file: Number of the input, from 0.
        position: Start of the next line in this input.
        skipped: Number of bad inputs skipped.
        text_bytes: Number of bytes of JSON lines read.
        builders: State of the dataset of each key.
        filtered: Number of documents that filters have left out.
        document_bytes: UTF-8 bytes of the texts of each key that became tokens; keys whose texts are not counted are
            missing.
    """

    file: int = 0
    position: Position = field(default_factory=Position)
    skipped: int = 0
    text_bytes: int = 0
    builders: Mapping[str, BuilderState] = field(default_factory=dict)
    filtered: int = 0
    document_bytes: Mapping[str, int] | None = field(default_factory=dict)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> RunState:
        """Return the state with given fields, the result of `dataclasses.asdict`."""
        counted = fields.get("document_bytes")  # a version that did not count them has begun the run
        return RunState(**{**fields, "position": Position(**fields["position"]), "document_bytes": counted})


def state_path(output_prefix: str) -> Path:
    """Return `OUTPUT_PREFIX.progress.json`."""
    return Path(f"{output_prefix}.progress.json")
