"""Command line of `tools/dataset.py`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import get_args

from neox.arguments import ScriptParser
from neox.config.sections.data import PackImpl
from neox.data import IndexedDataset, check_fits, merge_datasets
from neox.data.samples.packing import Packing
from neox.data.token_files.columns import column_names
from neox.data.token_files.indexed_dataset import idx_path
from neox.data.token_files.sidecar import Sidecar, check_labels
from neox.errors import DataError, os_errors
from neox.log import setup_logging
from neox.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer
from tools.dataset.show import SampleShape, documents, print_rows, samples
from tools.dataset.split import split_by_column, split_dataset, split_lines
from tools.dataset.stats import DatasetStats, count_sources, dataset_stats
from tools.dataset.verify import verify_dataset

_DESCRIPTION = """Inspect, verify, merge and split token datasets.

    python tools/dataset.py info PREFIX ...                 documents, tokens, lengths, dtype, tokenizer
    python tools/dataset.py show PREFIX --documents 0,5-7   ids or, with --vocab-file, text; --samples as in training;
                                                            --labels PREFIX marks what is in the loss
    python tools/dataset.py verify PREFIX ...               sizes, pointers, ids, end-of-document, sidecar
    python tools/dataset.py merge PREFIX ... --output-prefix OUT
    python tools/dataset.py split INPUT ... --output-prefix OUT --split 969,30,1
    python tools/dataset.py split PREFIX --output-prefix OUT --by COLUMN
                                                            one dataset for each value of a column that was kept
    python tools/dataset.py count INPUT ...                 documents of each source

PREFIX is a path without .bin and .idx; INPUT may also be .jsonl, .jsonl.zst or any other input of preprocessing.
"""
_BAR = 40
_INFO = "size, lengths and tokenizer of datasets"


def parser() -> argparse.ArgumentParser:
    """Return the parser, with a sub-command for each job."""
    p = ScriptParser(description=_DESCRIPTION)
    commands = p.add_subparsers(required=True, metavar="COMMAND")

    c = commands.add_parser("info", help=_INFO, description=_INFO)
    c.add_argument("prefixes", nargs="+", metavar="PREFIX")
    c.add_argument("--json", action="store_true", help="one JSON object for each dataset")
    c.set_defaults(run=info)

    c = commands.add_parser(
        "show",
        help="documents, or samples as in training",
        description="Print documents as text, or samples as training reads them.",
    )
    c.add_argument("prefix", metavar="PREFIX")
    which = c.add_mutually_exclusive_group()
    which.add_argument("--documents", metavar="LIST", help="numbers from 0, such as 0,5-7 (default: 0)")
    which.add_argument("--samples", metavar="LIST", help="numbers of training samples from 0")
    c.add_argument("--labels", metavar="PREFIX", help="labels of the dataset; + and - mark what is in the loss or not")
    c.add_argument("--ids", action="store_true", help="show ids although a tokenizer is given")
    run = c.add_argument_group("settings of the run whose samples are shown")
    run.add_argument("--seq-length", type=int, default=2048, help="tokens of a sample (default: 2048)")
    run.add_argument("--seed", type=int, default=1234, help="seed of the run (default: 1234)")
    run.add_argument("--num-samples", type=int, default=1, help="train_iters times train_batch_size (default: 1)")
    run.add_argument("--split", default="969, 30, 1", help="samples come from its first part (default: 969, 30, 1)")
    run.add_argument("--pack-impl", choices=get_args(PackImpl), default="packed", help="how documents are joined")
    run.add_argument(
        "--allow-chopped", action=argparse.BooleanOptionalAction, default=True, help="whether documents may be cut"
    )
    _add_tokenizer(c)
    c.set_defaults(run=show)

    c = commands.add_parser(
        "verify",
        help="read all data and report defects",
        description="Read all data, and report each defect that is found.",
    )
    c.add_argument("prefixes", nargs="+", metavar="PREFIX")
    c.add_argument("--vocab-size", type=int, help="limit of the ids (default: the tokenizer's, or the sidecar's)")
    c.add_argument("--eod", type=int, help="id with which documents must end (default: the sidecar's)")
    _add_tokenizer(c)
    c.set_defaults(run=verify)

    c = commands.add_parser(
        "merge",
        help="concatenate datasets",
        description="Write the documents of several datasets, in order, as one dataset.",
    )
    c.add_argument("prefixes", nargs="+", metavar="PREFIX")
    c.add_argument("--output-prefix", required=True)
    c.set_defaults(run=merge)

    c = commands.add_parser(
        "split",
        help="divide documents into separate train, valid and test sets",
        description="Divide documents at random into separate train, valid and test sets.",
    )
    c.add_argument("inputs", nargs="+", metavar="INPUT", help="one dataset, or files of documents")
    c.add_argument("--output-prefix", required=True, help="_train, _valid and _test, or values, are appended")
    c.add_argument("--split", default="969, 30, 1", help="shares; a part without one is not written")
    c.add_argument("--by", metavar="COLUMN", help="divide by this column of preprocess_data.py --columns instead")
    c.add_argument("--seed", type=int, default=1234)
    c.add_argument("--skip-bad", type=int, default=0, metavar="N", help="skip up to N bad inputs")
    c.set_defaults(run=split)

    c = commands.add_parser(
        "count", help="documents of each source", description="Count the documents of each source in datasets or files."
    )
    c.add_argument("inputs", nargs="+", metavar="INPUT", help="datasets, or files of documents")
    c.add_argument("--jsonl-key", default="text")
    c.add_argument("--source-key", default="pile_set_name", help="key in `meta` that names the source")
    c.add_argument("--skip-bad", type=int, default=0, metavar="N", help="skip up to N bad inputs")
    c.add_argument("--json", action="store_true")
    c.set_defaults(run=count)
    return p


def _add_tokenizer(p: argparse.ArgumentParser) -> None:
    p.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, default="HFTokenizer")
    p.add_argument("--vocab-file", "--vocab")
    p.add_argument("--merge-file")
    p.add_argument("--added-tokens", nargs="+", default=[], metavar="TOKEN", help="added_tokens of the run")


def tokenizer_of(args: argparse.Namespace) -> Tokenizer | None:
    """Return the tokenizer of the flags; None without --vocab-file, except for the type that needs no file."""
    if args.vocab_file is None and args.tokenizer_type != "CharLevelTokenizer":
        return None
    return build_tokenizer(args.tokenizer_type, args.vocab_file, args.merge_file, added_tokens=args.added_tokens)


def info(args: argparse.Namespace) -> int:
    """Print the statistics of each dataset."""
    for prefix in args.prefixes:
        stats = dataset_stats(prefix)
        print(json.dumps(asdict(stats)) if args.json else describe(stats))
    return 0


def describe(stats: DatasetStats) -> str:
    """Return the statistics of a dataset as text."""
    unit = "document"
    sentences = ""
    if stats.sequences != stats.documents:
        unit = "sentence"
        sentences = f"{stats.sequences:,} sentences, "
    lines = [
        stats.prefix,
        f"  {stats.documents:,} documents, {sentences}{stats.tokens:,} tokens, {stats.data_bytes:,} bytes of "
        f"{stats.dtype}, {stats.layout} layout",
        f"  tokens in a {unit}: {stats.shortest:,} to {stats.longest:,}, median {stats.median:,}, mean "
        f"{stats.mean:,.1f}; {stats.empty:,} empty",
    ]
    lines += _origin(stats.sidecar)
    most = max((bin.documents for bin in stats.histogram), default=1)
    for bin in stats.histogram:
        length = f"{bin.low:,}"
        if bin.low != bin.high:
            length += f" - {bin.high:,}"
        bar = "#" * -(-_BAR * bin.documents // most)
        lines.append(f"  {length:>21} {bin.documents:>13,} {unit}s {bin.tokens:>16,} tokens {bar}")
    return "\n".join(lines)


def _origin(sidecar: Sidecar | None) -> list[str]:
    """Return lines on the tokenizer and the inputs."""
    if sidecar is None:
        return ["  tokenizer: unknown (there is no .json)"]
    end = f"documents end with id {sidecar.eod}" if sidecar.append_eod else "no end-of-document id appended"
    return [
        f"  tokenizer: {sidecar.tokenizer_type}, {sidecar.vocab_size:,} ids, largest here {sidecar.max_id:,}, "
        f"hash {sidecar.tokenizer_hash[:12]}; {end}",
        f"  made from: {', '.join(sidecar.inputs) or 'unknown'}",
        f"  columns: {', '.join(column_names(sidecar)) or 'none'}",
    ]


def show(args: argparse.Namespace) -> int:
    """Print documents or samples, as text if a tokenizer is given."""
    data = IndexedDataset(args.prefix)
    tokenizer = tokenizer_of(args)
    labels = None if args.labels is None else IndexedDataset(args.labels)
    if tokenizer is not None:
        check_fits(data, vocab_size=tokenizer.vocab_size, tokenizer_hashes=tokenizer.known_hashes)
    if labels is not None:
        check_labels(data, labels)
    if args.samples is None:
        rows = documents(data, labels, args.documents or "0")
    else:
        packing = Packing(args.pack_impl, args.allow_chopped)
        shape = SampleShape(args.split, args.num_samples, args.seq_length, args.seed, packing)
        rows = samples(data, labels, args.samples, shape)
    print_rows(rows, None if args.ids else tokenizer)
    return 0


def verify(args: argparse.Namespace) -> int:
    """Verify each dataset; the exit code is 1 if any has a defect."""
    tokenizer = tokenizer_of(args)
    size = args.vocab_size
    hashes: tuple[str, ...] = ()
    if tokenizer is not None:
        hashes = tokenizer.known_hashes
        size = tokenizer.vocab_size if size is None else size
    broken = 0
    for prefix in args.prefixes:
        try:
            found = verify_dataset(prefix, vocab_size=size, eod=args.eod, tokenizer_hashes=hashes)
        except DataError as error:
            print(f"{prefix}: BROKEN\n  {error}")
            broken += 1
            continue
        state = "BROKEN" if found.problems else "good"
        print(f"{prefix}: {state}, {found.documents:,} documents, {found.tokens:,} tokens")
        for problem in found.problems:
            print(f"  {problem}")
        for note in found.notes:
            print(f"  note: {note}")
        broken += bool(found.problems)
    return 1 if broken else 0


def merge(args: argparse.Namespace) -> int:
    """Concatenate datasets, and their sidecars if all have one."""
    with os_errors(DataError, f"{args.output_prefix} cannot be written"):
        merge_datasets(args.prefixes, args.output_prefix)
    stats = dataset_stats(args.output_prefix)
    print(f"{args.output_prefix}: {stats.documents:,} documents, {stats.tokens:,} tokens")
    return 0


def split(args: argparse.Namespace) -> int:
    """Split one dataset, or files of documents."""
    if args.by is not None:
        return split_by(args)
    with os_errors(DataError, f"{args.output_prefix} cannot be written"):
        if any(idx_path(name).exists() for name in args.inputs):
            if len(args.inputs) > 1:
                raise DataError("only one dataset can be split at a time; merge several first")
            counts = split_dataset(args.inputs[0], args.output_prefix, args.split, args.seed)
        else:
            counts = split_lines(args.inputs, args.output_prefix, args.split, args.seed, skip_bad=args.skip_bad)
    for name, number in counts.items():
        print(f"{args.output_prefix}_{name}: {number:,} documents")
    return 0


def split_by(args: argparse.Namespace) -> int:
    """Split one dataset by a column, and print the keys of a run that reads the parts in proportion to their sizes."""
    if len(args.inputs) > 1:
        raise DataError("only one dataset can be split at a time; merge several first")
    with os_errors(DataError, f"{args.output_prefix} cannot be written"):
        parts = split_by_column(args.inputs[0], args.output_prefix, args.by)
    prefixes = []
    weights = []
    for value, (prefix, totals) in parts.items():
        print(f"{prefix}: {totals['documents']:,} documents, {totals['tokens']:,} tokens, {args.by} {value}")
        prefixes.append(prefix)
        weights.append(totals["tokens"])
    print(f"train_data_paths: {json.dumps(prefixes)}\ntrain_data_weights: {json.dumps(weights)}   # as they are now")
    return 0


def count(args: argparse.Namespace) -> int:
    """Print a table of sources, the largest first."""
    counts = count_sources(args.inputs, key=args.jsonl_key, source_key=args.source_key, skip_bad=args.skip_bad)
    if args.json:
        print(json.dumps({source: asdict(found) for source, found in counts.items()}, ensure_ascii=False))
        return 0
    for source, found in sorted(counts.items(), key=lambda item: (-item[1].documents, item[0])):
        volume = f"{found.text_bytes:>16,} bytes of text"
        if found.tokens:
            volume = f"{found.tokens:>16,} tokens"
        print(f"{found.documents:>14,} documents {volume}  {source}")
    return 0


def main() -> int:
    """Run the tool."""
    args = parser().parse_args()
    setup_logging()
    code: int = args.run(args)
    return code
