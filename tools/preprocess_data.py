# PYTHON_ARGCOMPLETE_OK
r"""Convert documents to token datasets, `PREFIX_text_document.{bin,idx,json}`.

    python tools/preprocess_data.py --input data/mydata.jsonl.zst --output-prefix data/mydata \
        --tokenizer-type HFTokenizer --vocab-file 20B_tokenizer.json --append-eod --workers 8

On several machines: `python deepy.py preprocess_data.py -H hostfile --input ...`; each slot takes a share of the
inputs. The same command resumes an interrupted run.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.corpus import Document, columns_of, expand_inputs, read_documents, read_filter
from neox.corpus.fields import template_parts
from neox.errors import ConfigError, run_script
from neox.log import progress, setup_logging
from neox.preprocess import (
    PreprocessReport,
    PreprocessSettings,
    RankInfo,
    TokenizerSpec,
    check_settings,
    preprocess_on_rank,
)
from neox.preprocess.sentences import LINES
from neox.storage import is_remote
from neox.tokenizer import TOKENIZER_TYPES, TokenizerKind, train_tokenizer
from neox.tokenizer.accelerators import ACCELERATORS


def parser() -> argparse.ArgumentParser:
    """Return the parser: gpt-neox's flags and ours."""
    p = ScriptParser(description=__doc__)
    add_input(p, ["text"], "JSON keys of texts; each makes a dataset (default: text)")
    add_text_key(p)
    p.add_argument(
        "--columns",
        nargs="+",
        default=[],
        metavar="FIELD",
        help="fields (source, meta.lang) kept beside the tokens, in PREFIX_text_document.columns.jsonl; "
        "tools/dataset.py split --by FIELD divides the tokens by them",
    )
    tokens = p.add_argument_group("tokenizer")
    tokens.add_argument("--tokenizer-type", required=True, choices=TOKENIZER_TYPES)
    tokens.add_argument("--vocab-file", "--vocab", help="tokenizer.json, vocab.json, a .model, or an encoding's name")
    tokens.add_argument(
        "--train-vocab-size",
        type=int,
        metavar="N",
        help="for SPMTokenizer: if --vocab-file does not exist, train it on the inputs, with N pieces",
    )
    tokens.add_argument("--merge-file", help="merges.txt of GPT2BPETokenizer")
    add_added_tokens(tokens)
    tokens.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document id")
    tokens.add_argument(
        "--mask-before-token",
        type=token_ids,
        default=(),
        metavar="IDS",
        help="ids such as 0,1,1270: also write labels, PREFIX_label_document. Tokens up to the first occurrence of "
        "these ids are not in the loss",
    )
    split = tokens.add_mutually_exclusive_group()
    split.add_argument(
        "--split-sentences",
        action="store_true",
        help="for BERT: each sentence is a sequence, in PREFIX_text_sentence.bin",
    )
    split.add_argument(
        "--presplit-sentences", action="store_true", help="the same for texts that have a sentence on each line"
    )
    tokens.add_argument("--language", metavar="CODE", help="language for --split-sentences (default: en)")
    tokens.add_argument("--ftfy", action="store_true", help="repair broken Unicode")
    tokens.add_argument(
        "--special-in-text",
        action=argparse.BooleanOptionalAction,
        help="whether a literal <|endoftext|> in a text is the end-of-document id (default, as in gpt-neox: yes for "
        "HFTokenizer and HFGPT2Tokenizer, no for GPT2BPETokenizer)",
    )
    out = p.add_argument_group("output")
    out.add_argument("--output-prefix", required=True, help="path without _text_document.bin")
    add_running(p, out).add_argument(
        "--accelerator", default="auto", choices=ACCELERATORS, help="default: the fastest with the same ids"
    )
    return p


def add_input(p: argparse.ArgumentParser, keys: list[str], keys_help: str) -> None:
    """Add the flags of the inputs, which `preprocess_chat.py` has too; `keys` are the JSON keys read by default."""
    add_files(p).add_argument(
        *("--jsonl-keys", "--json-keys", "--json-key"), nargs="+", default=keys, metavar="KEY", help=keys_help
    )


def add_files(p: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags of the inputs that every such tool has. Return their group."""
    data = p.add_argument_group("input")
    data.add_argument(
        "--input",
        required=True,
        nargs="+",
        help="files, directories, saved `datasets` or addresses (hf://datasets/ORG/NAME[@REV][/PATTERN], s3://, gs://, "
        "https://), separated by commas or blanks",
    )
    add_choice(data)
    data.add_argument("--num-docs", type=int, help="number of documents, if known, for the progress display")
    data.add_argument("--skip-bad", type=int, default=0, metavar="N", help="skip up to N bad inputs")
    return data


def add_choice(data: argparse._ActionsContainer) -> None:
    """Add the flags that choose documents of the inputs, which `train_tokenizer.py` has too."""
    data.add_argument("--split", metavar="NAME", help="split of a data set of the hub, or of a saved one")
    data.add_argument("--config", metavar="NAME", help="configuration of a data set of the hub")
    data.add_argument(
        "--filter",
        nargs="+",
        default=[],
        action="extend",
        metavar="CONDITION",
        help="keep documents that meet all of these: FIELD=VALUE[,VALUE...], FIELD!=VALUE, FIELD>=VALUE (<=, >, <), "
        "FIELD=LOW..HIGH; a field may have dots (meta.lang)",
    )


def add_text_key(p: argparse._ActionsContainer) -> None:
    """Add the flag of a text that several fields make."""
    p.add_argument(
        "--text-key",
        type=text_key,
        metavar="KEY",
        help=r"path with dots (data.text) or template ('{title}\n\n{text}') that finds the text; the dataset is still "
        "called by --jsonl-keys",
    )


def text_key(text: str) -> str:
    r"""Return the key of --text-key, in which `\n` and `\t` stand for a newline and a tab."""
    template_parts(text)
    return text.replace("\\n", "\n").replace("\\t", "\t")


def add_added_tokens(tokens: argparse._ArgumentGroup) -> None:
    """Add the flag of tokens that the vocabulary's file lacks, which `preprocess_chat.py` has too."""
    tokens.add_argument(
        "--added-tokens",
        nargs="+",
        default=[],
        metavar="TOKEN",
        help="tokens after the vocabulary, the same list as the run's key added_tokens",
    )


def add_running(p: argparse.ArgumentParser, out: argparse._ArgumentGroup) -> argparse._ArgumentGroup:
    """Add the flags of output and run that `preprocess_chat.py` has too. Return the group of the run."""
    out.add_argument("--dataset-impl", default="mmap", choices=["mmap", "cached", "lazy"])
    out.add_argument("--restart", action="store_true", help="discard an interrupted run; write complete data again")
    run = p.add_argument_group("running")
    run.add_argument("--workers", type=int, default=0, help="number of processes (default: one for each core)")
    run.add_argument(
        "--memory-mb", type=int, default=0, help="memory of all processes (default: 3072, and 256 for each worker)"
    )
    run.add_argument("--log-interval", type=int, metavar="N", help="write a log line every N documents")
    return run


def input_paths(words: Sequence[str]) -> tuple[str, ...]:
    """Return the paths in the words of `--input`.

    Commas, blanks, and backslashes at the ends of lines separate paths. A word that exists as it is, with its commas
    and blanks, is one path.
    """
    paths: list[str] = []
    for word in words:
        if Path(word).exists():
            paths.append(word)
            continue
        for part in word.split(","):
            part = part.strip(" \t\n\\")
            paths += [part] if Path(part).exists() or is_remote(part) else part.split()
    return tuple(path for path in paths if path not in ("", "\\"))


def token_ids(text: str) -> tuple[int, ...]:
    """Return the ids of --mask-before-token. Raises ValueError for other text."""
    ids = tuple(map(int, filter(str.strip, text.split(","))))
    if not ids or min(ids) < 0:
        raise ValueError(text)
    return ids


def sentences_of(args: argparse.Namespace) -> str | None:
    """Return how documents are split into sentences; None if they are not."""
    if args.language is not None and not args.split_sentences:
        parser().error("--language goes with --split-sentences")
    if args.presplit_sentences:
        return LINES
    if args.split_sentences:
        return args.language or "en"
    return None


def settings_of(args: argparse.Namespace) -> PreprocessSettings:
    """Return the settings of a run from the flags."""
    keys = tuple(args.jsonl_keys)
    if args.mask_before_token:
        keys = (*keys, "label")
    return shared_settings(
        args,
        tokenizer=TokenizerSpec(
            args.tokenizer_type, args.vocab_file, args.merge_file, args.special_in_text, tuple(args.added_tokens)
        ),
        keys=keys,
        ftfy=args.ftfy,
        sentences=sentences_of(args),
        accelerator=args.accelerator,
        mask_before=args.mask_before_token,
        text_key=args.text_key,
        kept_columns=tuple(dict.fromkeys(args.columns)),
    )


def shared_settings(args: argparse.Namespace, **others: Any) -> PreprocessSettings:
    """Return the settings from the flags that `preprocess_chat.py` has too, with others."""
    return PreprocessSettings(
        inputs=input_paths(args.input),
        output_prefix=args.output_prefix,
        append_eod=args.append_eod,
        impl=args.dataset_impl,
        workers=args.workers,
        memory_mb=args.memory_mb,
        skip_bad=args.skip_bad,
        restart=args.restart,
        num_documents=args.num_docs,
        log_interval=args.log_interval,
        filters=tuple(map(read_filter, args.filter)),
        split=args.split,
        config=args.config,
        **others,
    )


def train_missing_model(args: argparse.Namespace) -> None:
    """Train the SentencePiece model of --vocab-file, if --train-vocab-size asks for it and the file does not exist.

    Raises:
        ConfigError: If the flags do not fit together.
    """
    if args.train_vocab_size is None:
        return
    if args.tokenizer_type != "SPMTokenizer" or args.vocab_file is None:
        raise ConfigError("--train-vocab-size goes with --tokenizer-type SPMTokenizer and --vocab-file")
    if Path(args.vocab_file).exists():
        return
    kind: TokenizerKind = "sentencepiece" if sentences_of(args) is None else "sentencepiece-bert"
    print(*train_tokenizer(texts_of(args), args.train_vocab_size, args.vocab_file, kind), flush=True)


def complete_settings(args: argparse.Namespace) -> PreprocessSettings:
    """Return the settings of a run, after a missing model was trained."""
    train_missing_model(args)
    return settings_of(args)


def texts_of(args: argparse.Namespace) -> Iterator[str]:
    """Yield the texts of the inputs."""
    with progress("reading", unit="characters") as bar:
        documents = chosen_documents(input_paths(args.input), args.text_key or args.jsonl_keys[0], args)
        for document in documents:
            bar.update(len(document.text))
            yield document.text


def chosen_documents(paths: Sequence[str], key: str, args: argparse.Namespace) -> Iterator[Document]:
    """Return the documents of inputs that the flags of `add_choice` choose, without metadata."""
    filters = tuple(map(read_filter, args.filter))
    files = expand_inputs(paths, split=args.split, config=args.config)
    columns = columns_of([key], filters)
    return read_documents(files, key, skip_bad=args.skip_bad, filters=filters, columns=columns)


def check(args: argparse.Namespace) -> None:
    """Raise NeoXError for missing inputs, tokenizers and packages. `deepy.py` calls this before it starts ranks."""
    check_settings(complete_settings(args))


def main() -> int:
    """Run the tool."""
    return run(parser().parse_args(), complete_settings)


def run(args: argparse.Namespace, settings_of: Callable[[argparse.Namespace], PreprocessSettings]) -> int:
    """Convert this process's share, print what was made, and return the exit status."""
    setup_logging()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the run writes its state
    settings = settings_of(args)
    print_report(preprocess_on_rank(settings, RankInfo.of(os.environ)), settings)
    return 0


def print_report(report: PreprocessReport | None, settings: PreprocessSettings) -> None:
    """Print what was made. Ranks other than 0 have no report and print nothing."""
    if report is None:
        return
    for key, documents in report.documents.items():
        print(f"{settings.prefix(key)}: {documents:,} documents, {report.tokens[key]:,} tokens")
    if not report.fresh:
        print("already complete, from a run with the same inputs and settings (--restart writes it again)")
        return
    rate = report.text_bytes / 1e6 / max(report.seconds, 1e-9)
    figures = [f"{report.seconds:.1f} s", f"{rate:.1f} MB/s"]
    if report.accelerator != "off":
        figures.append(f"accelerator {report.accelerator}")
    if settings.filters:
        figures.append(f"{report.filtered:,} documents left out by --filter")
    if report.skipped:
        figures.append(f"{report.skipped:,} bad inputs skipped")
    if report.not_strict:
        figures.append(f"{report.not_strict:,} lines that only gpt-neox's JSON parser (ujson) reads")
    print(", ".join(figures))


if __name__ == "__main__":
    run_script(main)
