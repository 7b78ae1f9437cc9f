"""Documents, one at a time, from every format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from neox.corpus.blocks import DEFAULT_MAX_LINE_BYTES, LineBlock, read_blocks
from neox.corpus.document import BadInput, Document, SkipBudget
from neox.corpus.parse import BadRecord, parse_records, text_of
from neox.corpus.streams import expand_inputs
from neox.log import get_logger

_BLOCK_BYTES = 1 << 18
_log = get_logger(__name__)


def read_documents(
    path: str | Path | Sequence[str | Path],
    key: str = "text",
    *,
    skip_bad: int | None = 0,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
) -> Iterator[Document]:
    """Yield the documents of a file, a directory, or several of them, in order; documents with empty text are left out.

    skip_bad: how many bad inputs (lines, or the damaged rest of a file) may be passed over, each with a warning;
    None: none, and the error names no flag that would.
    Raises DataError for an input that does not exist, and for the first bad input beyond `skip_bad`, with its place.
    """
    paths = [path] if isinstance(path, str | Path) else path
    budget = SkipBudget(skip_bad, report=lambda bad: _log.warning("skipped %s", bad))
    for file in expand_inputs(paths):
        for block in read_blocks(file, block_bytes=_BLOCK_BYTES, max_line_bytes=max_line_bytes):
            if isinstance(block, BadInput):
                budget.add(block)
            else:
                yield from _documents(block, key, budget)


def _documents(block: LineBlock, key: str, budget: SkipBudget) -> Iterator[Document]:
    for found in parse_records(block):
        if isinstance(found, BadInput):
            budget.add(found)
            continue
        line, offset, record = found
        try:
            text = text_of(record, key)
        except BadRecord as error:
            budget.add(BadInput(block.file, line, offset, str(error)))
            continue
        if text:
            meta = record.get("meta") if isinstance(record, dict) else None
            yield Document(text, meta if isinstance(meta, Mapping) else {})
