"""Look into datasets, check them, join and divide them.

    python tools/dataset.py info PREFIX ...                 documents, tokens, lengths, dtype, tokenizer
    python tools/dataset.py show PREFIX --documents 0,5-7   ids or, with --vocab-file, text; --samples as in training
    python tools/dataset.py verify PREFIX ...               sizes, pointers, ids, end-of-document, sidecar
    python tools/dataset.py merge PREFIX ... --output-prefix OUT
    python tools/dataset.py split INPUT ... --output-prefix OUT --split 969,30,1
    python tools/dataset.py count INPUT ...                 documents for each source

PREFIX is a path without .bin and .idx; INPUT may also be .jsonl, .jsonl.zst and whatever else preprocessing reads.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import _checkout  # noqa: F401

from neox.data import GPTDataset, IndexedDataset, check_fits, merge_datasets
from neox.data.gpt_dataset import split_documents
from neox.data.indexed_dataset import idx_path
from neox.data.split import split_dataset, split_lines
from neox.data.stats import DatasetStats, count_sources, dataset_stats
from neox.data.verify import verify_dataset
from neox.errors import DataError, run_script
from neox.log import setup_logging
from neox.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer

BAR = 40


def parser() -> argparse.ArgumentParser:
    """One sub-command for each job."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(required=True, metavar="COMMAND")
    _add_info(commands)
    _add_show(commands)
    _add_verify(commands)
    _add_merge(commands)
    _add_split(commands)
    _add_count(commands)
    return p


def _add_info(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("info", help="what a dataset holds")
    p.add_argument("prefixes", nargs="+", metavar="PREFIX")
    p.add_argument("--json", action="store_true", help="one JSON object for each dataset")
    p.set_defaults(run=info)


def _add_show(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("show", help="documents, or samples as training sees them")
    p.add_argument("prefix", metavar="PREFIX")
    which = p.add_mutually_exclusive_group()
    which.add_argument("--documents", metavar="LIST", help="numbers from 0, such as 0,5-7 (default: 0)")
    which.add_argument("--samples", metavar="LIST", help="numbers of training samples from 0")
    p.add_argument("--seq-length", type=int, default=2048, help="of the samples")
    p.add_argument("--seed", type=int, default=1234, help="of the samples")
    p.add_argument("--num-samples", type=int, default=1, help="of the run: train_iters times train_batch_size")
    p.add_argument("--split", default="969, 30, 1", help="samples are those of its first part")
    p.add_argument("--ids", action="store_true", help="show ids although a tokenizer is given")
    _add_tokenizer(p)
    p.set_defaults(run=show)


def _add_verify(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("verify", help="read everything and say what is wrong")
    p.add_argument("prefixes", nargs="+", metavar="PREFIX")
    p.add_argument("--vocab-size", type=int, help="ids must be below it (default: the tokenizer's, or the sidecar's)")
    p.add_argument("--eod", type=int, help="documents must end with this id (default: the sidecar's)")
    _add_tokenizer(p)
    p.set_defaults(run=verify)


def _add_merge(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("merge", help="join datasets, in order")
    p.add_argument("prefixes", nargs="+", metavar="PREFIX")
    p.add_argument("--output-prefix", required=True)
    p.set_defaults(run=merge)


def _add_split(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("split", help="divide documents into train, valid and test sets of their own")
    p.add_argument("inputs", nargs="+", metavar="INPUT", help="one dataset, or files of documents")
    p.add_argument("--output-prefix", required=True, help="_train, _valid and _test are added")
    p.add_argument("--split", default="969, 30, 1")
    p.add_argument("--seed", type=int, default=1234)
    p.add_argument("--skip-bad", type=int, default=0, metavar="N", help="pass over up to N bad inputs")
    p.set_defaults(run=split)


def _add_count(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser("count", help="documents for each source")
    p.add_argument("inputs", nargs="+", metavar="INPUT", help="datasets, or files of documents")
    p.add_argument("--jsonl-key", default="text")
    p.add_argument("--source-key", default="pile_set_name", help="the key in `meta` that names the source")
    p.add_argument("--skip-bad", type=int, default=0, metavar="N", help="pass over up to N bad inputs")
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=count)


def _add_tokenizer(p: argparse.ArgumentParser) -> None:
    p.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, default="HFTokenizer")
    p.add_argument("--vocab-file", "--vocab")
    p.add_argument("--merge-file")


def tokenizer_of(args: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer that the flags name; None without --vocab-file, except for the type that needs no file."""
    if args.vocab_file is None and args.tokenizer_type != "CharLevelTokenizer":
        return None
    return build_tokenizer(args.tokenizer_type, args.vocab_file, args.merge_file)


def info(args: argparse.Namespace) -> int:
    """Print what each dataset holds."""
    for prefix in args.prefixes:
        stats = dataset_stats(prefix)
        print(json.dumps(asdict(stats)) if args.json else describe(stats))
    return 0


def describe(stats: DatasetStats) -> str:
    """Statistics as lines for people."""
    lines = [
        stats.prefix,
        f"  {stats.documents:,} documents, {stats.tokens:,} tokens, {stats.data_bytes:,} bytes of {stats.dtype}, "
        f"{stats.layout} layout",
        f"  tokens in a document: {stats.shortest:,} to {stats.longest:,}, median {stats.median:,}, mean "
        f"{stats.mean:,.1f}; {stats.empty:,} empty",
    ]
    sidecar = stats.sidecar
    if sidecar is None:
        lines.append("  tokenizer: not known (no .json beside the data)")
    else:
        end = f"documents end with id {sidecar.eod}" if sidecar.append_eod else "no end-of-document id appended"
        lines.append(
            f"  tokenizer: {sidecar.tokenizer_type}, {sidecar.vocab_size:,} ids, largest here {sidecar.max_id:,}, "
            f"hash {sidecar.tokenizer_hash[:12]}; {end}"
        )
        lines.append(f"  made from: {', '.join(sidecar.inputs) or 'not known'}")
    most = max((bin.documents for bin in stats.histogram), default=1)
    for bin in stats.histogram:
        length = f"{bin.low:,}" if bin.low == bin.high else f"{bin.low:,} - {bin.high:,}"
        bar = "#" * -(-BAR * bin.documents // most)
        lines.append(f"  {length:>21} {bin.documents:>13,} documents {bin.tokens:>16,} tokens {bar}")
    return "\n".join(lines)


def show(args: argparse.Namespace) -> int:
    """Print documents or samples, as text where a tokenizer is given."""
    data, tokenizer = IndexedDataset(args.prefix), tokenizer_of(args)
    if tokenizer is not None:
        check_fits(data, vocab_size=tokenizer.vocab_size, tokenizer_hash=tokenizer.content_hash)
    if args.samples is not None:
        train = split_documents(args.split, len(data))[0]
        source = GPTDataset(data, train, args.num_samples, args.seq_length, args.seed)
        what, numbers = "sample", listed(args.samples, source.num_samples)
    else:
        source, what, numbers = data, "document", listed(args.documents or "0", len(data))
    for number in numbers:
        ids = source[number].tolist()
        print(f"--- {what} {number}: {len(ids)} tokens")
        print(" ".join(map(str, ids)) if tokenizer is None or args.ids else tokenizer.decode(ids))
    return 0


def listed(text: str, count: int) -> list[int]:
    """Numbers below `count` from a list such as `0,5-7`."""
    numbers: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    except ValueError:
        raise DataError(f"{text!r} is not a list of numbers such as 0,5-7") from None
    if not numbers or max(numbers) >= count:
        raise DataError(f"{text!r} asks for something that is not there; there are {count:,}, numbered from 0")
    return numbers


def verify(args: argparse.Namespace) -> int:
    """Check each dataset; exit code 1 when any has a problem."""
    tokenizer, broken = tokenizer_of(args), 0
    size = args.vocab_size if tokenizer is None or args.vocab_size is not None else tokenizer.vocab_size
    for prefix in args.prefixes:
        try:
            found = verify_dataset(
                prefix, vocab_size=size, eod=args.eod, tokenizer_hash=tokenizer and tokenizer.content_hash
            )
        except DataError as error:
            print(f"{prefix}: BROKEN\n  {error}")
            broken += 1
            continue
        state = "BROKEN" if found.problems else "good"
        print(f"{prefix}: {state}, {found.documents:,} documents, {found.tokens:,} tokens")
        for line in (*found.problems, *(f"note: {note}" for note in found.notes)):
            print(f"  {line}")
        broken += bool(found.problems)
    return 1 if broken else 0


def merge(args: argparse.Namespace) -> int:
    """Join datasets, and their sidecars where all have one."""
    merge_datasets(args.prefixes, args.output_prefix)
    stats = dataset_stats(args.output_prefix)
    print(f"{args.output_prefix}: {stats.documents:,} documents, {stats.tokens:,} tokens")
    return 0


def split(args: argparse.Namespace) -> int:
    """Divide one dataset, or files of documents."""
    if any(idx_path(name).exists() for name in args.inputs):
        if len(args.inputs) > 1:
            raise DataError("one dataset at a time can be divided; merge several first")
        counts = split_dataset(args.inputs[0], args.output_prefix, args.split, args.seed)
    else:
        counts = split_lines(args.inputs, args.output_prefix, args.split, args.seed, skip_bad=args.skip_bad)
    for name, documents in counts.items():
        print(f"{args.output_prefix}_{name}: {documents:,} documents")
    return 0


def count(args: argparse.Namespace) -> int:
    """Print a table of sources, the largest first."""
    counts = count_sources(args.inputs, key=args.jsonl_key, source_key=args.source_key, skip_bad=args.skip_bad)
    if args.json:
        print(json.dumps({source: asdict(found) for source, found in counts.items()}, ensure_ascii=False))
        return 0
    for source, found in sorted(counts.items(), key=lambda item: (-item[1].documents, item[0])):
        volume = f"{found.tokens:>16,} tokens" if found.tokens else f"{found.text_bytes:>16,} bytes of text"
        print(f"{found.documents:>14,} documents {volume}  {source}")
    return 0


def main() -> int:
    """Run the tool."""
    args = parser().parse_args()
    setup_logging()
    return args.run(args)


if __name__ == "__main__":
    run_script(main)
