"""What the head node can say about token files before ranks start: whether they are whole, and made for this tokenizer.

No torch here: a dry run asks too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from neox.data.index_format import bin_path, idx_path, json_path
from neox.data.indexed_dataset import IndexedDataset
from neox.data.sidecar import check_fits, check_tokenizer, read_sidecar
from neox.errors import DataError
from neox.tokenizer import Tokenizer


def data_problems(
    prefixes: Mapping[str, str], data_impl: str, tokenizer: Tokenizer, *, open_files: bool
) -> list[tuple[str, str]]:
    """Return (key, sentence) for each data set that this run cannot use; missing files are left to others.

    prefixes: prefix -> the key that names it. open_files: read the whole `.idx` too, which takes a moment for very many
    documents; without it, the sidecar alone.
    """
    problems = []
    for prefix, key in prefixes.items():
        if not bin_path(prefix).is_file() or not idx_path(prefix).is_file():
            continue
        try:
            _check(prefix, data_impl, tokenizer, open_files)
        except DataError as error:
            problems.append((key, str(error)))
    return problems


def _check(prefix: str | Path, data_impl: str, tokenizer: Tokenizer, open_files: bool) -> None:
    size = tokenizer.vocab_size
    if open_files:
        check_fits(IndexedDataset(prefix, data_impl), vocab_size=size, tokenizer_hash=tokenizer.content_hash)
    elif json_path(prefix).exists() and (sidecar := read_sidecar(prefix)) is not None:
        check_tokenizer(sidecar, prefix, vocab_size=size, tokenizer_hash=tokenizer.content_hash)
