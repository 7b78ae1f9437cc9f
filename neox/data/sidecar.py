"""What a dataset knows about itself: `PREFIX.json`, written beside `PREFIX.bin` and `PREFIX.idx` by our tools.

It names the tokenizer that made the ids, so that training can refuse another one. Data from elsewhere has no such file;
then only its ids can be checked, batch by batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from neox.data.index_format import idx_path, json_path
from neox.data.indexed_dataset import IndexedDataset
from neox.errors import DataError
from neox.files import write_text
from neox.log import get_logger

_LOG = get_logger(__name__)
_FORMAT = 1


@dataclass(frozen=True)
class Sidecar:
    """tokenizer_hash: `content_hash` of the tokenizer as `build_tokenizer` makes it from the same files with no further
        choice, which is what training compares it with. vocab_size, eod: that tokenizer's.
    append_eod: each document ends with eod.
    documents, tokens, max_id: of the dataset beside it (max_id -1: no tokens).
    inputs: what it was made from. settings: the options that decided its bytes, for people.
    crc32: of the `.bin` (`IndexedDatasetBuilder.crc32`), looked at by verification, not by training; None: not known.
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
    """Write `PREFIX.json` beside the target and rename it; call it after the builder's `finalize()`."""
    write_text(json_path(prefix), json.dumps(asdict(sidecar), indent=2, ensure_ascii=False) + "\n")


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """Read `PREFIX.json`; None where there is none. Raises DataError for one that cannot be understood."""
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
        raise DataError(f"{path} cannot be understood ({error}); preprocess the data again, or remove it") from error
    if sidecar.format != _FORMAT:
        raise DataError(f"{path} has format {sidecar.format}, this version of neox reads format {_FORMAT}")
    return replace(sidecar, inputs=tuple(sidecar.inputs))


def check_fits(indexed: IndexedDataset, *, vocab_size: int, tokenizer_hash: str | None) -> Sidecar | None:
    """Refuse a dataset made with another tokenizer than the run's, or not described by its own sidecar.

    vocab_size: the run's, before padding. tokenizer_hash: of the run's tokenizer; None skips that comparison.
    Returns the sidecar, or None (and says so) where the data has none.
    """
    sidecar = read_sidecar(indexed.prefix)
    if sidecar is None:
        _LOG.info("%s has no .json beside it, so its tokenizer cannot be checked; its ids are", indexed.prefix)
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


def check_tokenizer(sidecar: Sidecar, prefix: str | Path, *, vocab_size: int, tokenizer_hash: str | None) -> None:
    """Refuse a data set whose sidecar names another tokenizer than the run's; arguments as in `check_fits`."""
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
    """The sidecar of datasets joined in order, its checksum not known yet. DataError when their tokenizers differ."""
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
