"""Sidecar of a dataset (`PREFIX.json`), and the checks of datasets against a run's tokenizer.

Our tools write the sidecar. It names the tokenizer that produced the ids, so that training can refuse another one.
Datasets of other tools have none; then only their ids are checked, batch by batch. No torch: a dry run imports this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from neox.config.sections.data import DataConfig
from neox.data.indexed_dataset import IndexedDataset, bin_path, idx_path, json_path
from neox.data.packing import usable_documents
from neox.errors import DataError
from neox.files import write_text
from neox.log import get_logger
from neox.tokenizer import Tokenizer

_log = get_logger(__name__)
_FORMAT = 1


@dataclass(frozen=True)
class Sidecar:
    """Description of a dataset.

    Attributes:
        tokenizer_type: NeoX's name of the tokenizer.
        tokenizer_hash: `Tokenizer.content_hash` as `build_tokenizer` gives it for the same files without options.
        vocab_size: Number of ids of the tokenizer.
        eod: Its end-of-document id.
        append_eod: Whether each document ends with `eod`.
        documents: Number of documents.
        tokens: Number of tokens.
        max_id: Largest id, -1 without tokens.
        inputs: Files the dataset was made from.
        settings: Options that determined its bytes.
        crc32: Checksum of the `.bin`, compared by `verify_dataset` only; None if unknown.
        format: Version of this file.
    """

    tokenizer_type: str
    tokenizer_hash: str
    vocab_size: int
    eod: int
    append_eod: bool
    documents: int
    tokens: int
    max_id: int
    inputs: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    crc32: int | None = None
    format: int = _FORMAT


def write_sidecar(prefix: str | Path, sidecar: Sidecar) -> None:
    """Write `PREFIX.json` atomically; to be called after the builder's `finalize`."""
    write_text(json_path(prefix), json.dumps(asdict(sidecar), indent=2, ensure_ascii=False) + "\n")


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """Read `PREFIX.json`; None if it does not exist. Raises DataError if it cannot be read."""
    path = json_path(prefix)
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        sidecar = Sidecar(**fields)
        numbers = (sidecar.vocab_size, sidecar.eod, sidecar.documents, sidecar.tokens, sidecar.max_id, sidecar.format)
        if not all(isinstance(n, int) for n in numbers) or not isinstance(sidecar.tokenizer_hash, str):
            raise TypeError("a field has the wrong type")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} is not a readable sidecar ({error}); preprocess the data again, or remove it"
        ) from error
    if sidecar.format != _FORMAT:
        raise DataError(f"{path} has format {sidecar.format}, this version of neox reads format {_FORMAT}")
    return replace(sidecar, inputs=tuple(sidecar.inputs))


def check_fits(indexed: IndexedDataset, *, vocab_size: int, tokenizer_hash: str | None) -> Sidecar | None:
    """Check that a dataset was made with the run's tokenizer, and that its sidecar describes it.

    Args:
        indexed: The dataset.
        vocab_size: Number of ids of the run's tokenizer, before padding.
        tokenizer_hash: `content_hash` of the run's tokenizer; None skips this comparison.

    Returns:
        The sidecar; None, with a log line, if there is none.

    Raises:
        DataError: If the tokenizers differ, or the sidecar belongs to other data.
    """
    sidecar = read_sidecar(indexed.prefix)
    if sidecar is None:
        _log.info("%s has no .json, so its tokenizer cannot be checked, only its ids", indexed.prefix)
        return None
    path = json_path(indexed.prefix)
    if (sidecar.documents, sidecar.tokens) != (indexed.num_documents, indexed.num_tokens):
        raise DataError(
            f"{path} describes {sidecar.documents:,} documents with {sidecar.tokens:,} tokens, but "
            f"{idx_path(indexed.prefix)} has {indexed.num_documents:,} with {indexed.num_tokens:,}: they are from "
            "different runs; preprocess the data again, or remove the .json if the data is right"
        )
    check_tokenizer(sidecar, indexed.prefix, vocab_size=vocab_size, tokenizer_hash=tokenizer_hash)
    return sidecar


def check_labels(indexed: IndexedDataset, labels: IndexedDataset) -> None:
    """Raise DataError if labels do not have the sequences of a dataset, each with as many tokens."""
    if len(indexed) != len(labels):
        what = f"{len(labels):,} sequences, and the data has {len(indexed):,}"
    elif (differs := np.flatnonzero(np.asarray(indexed.sizes) != labels.sizes)).size:
        first = int(differs[0])
        what = f"{labels.sizes[first]:,} tokens in sequence {first:,}, and the data has {indexed.sizes[first]:,}"
    else:
        return
    raise DataError(
        f"{labels.prefix} are not the labels of {indexed.prefix}: they have {what}; name the file of labels that was "
        "made with the data"
    )


def check_tokenizer(sidecar: Sidecar, prefix: str | Path, *, vocab_size: int, tokenizer_hash: str | None) -> None:
    """Raise DataError if a sidecar names another tokenizer than the run's; arguments as in `check_fits`."""
    if tokenizer_hash is not None and sidecar.tokenizer_hash != tokenizer_hash:
        raise DataError(
            f"{prefix} was made with another tokenizer ({sidecar.tokenizer_type}, {sidecar.vocab_size} ids, "
            f"hash {sidecar.tokenizer_hash[:12]}) than this run's (hash {tokenizer_hash[:12]}, {vocab_size} ids): set "
            "vocab_file and tokenizer_type to the data's, or preprocess the data again"
        )
    if sidecar.max_id >= vocab_size:
        raise DataError(
            f"{prefix} holds token id {sidecar.max_id}, but the tokenizer has {vocab_size} ids: it was made "
            "with another tokenizer; set vocab_file to that one, or preprocess the data again"
        )


def joined_sidecar(sidecars: Sequence[Sidecar]) -> Sidecar:
    """Return the sidecar of concatenated datasets, without checksum. Raises DataError if their tokenizers differ."""
    first = sidecars[0]
    for other in sidecars[1:]:
        if other.tokenizer_hash != first.tokenizer_hash:
            raise DataError(
                f"datasets made with different tokenizers cannot be joined: {first.tokenizer_type} "
                f"{first.tokenizer_hash[:12]} and {other.tokenizer_type} {other.tokenizer_hash[:12]}"
            )
    return replace(
        first,
        append_eod=all(sidecar.append_eod for sidecar in sidecars),
        documents=sum(sidecar.documents for sidecar in sidecars),
        tokens=sum(sidecar.tokens for sidecar in sidecars),
        max_id=max(sidecar.max_id for sidecar in sidecars),
        inputs=tuple(name for sidecar in sidecars for name in sidecar.inputs),
        crc32=None,
    )


def data_problems(
    prefixes: Mapping[str, str],
    labelled: Mapping[str, str],
    data: DataConfig,
    seq_length: int | None,
    tokenizer: Tokenizer,
    *,
    open_files: bool,
) -> list[tuple[str, str]]:
    """Return why a run cannot use its datasets; missing files are not reported here.

    Args:
        prefixes: Prefix of each dataset -> the configuration key that names it.
        labelled: Prefix of labels -> that of the dataset whose labels they are.
        data: Data section of the configuration.
        seq_length: Tokens of a sample's input.
        tokenizer: The run's tokenizer.
        open_files: Whether to read each `.idx` too, which takes a moment for very many documents.

    Returns:
        (configuration key, problem) of each dataset that does not fit.
    """
    size, digest = tokenizer.vocab_size, tokenizer.content_hash
    problems = []
    for prefix, key in prefixes.items():
        if not bin_path(prefix).is_file() or not idx_path(prefix).is_file():
            continue
        try:
            if open_files:
                opened = IndexedDataset(prefix, data.data_impl)
                check_fits(opened, vocab_size=size, tokenizer_hash=digest)
                texts = opened
                labels: IndexedDataset | None = None
                if prefix in labelled and idx_path(labelled[prefix]).is_file():
                    texts, labels = IndexedDataset(labelled[prefix], data.data_impl), opened
                    check_labels(texts, labels)
                if data.pack_impl != "packed" and seq_length is not None:
                    everything = range(len(texts))
                    usable_documents(texts, labels, everything, seq_length, allow_chopped=data.allow_chopped)
            elif (sidecar := read_sidecar(prefix)) is not None:
                check_tokenizer(sidecar, prefix, vocab_size=size, tokenizer_hash=digest)
        except DataError as error:
            problems.append((key, str(error)))
    return problems
