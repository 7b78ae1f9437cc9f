# PYTHON_ARGCOMPLETE_OK
"""Train a tokenizer on documents: 20B-style byte-level BPE, GPT-2's two files, SentencePiece, or BERT's WordPiece.

python tools/train_tokenizer.py --input data/mydata.jsonl.zst --vocab-size 50257 --output 20B_tokenizer.json
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.corpus import read_documents
from neox.errors import run_script
from neox.log import progress, setup_logging
from neox.tokenizer import TOKENIZER_KINDS, train_tokenizer


def parser() -> argparse.ArgumentParser:
    """Return the parser; second names are gpt-neox's."""
    p = ScriptParser(description=__doc__)
    p.add_argument("--input", "--json_input_dir", required=True, help="files or directories, separated by commas")
    p.add_argument("--jsonl-key", default="text", help="JSON key of the text")
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
    texts = chosen_texts(args.input.split(","), args.jsonl_key, args.skip_bad, args.sample, args.max_mb, args.seed)
    for path in train_tokenizer(texts, args.vocab_size, args.output, args.kind):
        print(path)
    return 0


def chosen_texts(
    inputs: Sequence[str], key: str, skip_bad: int, share: float, max_mb: float | None, seed: int
) -> Iterator[str]:
    """Yield the texts to train on.

    Args:
        inputs: Files or directories.
        key: JSON key of the text.
        skip_bad: Number of bad inputs that may be skipped.
        share: Share of the documents, drawn with `seed`.
        max_mb: Millions of characters after which to stop; None reads everything.
        seed: Seed of the draw.
    """
    chance = random.Random(seed)
    left = float("inf") if max_mb is None else max_mb * 1e6
    with progress("reading", unit="characters") as bar:
        for document in read_documents(list(filter(None, inputs)), key, skip_bad=skip_bad):
            if share < 1 and chance.random() >= share:
                continue
            bar.update(len(document.text))
            yield document.text
            left -= len(document.text)
            if left <= 0:
                return


if __name__ == "__main__":
    run_script(main)
