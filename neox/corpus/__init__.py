"""Documents: reading of all formats of the Pile and lm-dataformat, writing as `.jsonl.zst`."""

from neox.corpus.blocks import DEFAULT_MAX_LINE_BYTES, LineBlock, Position, first_lines, read_blocks
from neox.corpus.document import BadInput, Document, SkipBudget
from neox.corpus.records import (
    BadRecord,
    convert_lines,
    kind_of,
    missing_key,
    parse_records,
    parse_texts,
    read_documents,
    write_archive,
    write_documents,
)
from neox.corpus.streams import expand_inputs

__all__ = [
    "DEFAULT_MAX_LINE_BYTES",
    "BadInput",
    "BadRecord",
    "Document",
    "LineBlock",
    "Position",
    "SkipBudget",
    "convert_lines",
    "expand_inputs",
    "first_lines",
    "kind_of",
    "missing_key",
    "parse_records",
    "parse_texts",
    "read_blocks",
    "read_documents",
    "write_archive",
    "write_documents",
]
