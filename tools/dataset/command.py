"""Command line of `tools/dataset.py`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import pairwise
from typing import get_args

import numpy as np

from neox.arguments import ScriptParser
from neox.config.sections.data import PackImpl
from neox.data import GPTDataset, IndexedDataset, check_fits, merge_datasets
from neox.data.gpt_dataset import split_documents
from neox.data.indexed_dataset import idx_path
from neox.data.packing import Packing
from neox.data.sidecar import check_labels
from neox.errors import DataError, os_errors
from neox.log import setup_logging
from neox.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer
from tools.dataset.split import split_dataset, split_lines
from tools.dataset.stats import DatasetStats, count_sources, dataset_stats
from tools.dataset.verify import verify_dataset

_DESCRIPTION = """Inspect, verify, merge and split token datasets.

    python tools/dataset.py info PREFIX ...                 documents, tokens, lengths, dtype, tokenizer
    python tools/dataset.py show PREFIX --documents 0,5-7   ids or, with --vocab-file, text; --samples as in training;
                                                            --labels PREFIX marks what is in the loss
    python tools/dataset.py verify PREFIX ...               sizes, pointers, ids, end-of-document, sidecar
    python tools/dataset.py merge PREFIX ... --output-prefix OUT
    python tools/dataset.py split INPUT ... --output-prefix OUT --split 969,30,1
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
    c.add_argument("--seq-length", type=int, default=2048, help="of the samples")
    c.add_argument("--seed", type=int, default=1234, help="of the samples")
    c.add_argument("--num-samples", type=int, default=1, help="of the run: train_iters times train_batch_size")
    c.add_argument("--split", default="969, 30, 1", help="samples are those of its first part")
    c.add_argument("--pack-impl", choices=get_args(PackImpl), default="packed", help="of the samples")
    c.add_argument("--allow-chopped", action=argparse.BooleanOptionalAction, default=True, help="of the samples")
    c.add_argument("--labels", metavar="PREFIX", help="labels of the dataset; + and - mark what is in the loss or not")
    c.add_argument("--ids", action="store_true", help="show ids although a tokenizer is given")
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
    c.add_argument("--output-prefix", required=True, help="_train, _valid and _test are appended")
    c.add_argument("--split", default="969, 30, 1")
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


def tokenizer_of(args: argparse.Namespace) -> Tokenizer | None:
    """Return the tokenizer of the flags; None without --vocab-file, except for the type that needs no file."""
    if args.vocab_file is None and args.tokenizer_type != "CharLevelTokenizer":
        return None
    return build_tokenizer(args.tokenizer_type, args.vocab_file, args.merge_file)


def info(args: argparse.Namespace) -> int:
    """Print the statistics of each dataset."""
    for prefix in args.prefixes:
        stats = dataset_stats(prefix)
        print(json.dumps(asdict(stats)) if args.json else describe(stats))
    return 0


def describe(stats: DatasetStats) -> str:
    """Format the statistics of a dataset as text."""
    unit = "document" if stats.sequences == stats.documents else "sentence"
    sentences = f"{stats.sequences:,} sentences, " if unit == "sentence" else ""
    lines = [
        stats.prefix,
        f"  {stats.documents:,} documents, {sentences}{stats.tokens:,} tokens, {stats.data_bytes:,} bytes of "
        f"{stats.dtype}, {stats.layout} layout",
        f"  tokens in a {unit}: {stats.shortest:,} to {stats.longest:,}, median {stats.median:,}, mean "
        f"{stats.mean:,.1f}; {stats.empty:,} empty",
    ]
    sidecar = stats.sidecar
    if sidecar is None:
        lines.append("  tokenizer: unknown (there is no .json)")
    else:
        end = f"documents end with id {sidecar.eod}" if sidecar.append_eod else "no end-of-document id appended"
        lines.append(
            f"  tokenizer: {sidecar.tokenizer_type}, {sidecar.vocab_size:,} ids, largest here {sidecar.max_id:,}, "
            f"hash {sidecar.tokenizer_hash[:12]}; {end}"
        )
        lines.append(f"  made from: {', '.join(sidecar.inputs) or 'unknown'}")
    most = max((bin.documents for bin in stats.histogram), default=1)
    for bin in stats.histogram:
        length = f"{bin.low:,}" if bin.low == bin.high else f"{bin.low:,} - {bin.high:,}"
        bar = "#" * -(-_BAR * bin.documents // most)
        lines.append(f"  {length:>21} {bin.documents:>13,} {unit}s {bin.tokens:>16,} tokens {bar}")
    return "\n".join(lines)


def show(args: argparse.Namespace) -> int:
    """Print documents or samples, as text if a tokenizer is given."""
    data, tokenizer = IndexedDataset(args.prefix), tokenizer_of(args)
    labels = None if args.labels is None else IndexedDataset(args.labels)
    if tokenizer is not None:
        check_fits(data, vocab_size=tokenizer.vocab_size, tokenizer_hash=tokenizer.content_hash)
    if labels is not None:
        check_labels(data, labels)
    if args.samples is not None:
        if data.num_documents != len(data):
            raise DataError(
                f"{args.prefix} is a dataset of sentences: --samples shows samples of documents; leave it out"
            )
        documents, packing = split_documents(args.split, len(data))[0], Packing(args.pack_impl, args.allow_chopped)
        samples = GPTDataset(
            data, documents, args.num_samples, args.seq_length, args.seed, packing=packing, labels=labels
        )
        numbers = listed(args.samples, samples.num_samples)
        names = [f"sample {n}" for n in numbers]
        rows = ((samples.read([n])[0], samples.read_labels([n])[0] if samples.has_labels else None) for n in numbers)
    else:
        names, numbers = sequences_of(data, listed(args.documents or "0", data.num_documents))
        rows = ((data[n], None if labels is None else labels[n]) for n in numbers)
    decoder = None if args.ids else tokenizer

    def written(ids: np.ndarray) -> str:
        return " ".join(map(str, ids)) if decoder is None else decoder.decode(ids.tolist())

    for name, (ids, targets) in zip(names, rows, strict=True):
        if targets is None:
            print(f"--- {name}: {len(ids)} tokens\n{written(ids)}")
            continue
        counted = targets >= 0
        print(f"--- {name}: {len(ids)} tokens, {counted[1:].sum()} in the loss")
        bounds = np.flatnonzero(np.diff(counted, prepend=~counted[:1], append=~counted[-1:]))
        for first, stop in pairwise(bounds.tolist()):
            mark = "+" if counted[first] else "-"
            print("\n".join(f"{mark} {line}" for line in written(ids[first:stop]).split("\n")))
    return 0


def sequences_of(data: IndexedDataset, documents: list[int]) -> tuple[list[str], list[int]]:
    """Return names and numbers of the sequences of documents: one each, or their sentences."""
    names, numbers = list[str](), list[int]()
    for document in documents:
        first, stop = map(int, data.document_index[document : document + 2])
        numbers += range(first, stop)
        if data.num_documents == len(data):
            names += [f"document {document}"] * (stop - first)
        else:
            names += [f"document {document}, sentence {n}" for n in range(stop - first)]
    return names, numbers


def listed(text: str, count: int) -> list[int]:
    """Return the numbers of a list such as `0,5-7`. Raises DataError for numbers from `count` on."""
    numbers: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    except ValueError:
        raise DataError(f"{text!r} is not a list of numbers such as 0,5-7") from None
    if not numbers or max(numbers) >= count:
        raise DataError(f"{text!r} has numbers that do not exist; there are {count:,}, numbered from 0")
    return numbers


def verify(args: argparse.Namespace) -> int:
    """Verify each dataset; the exit code is 1 if any has a defect."""
    tokenizer, broken = tokenizer_of(args), 0
    size = args.vocab_size if tokenizer is None or args.vocab_size is not None else tokenizer.vocab_size
    for prefix in args.prefixes:
        try:
            digest = None if tokenizer is None else tokenizer.content_hash
            found = verify_dataset(prefix, vocab_size=size, eod=args.eod, tokenizer_hash=digest)
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
    """Concatenate datasets, and their sidecars if all have one."""
    with os_errors(DataError, f"{args.output_prefix} cannot be written"):
        merge_datasets(args.prefixes, args.output_prefix)
    stats = dataset_stats(args.output_prefix)
    print(f"{args.output_prefix}: {stats.documents:,} documents, {stats.tokens:,} tokens")
    return 0


def split(args: argparse.Namespace) -> int:
    """Split one dataset, or files of documents."""
    with os_errors(DataError, f"{args.output_prefix} cannot be written"):
        if any(idx_path(name).exists() for name in args.inputs):
            if len(args.inputs) > 1:
                raise DataError("only one dataset can be split at a time; merge several first")
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
    code: int = args.run(args)
    return code
