# PYTHON_ARGCOMPLETE_OK
"""Train a tokenizer on documents: 20B-style byte-level BPE, GPT-2's two files, SentencePiece, or BERT's WordPiece.

python tools/train_tokenizer.py --input data/mydata.jsonl.zst --vocab-size 50257 --output 20B_tokenizer.json
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType

import _checkout  # noqa: F401
from preprocess_data import add_choice, chosen_documents, input_paths, text_key

from neox.arguments import ScriptParser
from neox.corpus import Document
from neox.errors import ConfigError, run_script
from neox.log import progress, setup_logging
from neox.tokenizer import TOKENIZER_KINDS, TokenizerKind, build_tokenizer, tokenizer_files, train_tokenizer

TOKENIZER_TYPE_OF_KIND = MappingProxyType(
    {
        "byte-level-bpe": "HFTokenizer",
        "gpt2": "GPT2BPETokenizer",
        "sentencepiece": "SPMTokenizer",
        "sentencepiece-bert": "SPMTokenizer",
        "sentencepiece-char": "SPMTokenizer",
        "wordpiece": "BertWordPieceLowerCase",
        "wordpiece-cased": "BertWordPieceCase",
    }
)
"""Value of `--kind` -> `tokenizer_type`."""


def parser() -> argparse.ArgumentParser:
    """Return the parser; second names are gpt-neox's."""
    p = ScriptParser(description=__doc__)
    p.add_argument(
        "--input",
        "--json_input_dir",
        required=True,
        nargs="+",
        help="files, directories or addresses, separated by commas or blanks",
    )
    p.add_argument(
        "--jsonl-key",
        "--text-key",
        type=text_key,
        default="text",
        help=r"JSON key of the text, a path with dots, or a template such as '{title}\n\n{text}' (default: text)",
    )
    add_choice(p)
    p.add_argument("--vocab-size", "-v", type=int, required=True, help="number of ids")
    p.add_argument(
        "--output",
        "--tokenizer_output_path",
        required=True,
        help="tokenizer.json; a directory for gpt2, a .model for sentencepiece, a vocab.txt for wordpiece",
    )
    p.add_argument("--tokenizer_type", choices=["BPE"], help="gpt-neox's name of the default kind")
    p.add_argument("--kind", default="byte-level-bpe", choices=TOKENIZER_KINDS)
    p.add_argument("--skip-bad", type=int, default=0, metavar="N", help="skip up to N bad inputs")
    p.add_argument("--sample", type=float, default=1.0, help="share of the documents to train on (default: all)")
    p.add_argument("--max-mb", type=float, help="stop after this many MB of text, to limit time and memory")
    p.add_argument("--overwrite", action="store_true", help="replace the output")
    p.add_argument("--seed", type=int, default=1234, help="seed of --sample (default: 1234)")
    return p


def main() -> int:
    """Run the tool."""
    args = parser().parse_args()
    setup_logging()
    if not 0 < args.sample <= 1:
        parser().error(f"--sample {args.sample} must be above 0 and at most 1")
    if args.tokenizer_type and args.kind not in ("byte-level-bpe", "gpt2"):
        parser().error(f"--tokenizer_type BPE and --kind {args.kind} contradict each other: leave one out")
    if not args.overwrite:
        refuse_existing(Path(args.output), args.kind)
    documents = chosen_documents(list(input_paths(args.input)), args.jsonl_key, args)
    texts = chosen_texts(documents, args.sample, args.max_mb, args.seed)
    files = train_tokenizer(texts, args.vocab_size, args.output, args.kind)
    print(*files, sep="\n", flush=True)
    print(next_step(args, files), file=sys.stderr)
    return 0


def next_step(args: argparse.Namespace, files: Sequence[Path]) -> str:
    """Return the size of a new tokenizer, and the command that makes token files of the same texts with it."""
    size = build_tokenizer(TOKENIZER_TYPE_OF_KIND[args.kind], *files).vocab_size
    words = ["python", "tools/preprocess_data.py", "--input", *args.input, "--output-prefix", "data/mydata"]
    words += ["--append-eod", "--tokenizer-type", TOKENIZER_TYPE_OF_KIND[args.kind], "--vocab-file", str(files[0])]
    if len(files) > 1:
        words += ["--merge-file", str(files[1])]
    if "{" in args.jsonl_key or "." in args.jsonl_key:
        words += ["--text-key", args.jsonl_key]
    elif args.jsonl_key != "text":
        words += ["--jsonl-keys", args.jsonl_key]
    for flag in ("split", "config"):
        if getattr(args, flag):
            words += [f"--{flag}", getattr(args, flag)]
    if args.filter:
        words += ["--filter", *args.filter]
    return f"{size:,} ids; to make token files with it: {shlex.join(words)}"


def refuse_existing(output: Path, kind: TokenizerKind) -> None:
    """Raise ConfigError if a tokenizer would be replaced, because its data and checkpoints would lose theirs."""
    for file in tokenizer_files(output, kind):
        if file.is_file():
            raise ConfigError(
                f"{file} exists: data and checkpoints made with it need it as it is; name another --output, or replace "
                "it with --overwrite"
            )


def chosen_texts(documents: Iterable[Document], share: float, max_mb: float | None, seed: int) -> Iterator[str]:
    """Yield the texts to train on.

    Args:
        documents: All documents.
        share: Share of the documents, drawn with `seed`.
        max_mb: Millions of characters after which to stop; None reads everything.
        seed: Seed of the draw.
    """
    chance = random.Random(seed)
    left = float("inf") if max_mb is None else max_mb * 1e6
    with progress("reading", unit="characters") as bar:
        for document in documents:
            if share < 1 and chance.random() >= share:
                continue
            bar.update(len(document.text))
            yield document.text
            left -= len(document.text)
            if left <= 0:
                return


if __name__ == "__main__":
    run_script(main)
