"""Datasets that a run cannot use, found before it starts. A dry run imports this, so no torch."""

from __future__ import annotations

from collections.abc import Mapping

from neox.config.sections.data import DataConfig
from neox.config.sections.preferences import REWARD_KEYS
from neox.data.samples.packing import usable_documents
from neox.data.token_files.indexed_dataset import IndexedDataset, idx_path
from neox.data.token_files.sidecar import check_fits, check_labels, check_tokenizer, read_sidecar
from neox.errors import DataError
from neox.storage import ids_file
from neox.tokenizer import Tokenizer


def dataset_problems(
    prefixes: Mapping[str, str],
    labelled: Mapping[str, str],
    data: DataConfig,
    seq_length: int | None,
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    largest_index: int | None,
) -> list[tuple[str, str]]:
    """Find the datasets that a run cannot use. Missing files are not reported here.

    Args:
        prefixes: Prefixes of the datasets, and the configuration key that names each.
        labelled: Prefixes of label files, and the prefix of the dataset to which each belongs.
        data: Data section of the configuration.
        seq_length: Number of tokens of a sample's input.
        tokenizer: Tokenizer of the run.
        vocab_size: Number of ids that text of the run may have.
        largest_index: Size of the largest `.idx` that is read, in bytes; None for any. For very many documents it takes
            seconds.

    Returns:
        Configuration key and problem of each dataset that does not fit.
    """
    problems = []
    for prefix, key in prefixes.items():
        if not ids_file(prefix).is_file() or not idx_path(prefix).is_file():
            continue
        try:
            if largest_index is not None and idx_path(prefix).stat().st_size > largest_index:
                described = read_sidecar(prefix)
                if described is not None:
                    check_tokenizer(described, prefix, vocab_size=vocab_size, tokenizer_hashes=tokenizer.known_hashes)
            elif key in REWARD_KEYS:
                IndexedDataset(prefix, data.data_impl, floats=True)
            else:
                _check_dataset(prefix, labelled.get(prefix), data, seq_length, tokenizer, vocab_size)
        except DataError as error:
            problems.append((key, str(error)))
    return problems


def _check_dataset(
    prefix: str, labelled: str | None, data: DataConfig, seq_length: int | None, tokenizer: Tokenizer, vocab_size: int
) -> None:
    """Raise DataError if a run cannot use a dataset. `labelled` is the dataset whose labels it holds, if any."""
    texts = IndexedDataset(prefix, data.data_impl)
    labels = None
    check_fits(texts, vocab_size=vocab_size, tokenizer_hashes=tokenizer.known_hashes)
    if labelled is not None and idx_path(labelled).is_file():
        labels = texts
        texts = IndexedDataset(labelled, data.data_impl)
        check_labels(texts, labels)
    if data.pack_impl != "packed" and seq_length is not None:
        documents = range(len(texts))
        usable_documents(texts, labels, documents, seq_length, impl=data.pack_impl, allow_chopped=data.allow_chopped)
