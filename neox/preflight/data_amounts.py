"""Amounts of training data, which the plan compares with what a run reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from neox.config import NeoXConfig
from neox.config.sections.data import DataConfig, split_shares
from neox.errors import ConfigError, DataError
from neox.plan import DataAmounts
from neox.problems import Problem
from neox.storage import is_remote

if TYPE_CHECKING:
    from neox.data.pass_amounts import ReadDocuments
    from neox.data.token_files.indexed_dataset import IndexedDataset

_LIMIT = "max_lost_labels"
_TokenSet = tuple[str, str | None]
"""Prefix of a dataset, with that of its labels, if it has any."""


@dataclass(frozen=True)
class ReadAmounts:
    """Amounts of data that a run's files hold.

    Attributes:
        amounts: What the plan compares with what the run reads.
        notes: Notes on padding, and on documents that samples cut or leave out.
        problems: Labels that lose too many tokens.
    """

    amounts: DataAmounts
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def read_amounts(config: NeoXConfig) -> ReadAmounts:
    """Read the amounts of training and validation data. Data that cannot be read has none; `data_problems` says why."""
    data = config.data
    epoch = _epoch_samples(config)
    if config.preferences.on_preferences:
        return ReadAmounts(DataAmounts(epoch_samples=epoch, pair_rows=_rows_of_pairs(config)))
    validation = validation_tokens(config)
    if data.weight_by_num_documents or config.training.train_iters is None:
        return ReadAmounts(DataAmounts(epoch_samples=epoch, validation_tokens=validation))
    read = _read_documents(config)
    amounts = DataAmounts(
        epoch_samples=epoch,
        dataset_tokens=training_tokens(config),
        pass_tokens=_tokens_of_passes(config, read),
        validation_tokens=validation,
    )
    cuts, problems = _truncation(config, read)
    evaluated, _ = _truncation(config, _read_conversations(config), use="evaluated")
    return ReadAmounts(amounts, (*_packing_notes(config, read), *cuts, *evaluated), tuple(problems))


def _epoch_samples(config: NeoXConfig) -> int:
    """Return the number of samples of one epoch, if the log counts epochs and the data can be read; else 0."""
    if config.logging.log_style != "fleetx":
        return 0
    try:
        from neox.data.pass_amounts import training_samples  # numpy, which a dry run without data does not need

        return training_samples(config, config.model.seq_length or 0, 1)
    except (DataError, ModuleNotFoundError):
        return 0


def _rows_of_pairs(config: NeoXConfig) -> int:
    """Return the rows of one epoch of the pairs of answers for training; 0 if none are given, or cannot be read."""
    if not config.preferences.answers(config.data)[0].paths:
        return 0
    try:
        from neox.data.pass_amounts import training_samples  # numpy, as above

        return training_samples(config, config.model.seq_length or 0, 1)
    except (ConfigError, DataError, ModuleNotFoundError):  # `data_problems` says why
        return 0


def training_tokens(config: NeoXConfig) -> tuple[int, ...]:
    """Return the number of tokens of each training dataset; none if one cannot be read.

    `data_problems` says why it cannot. With `data_path` it is the part for training.
    """
    data = config.data
    prefixes = data.train_data_paths or (data.data_path,)
    if not all(Path(f"{prefix}.json").exists() or Path(f"{prefix}.idx").exists() for prefix in prefixes):
        return ()
    try:
        if data.train_data_paths is not None:
            return tuple(map(_tokens, data.train_data_paths))
        if data.data_path is not None:
            return (_tokens_for_training(data),)
    except (ConfigError, DataError, ModuleNotFoundError):
        return ()
    return ()


def _tokens_for_training(data: DataConfig) -> int:
    """Return the tokens in the training documents of `data_path`; by its share if only the sidecar is here."""
    prefix = data.data_path or ""
    if not Path(f"{prefix}.idx").exists():
        return round(_tokens(prefix) * split_shares(data.split)[0])
    from neox.data.pass_amounts import tokens_of_part  # numpy, which a dry run without data does not need

    return tokens_of_part(prefix, data, 0)


def _read_documents(config: NeoXConfig) -> dict[_TokenSet, ReadDocuments]:
    """Return what padded samples read of the training documents, by their dataset.

    Datasets that cannot be read are left out; all of them if samples have no padding. This reads all labels, once.
    """
    found: dict[_TokenSet, ReadDocuments] = {}
    for prefix, labels in _training_sets(config):
        documents = _documents_of_samples(config, prefix, labels, is_whole=config.data.train_data_paths is not None)
        if documents is not None:
            found[prefix, labels] = documents
    return found


def _read_conversations(config: NeoXConfig) -> dict[_TokenSet, ReadDocuments]:
    """Return the same of the validation sets that have labels, which are whole files."""
    found: dict[_TokenSet, ReadDocuments] = {}
    if config.training.eval_iters == 0:
        return found
    for item in config.data.evaluated_sets:
        for prefix, labels in item.files:
            if labels is None:
                continue
            documents = _documents_of_samples(config, prefix, labels, is_whole=True)
            if documents is not None:
                found[prefix, labels] = documents
    return found


def _documents_of_samples(
    config: NeoXConfig, prefix: str, labels: str | None, *, is_whole: bool
) -> ReadDocuments | None:
    """Return what padded samples read of a dataset; None if it cannot be read, or samples have no padding.

    Args:
        config: The configuration.
        prefix: Prefix of the dataset.
        labels: That of its labels, if it has any.
        is_whole: Whether all documents are read, not only those of `split` for training.
    """
    data = config.data
    length = config.model.seq_length
    if data.pack_impl == "packed" or length is None or config.preferences.on_preferences:
        return None
    try:
        from neox.data.pass_amounts import read_documents  # numpy, which a dry run without data does not need
        from neox.data.samples.gpt_dataset import split_documents

        indexed, opened = _opened(prefix, labels)
        documents = range(len(indexed)) if is_whole else split_documents(data.split, len(indexed))[0]
        return read_documents(indexed, documents, opened, data, length)
    except (ConfigError, DataError, ModuleNotFoundError):  # `data_problems` says why
        return None


def _tokens_of_passes(config: NeoXConfig, read: Mapping[_TokenSet, ReadDocuments]) -> tuple[int, ...]:
    """Return the tokens of one pass over each training dataset, including padding; none if one of them is unknown.

    Args:
        config: The configuration.
        read: Result of `_read_documents`.
    """
    length = config.model.seq_length
    sets = list(_training_sets(config))
    if length is None or not read or not read.keys() >= set(sets):
        return ()
    from neox.data.pass_amounts import tokens_of_used  # numpy, which a dry run without data does not need

    return tuple(tokens_of_used(read[each].used, config.data, length) for each in sets)


def validation_tokens(config: NeoXConfig) -> tuple[tuple[str | None, int], ...]:
    """Return the name of each validation set, None for one without, and the tokens of one pass over it.

    A part of `data_path` without a document has 0; evaluations do not read it. Sets that cannot be read, or only be
    counted by packing many documents, are left out; blends too, which have no end.
    """
    data = config.data
    length = config.model.seq_length
    is_text = config.model.objective != "masked_lm" and not config.preferences.on_preferences
    if length is None or not is_text:
        return ()
    found = []
    for item in data.evaluated_sets:
        if len(item.paths) > 1:
            continue
        ((prefix, labels),) = item.files
        if not is_remote(prefix) and not Path(f"{prefix}.idx").exists():
            continue
        try:
            from neox.data.pass_amounts import samples_of_set  # numpy, which a dry run without data does not need

            samples = samples_of_set(prefix, labels, data, length, split=item.part)
        except (ConfigError, DataError, ModuleNotFoundError):  # `data_problems` says why
            continue
        if samples is not None and (samples or item.part is not None):
            found.append((item.name, samples * length))
    return tuple(found)


def _training_sets(config: NeoXConfig) -> Iterator[_TokenSet]:
    """Yield the prefix of each training dataset with that of its labels, if it has any."""
    data = config.data
    prefixes = data.train_data_paths or (str(data.data_path),)
    yield from zip(prefixes, data.train_label_data_paths or [None] * len(prefixes), strict=False)


def _opened(prefix: str, labels: str | None) -> tuple[IndexedDataset, IndexedDataset | None]:
    """Return a dataset and its labels. Raises DataError if they do not belong together."""
    from neox.data.token_files.indexed_dataset import IndexedDataset
    from neox.data.token_files.sidecar import check_labels

    texts = IndexedDataset(prefix)
    if labels is None:
        return texts, None
    opened = IndexedDataset(labels)
    check_labels(texts, opened)
    return texts, opened


def _truncation(
    config: NeoXConfig, read: Mapping[_TokenSet, ReadDocuments], use: str = "trained"
) -> tuple[list[str], list[Problem]]:
    """Return notes on documents that samples cut or leave out, and the problem that labels lose too many tokens.

    Texts that lose their end are still texts, so only labels, whose answers end at their last token, have a limit.

    Args:
        config: The configuration.
        read: Result of `_read_documents` or `_read_conversations`.
        use: What is done with the tokens, as a participle.
    """
    data = config.data
    length = config.model.seq_length
    notes: list[str] = []
    problems: list[Problem] = []
    if data.pack_impl not in ("pack_until_overflow", "unpacked"):
        return notes, problems
    for (prefix, labels), documents in read.items():
        found = documents.truncation()
        is_empty = found.dropped == found.documents  # `data_problems` says so
        if is_empty or not (found.cut or found.dropped):
            continue
        counted = (
            f"{prefix}: with seq_length {length:,} {found.cut:,} of {found.documents:,} documents are cut and "
            f"{found.dropped:,} left out, which loses {found.lost_share:.1%} of the {use} tokens"
        )
        notes.append(counted)
        if labels is not None and found.lost_share > data.max_lost_labels:
            message = (
                f"{counted}, more than `{_LIMIT}: {data.max_lost_labels:g}` allows; use a longer seq_length, shorter "
                f"conversations, `pack_impl: best_fit`, or a larger `{_LIMIT}`"
            )
            problems.append(config.problem_about(message, _LIMIT, "seq_length"))
    return notes, problems


def _packing_notes(config: NeoXConfig, read: Mapping[_TokenSet, ReadDocuments]) -> Iterator[str]:
    """Yield the share of padding in the samples of each training dataset; with `best_fit` that of cut documents, too.

    `_truncation` counts what the others cut.

    Args:
        config: The configuration.
        read: Result of `_read_documents`.
    """
    impl = config.data.pack_impl
    length = config.model.seq_length
    for (prefix, _), documents in read.items():
        from neox.data.pass_amounts import (  # numpy, which a dry run without data does not need
            COUNTED_DOCUMENTS,
            packing_shares,
        )

        assert length is not None
        used = documents.used
        shares = packing_shares(used, impl, length)
        note = f"{prefix}: `pack_impl: {impl}` makes {shares.padding:.1%} of all positions padding"
        if impl == "best_fit":
            note += f" and cuts {shares.cut:.1%} of the documents"
        if len(used) > COUNTED_DOCUMENTS:
            note += f", by its first {COUNTED_DOCUMENTS:,} documents"
        yield note


def _tokens(prefix: str) -> int:
    """Return the number of tokens of a dataset, from its sidecar or, if it has none, its index."""
    from neox.data.token_files.indexed_dataset import (
        IndexedDataset,  # numpy, which a dry run without data does not need
    )
    from neox.data.token_files.sidecar import read_sidecar

    sidecar = read_sidecar(prefix)
    if sidecar is not None:
        return sidecar.tokens
    return IndexedDataset(prefix).num_tokens
