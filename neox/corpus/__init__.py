"""Documents: read from every format the Pile and lm-dataformat use, written as `.jsonl.zst`."""

from neox.corpus.blocks import DEFAULT_MAX_LINE_BYTES, LineBlock, Position, first_lines, read_blocks
from neox.corpus.document import BadInput, Document, SkipBudget
from neox.corpus.parse import parse_texts
from neox.corpus.reader import read_documents
from neox.corpus.streams import expand_inputs
from neox.corpus.writer import write_documents

__all__ = [
    "DEFAULT_MAX_LINE_BYTES",
    "BadInput",
    "Document",
    "LineBlock",
    "Position",
    "SkipBudget",
    "expand_inputs",
    "first_lines",
    "parse_texts",
    "read_blocks",
    "read_documents",
    "write_documents",
]
