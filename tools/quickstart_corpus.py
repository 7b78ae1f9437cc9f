# PYTHON_ARGCOMPLETE_OK
"""Make the quickstart's corpus: real text that every machine has, in the Pile's form.

The text is the sources of Python's standard library or, with --text, your own `.txt`, `.jsonl` or `.jsonl.zst`. The
output is OUT/quickstart-{00,01}.jsonl.zst (`text`, `meta`) and OUT/SHA256SUMS.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.corpus import Document, read_documents, write_documents
from neox.errors import DataError, run_script

SHARDS = 2
PARAGRAPHS_PER_DOCUMENT = 50
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__", "lib2to3", "idle_test"})


def standard_library(limit: int | None = None) -> Iterator[Document]:
    """Yield the standard library's modules in a fixed order, without tests and third-party packages.

    Args:
        limit: Number of characters after which to stop; None for all modules.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    done = 0
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT.intersection(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few modules declare another encoding
            continue
        if not text.strip():
            continue
        yield Document(text, {"source": "python-stdlib", "path": relative.as_posix()})
        done += len(text)
        if limit is not None and done >= limit:
            return


def own_text(path: Path) -> Iterator[Document]:
    """Yield the documents of a user's file: pieces of some paragraphs of a plain text, or its JSON lines."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; TEXT= takes a .txt, .jsonl or .jsonl.zst")
    if path.name.endswith((".jsonl", ".jsonl.zst")):
        yield from read_documents(path)
        return
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}); convert it, or give a .jsonl[.zst]") from error
    paragraphs = list(filter(str.strip, re.split(r"\n\s*\n", text)))
    for start in range(0, len(paragraphs), PARAGRAPHS_PER_DOCUMENT):
        piece = "\n\n".join(paragraphs[start : start + PARAGRAPHS_PER_DOCUMENT])
        yield Document(piece, {"source": path.name, "paragraph": start})


def write_shards(documents: Iterable[Document], out: Path) -> list[Path]:
    """Write the documents in turn to SHARDS files, and return their paths."""
    shards: list[list[Document]] = [[] for _ in range(SHARDS)]
    for number, document in enumerate(documents):
        shards[number % SHARDS].append(document)
    if not any(shards):
        raise DataError("no text found: the corpus would be empty")
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("quickstart-*.jsonl.zst"):  # another text may have filled more shards
        old.unlink()
    paths = []
    for number, shard in enumerate(shards):
        if not shard:  # a single document fills one shard
            continue
        path = out / f"quickstart-{number:02d}.jsonl.zst"
        write_documents(path, shard)
        paths.append(path)
    return paths


def main() -> None:
    parser = ScriptParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("data/quickstart"), help="directory to write (default: %(default)s)"
    )
    parser.add_argument("--text", type=Path, help="your own .txt, .jsonl or .jsonl.zst instead of Python's sources")
    parser.add_argument(
        "--limit", type=int, metavar="CHARS", help="end the standard library after this many characters"
    )
    args = parser.parse_args()
    documents = own_text(args.text) if args.text else standard_library(args.limit)
    paths = write_shards(documents, args.out)
    sums = args.out / "SHA256SUMS"
    sums.write_text("".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in paths))
    for path in paths:
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    run_script(main)
