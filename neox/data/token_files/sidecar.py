"""Sidecar of a dataset (`PREFIX.json`), and checks that a dataset fits a run.

Our tools write the sidecar. It names the tokenizer that produced the ids, so that training can refuse another one.
Datasets of other tools have no sidecar. Then only their ids are checked, batch by batch. A dry run imports this module,
so it does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from neox.config.sections.data import DataConfig
from neox.data.token_files.indexed_dataset import IndexedDataset, idx_path, json_path
from neox.errors import DataError
from neox.files import write_text
from neox.log import get_logger
from neox.tokenizer.chat import ChatTemplate

_log = get_logger(__name__)
_FORMAT = 1
DOCUMENT_BYTES = "document_bytes"
"""Setting with the UTF-8 bytes of the texts that became the tokens, as they were encoded. Bits per byte need it."""


@dataclass(frozen=True)
class Sidecar:
    """Description of a dataset.

    Attributes:
        tokenizer_type: NeoX's name of the tokenizer type.
        tokenizer_hash: `Tokenizer.content_hash` of the tokenizer, built from the same files without options.
        vocab_size: Number of ids of the tokenizer.
        eod: End-of-document id of the tokenizer.
        append_eod: Whether each document ends with `eod`.
        documents: Number of documents.
        tokens: Number of tokens.
        max_id: Largest id; -1 if there are no tokens.
        inputs: Paths of the files from which the dataset was made.
        settings: Options that determined the bytes of the dataset.
        crc32: Checksum of the `.bin`; None if it is not known. Only the command `dataset.py verify` compares it.
        format: Version of the sidecar's format.
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
    """Write `PREFIX.json` atomically. The builder's `finalize` removes an old one, so call this after it."""
    write_text(json_path(prefix), json.dumps(asdict(sidecar), indent=2, ensure_ascii=False) + "\n")


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """Return the content of `PREFIX.json`, or None if there is no such file. Raises DataError if it is damaged."""
    path = json_path(prefix)
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        sidecar = Sidecar(**fields)
        numbers = (sidecar.vocab_size, sidecar.eod, sidecar.documents, sidecar.tokens, sidecar.max_id, sidecar.format)
        if not all(isinstance(number, int) for number in numbers) or not isinstance(sidecar.tokenizer_hash, str):
            raise TypeError("a field has the wrong type")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} is not a readable sidecar ({error}); preprocess the data again, or remove it"
        ) from error
    if sidecar.format != _FORMAT:
        raise DataError(f"{path} has format {sidecar.format}, this version of neox reads format {_FORMAT}")
    return replace(sidecar, inputs=tuple(sidecar.inputs))


def bytes_per_token(prefix: str | Path) -> float | None:
    """Return the bytes of text for each token of a dataset; None if its sidecar does not know them."""
    sidecar = read_sidecar(prefix)
    if sidecar is None or not sidecar.tokens:
        return None
    counted = sidecar.settings.get(DOCUMENT_BYTES)
    if not isinstance(counted, int) or counted <= 0:
        return None
    return counted / sidecar.tokens


def check_fits(indexed: IndexedDataset, *, vocab_size: int, tokenizer_hashes: Collection[str]) -> Sidecar | None:
    """Check that a dataset was made with the tokenizer of the run, and that its sidecar describes it.

    Args:
        indexed: Dataset to check.
        vocab_size: Number of ids that text of the run may have, before padding.
        tokenizer_hashes: `known_hashes` of the run's tokenizer; none leave out this comparison.

    Returns:
        The sidecar; None if there is none, which is logged.

    Raises:
        DataError: If the tokenizers differ, or the sidecar belongs to other data.
    """
    sidecar = read_sidecar(indexed.prefix)
    if sidecar is None:
        _log.info("%s has no .json, so its tokenizer cannot be checked, only its ids", indexed.prefix)
        return None
    path = json_path(indexed.prefix)
    if sidecar.documents != indexed.num_documents or sidecar.tokens != indexed.num_tokens:
        raise DataError(
            f"{path} describes {sidecar.documents:,} documents with {sidecar.tokens:,} tokens, but "
            f"{idx_path(indexed.prefix)} has {indexed.num_documents:,} with {indexed.num_tokens:,}: they are from "
            "different runs; preprocess the data again, or remove the .json if the data is right"
        )
    check_tokenizer(sidecar, indexed.prefix, vocab_size=vocab_size, tokenizer_hashes=tokenizer_hashes)
    return sidecar


def check_labels(indexed: IndexedDataset, labels: IndexedDataset) -> None:
    """Raise DataError if labels do not have the same sequences, with the same numbers of tokens, as a dataset."""
    if len(indexed) != len(labels):
        difference = f"{len(labels):,} sequences, and the data has {len(indexed):,}"
    else:
        different = np.flatnonzero(np.asarray(indexed.sizes) != labels.sizes)
        if not different.size:
            return
        first = int(different[0])
        difference = f"{labels.sizes[first]:,} tokens in sequence {first:,}, and the data has {indexed.sizes[first]:,}"
    raise DataError(
        f"{labels.prefix} are not the labels of {indexed.prefix}: they have {difference}; give the labels that were "
        "made with the data"
    )


def check_tokenizer(
    sidecar: Sidecar, prefix: str | Path, *, vocab_size: int, tokenizer_hashes: Collection[str]
) -> None:
    """Raise DataError if a sidecar names another tokenizer than that of the run. Arguments as for `check_fits`."""
    if tokenizer_hashes and sidecar.tokenizer_hash not in tokenizer_hashes:
        known = " or ".join(digest[:12] for digest in tokenizer_hashes)
        raise DataError(
            f"{prefix} was made with another tokenizer ({sidecar.tokenizer_type}, {sidecar.vocab_size} ids, "
            f"hash {sidecar.tokenizer_hash[:12]}) than this run's (hash {known}, {vocab_size} ids): set "
            "vocab_file and tokenizer_type to the data's, or preprocess the data again"
        )
    if sidecar.max_id >= vocab_size:
        raise DataError(
            f"{prefix} holds token id {sidecar.max_id}, but this run has only {vocab_size} ids: the data was made "
            "with another tokenizer (set vocab_file to that one, or preprocess the data again), or holds tokens for "
            "which an imported model has no rows (tools/resize_vocabulary.py gives them some)"
        )


def chat_template_of(prefix: str | Path) -> ChatTemplate | None:
    """Return the chat template that made a dataset.

    Returns:
        The template; None if the dataset holds no conversations, or has no sidecar.

    Raises:
        DataError: If the sidecar is damaged.
    """
    sidecar = read_sidecar(prefix)
    if sidecar is None or "chat" not in sidecar.settings:
        return None
    try:
        return ChatTemplate.from_json(sidecar.settings["chat"]["template"])
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(f"{json_path(prefix)} names no chat template ({error}); preprocess the data again") from error


def chat_templates(data: DataConfig) -> dict[str, ChatTemplate]:
    """Return the chat templates that made the training data, by the prefixes of datasets.

    Raises:
        DataError: If a sidecar is damaged.
    """
    prefixes = data.train_data_paths or ()
    if data.data_path is not None:
        prefixes = (data.data_path,)
    found = {}
    for prefix in prefixes:
        template = chat_template_of(prefix)
        if template is not None:
            found[prefix] = template
    return found


def joined_sidecar(sidecars: Sequence[Sidecar]) -> Sidecar:
    """Return the sidecar of joined datasets, without checksum. Raises DataError if their tokenizers differ."""
    joined = replace(sidecars[0], crc32=None)
    for other in sidecars[1:]:
        if other.tokenizer_hash != joined.tokenizer_hash:
            raise DataError(
                f"datasets made with different tokenizers cannot be joined: {joined.tokenizer_type} "
                f"{joined.tokenizer_hash[:12]} and {other.tokenizer_type} {other.tokenizer_hash[:12]}"
            )
        if other.settings.get("chat") != joined.settings.get("chat"):
            _log.warning("datasets with other settings of conversations are joined; those of the first one are kept")
        settings = dict(joined.settings)
        counted = settings.pop(DOCUMENT_BYTES, None)
        of_other = other.settings.get(DOCUMENT_BYTES)
        if counted is not None and of_other is not None:
            settings[DOCUMENT_BYTES] = counted + of_other
        joined = replace(
            joined,
            settings=settings,
            append_eod=joined.append_eod and other.append_eod,
            documents=joined.documents + other.documents,
            tokens=joined.tokens + other.tokens,
            max_id=max(joined.max_id, other.max_id),
            inputs=joined.inputs + other.inputs,
        )
    return joined
