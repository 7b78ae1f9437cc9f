# PYTHON_ARGCOMPLETE_OK
"""Write each document again with one sentence on a line, for `preprocess_data.py --presplit-sentences`.

python tools/presplit_sentences.py --input pages.jsonl.zst --output sentences.jsonl.zst
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.corpus import Document, read_documents, write_documents
from neox.errors import run_script
from neox.log import progress, setup_logging
from neox.preprocess.sentences import sentence_splitter


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    p = ScriptParser(description=__doc__)
    p.add_argument("--input", required=True, nargs="+", help="files or directories")
    p.add_argument("--output", required=True, help="`.jsonl.zst` file to write")
    p.add_argument("--jsonl-key", "--text-key", default="text", help="JSON key of the text")
    p.add_argument("--language", default="en", metavar="CODE", help="language of the texts (default: en)")
    p.add_argument("--skip-bad", type=int, default=0, metavar="N", help="skip up to N bad inputs")
    return p


def main() -> int:
    """Run the tool."""
    args = parser().parse_args()
    setup_logging()
    split = sentence_splitter(args.language)

    def documents() -> Iterator[Document]:
        with progress("splitting", unit="documents") as bar:
            for document in read_documents(args.input, args.jsonl_key, skip_bad=args.skip_bad):
                bar.update(1)
                lines = [" ".join(sentence.split()) for sentence in split(document.text)]
                yield replace(document, text="\n".join(lines))

    print(f"{args.output}: {write_documents(args.output, documents()):,} documents")
    return 0


if __name__ == "__main__":
    run_script(main)
