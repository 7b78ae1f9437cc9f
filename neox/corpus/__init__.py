"""Documents: reading of lines, tables and the Pile's archives, local or by address; writing as `.jsonl.zst`.

    paths, addresses, data sets of the Hub
        |  expand_inputs    inputs.py     directories, patterns and splits become files in order
        v
    file
        |  read_chunks      streams.py    decompressed, after a look at its first bytes (contents.py); archives.py and
        v                                 tables.py convert to JSON lines
    pieces of 256 KiB
        |  read_blocks      blocks.py     whole lines with their positions, where other processes or a resume start
        v
    LineBlock
        |  convert_lines    records.py    each line parsed; keys, paths, templates and filters are in fields.py
        v
    texts, objects or documents

A line or file that holds none of these is a `BadInput` with its place; a `SkipBudget` limits them.
"""

from neox.corpus.blocks import DEFAULT_MAX_LINE_BYTES, LineBlock, Position, first_lines, read_blocks
from neox.corpus.document import BadInput, Document, SkipBudget
from neox.corpus.fields import Filter, columns_of, read_filter
from neox.corpus.inputs import expand_inputs
from neox.corpus.records import (
    BadRecord,
    convert_lines,
    find_value,
    kind_of,
    missing_key,
    parse_records,
    parse_texts,
    read_documents,
    write_archive,
    write_documents,
)

__all__ = [
    "DEFAULT_MAX_LINE_BYTES",
    "BadInput",
    "BadRecord",
    "Document",
    "Filter",
    "LineBlock",
    "Position",
    "SkipBudget",
    "columns_of",
    "convert_lines",
    "find_value",
    "expand_inputs",
    "first_lines",
    "kind_of",
    "missing_key",
    "parse_records",
    "parse_texts",
    "read_blocks",
    "read_documents",
    "read_filter",
    "write_archive",
    "write_documents",
]
