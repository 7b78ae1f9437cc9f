# PYTHON_ARGCOMPLETE_OK
"""Decompress the Pile's shards, or any .zst files, with verification.

    python tools/decompress_pile.py --input pile/train pile/val.jsonl.zst pile/test.jsonl.zst --output pile_plain

The same command resumes after an interruption: complete files are kept. tools/preprocess_data.py reads .jsonl.zst
directly, so only other programs need decompressed files.
"""

from __future__ import annotations

import argparse
import time

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.corpus.decompress import compressed_files, decompress_files
from neox.errors import run_script
from neox.log import progress, setup_logging


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    p = ScriptParser(description=__doc__)
    p.add_argument("--input", nargs="+", required=True, help=".zst files, or directories of them")
    p.add_argument("--output", help="directory of the decompressed files (default: only verify)")
    p.add_argument("--workers", type=int, default=0, help="number of shards at a time (default: one for each core)")
    return p


def main() -> int:
    """Run the tool."""
    args = parser().parse_args()
    setup_logging()
    files = compressed_files(args.input)
    started = time.monotonic()
    with progress("decompressing", sum(file.stat().st_size for file in files), "B") as bar:
        done = decompress_files(files, args.output, workers=args.workers, consumed=bar.update)
    seconds = time.monotonic() - started
    fresh = 0
    size = 0
    for file in done:
        line = f"{file.target or file.source}: {file.size:,} bytes"
        if file.fresh:
            fresh += 1
            size += file.size
        else:
            line += ", existed"
        print(line)
    print(f"{fresh} of {len(done)} files in {seconds:.1f} s, {size / 1e6 / max(seconds, 1e-9):,.0f} MB/s")
    return 0


if __name__ == "__main__":
    run_script(main)
