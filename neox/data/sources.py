"""How much each source of a corpus gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neox.corpus import read_documents
from neox.data.index_format import idx_path
from neox.data.indexed_dataset import IndexedDataset
from neox.errors import DataError

UNNAMED = "(unnamed)"


@dataclass
class SourceCount:
    """Documents of one source; text in UTF-8 bytes where text was read, tokens where a dataset was."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0


def count_sources(
    inputs: Sequence[str | Path], *, key: str = "text", source_key: str = "pile_set_name", skip_bad: int = 0
) -> dict[str, SourceCount]:
    """Count documents by source: `meta[source_key]` of texts (the Pile's name for it), the prefix for datasets.

    inputs: files or directories of documents, or prefixes of `.bin/.idx`. Raises DataError for bad input beyond
    skip_bad.
    """
    counts: dict[str, SourceCount] = {}
    for name in map(str, inputs):
        if idx_path(name).exists():
            data = IndexedDataset(name)
            counts[name] = SourceCount(documents=data.num_documents, tokens=data.num_tokens)
            continue
        if not Path(name).exists():
            raise DataError(f"{name} is neither a file nor a directory of documents, nor the prefix of a dataset")
        for document in read_documents(name, key, skip_bad=skip_bad):
            count = counts.setdefault(str(document.meta.get(source_key, UNNAMED)), SourceCount())
            count.documents += 1
            count.text_bytes += len(document.text.encode("utf-8", "surrogatepass"))
    return counts
