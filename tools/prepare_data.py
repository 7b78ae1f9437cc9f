# PYTHON_ARGCOMPLETE_OK
"""Download corpora by name and convert them to token datasets, `DATA_DIR/NAME/NAME_text_document.{bin,idx,json}`.

    python tools/prepare_data.py fineweb -t HFTokenizer -v 20B_tokenizer.json
    python tools/prepare_data.py pile_subset=/data/pile/00.jsonl.zst wikipedia=/data/wiki --combine mix
    python tools/prepare_data.py mine=/data/texts --archive data/mine_archive

A corpus is a known name, the name of a directory in the data directory (`wikipedia`, `webtext`), or
NAME=SOURCE[,SOURCE...] with local paths, URLs or addresses (hf://, s3://); these replace the sources of a known name.
What has an address is read while it is tokenized, and not kept. The same command resumes
interrupted downloads and tokenization.
"""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.corpus import expand_inputs, read_documents, write_archive
from neox.corpus.sources import (
    CORPORA,
    GPT2_MERGES,
    GPT2_VOCAB,
    NamedCorpus,
    clashing_names,
    download,
    find_corpus,
    is_url,
    listed_addresses,
    local_name,
)
from neox.errors import DataError, run_script
from neox.log import progress, setup_logging
from neox.preprocess import PreprocessSettings, TokenizerSpec, preprocess
from neox.storage import is_remote
from neox.tokenizer import TOKENIZER_TYPES


def parser() -> argparse.ArgumentParser:
    """Return the parser: gpt-neox's flags and ours."""
    p = ScriptParser(description=__doc__)
    known = ", ".join(name for name, corpus in CORPORA.items() if not corpus.gone)
    p.add_argument("dataset", nargs="*", default=["enwik8"], help=f"known: {known} (default: enwik8)")
    p.add_argument("-t", "--tokenizer", default="GPT2BPETokenizer", choices=TOKENIZER_TYPES)
    p.add_argument("-d", "--data-dir", default="data", help="directory of all files (default: data)")
    p.add_argument("-v", "--vocab-file", help="vocabulary (GPT2BPETokenizer: downloaded to DATA_DIR/gpt2-vocab.json)")
    p.add_argument("-m", "--merge-file", help="merges (GPT2BPETokenizer: downloaded to DATA_DIR/gpt2-merges.txt)")
    p.add_argument("-f", "--force-redownload", action="store_true", help="download existing files again")
    p.add_argument("--combine", metavar="NAME", help="make one dataset of this name from all corpora, in their order")
    p.add_argument(
        "--sha256", action="append", default=[], metavar="FILE=DIGEST", help="digest of a download (repeatable)"
    )
    p.add_argument("--download-only", action="store_true", help="only download")
    p.add_argument(
        "--archive",
        metavar="DIRECTORY",
        help="write an archive of lm-dataformat from all corpora, instead of datasets",
    )
    p.add_argument("--workers", type=int, default=0, help="number of processes (default: one for each core)")
    p.add_argument("--memory-mb", type=int, default=0, help="as in preprocess_data.py")
    p.add_argument("--skip-bad", type=int, default=0, metavar="N", help="skip up to N bad inputs")
    return p


def main() -> int:
    """Run the tool."""
    args = parser().parse_args()
    setup_logging()
    data_dir = Path(args.data_dir)
    corpora = [find_corpus(request, data_dir) for request in args.dataset]
    digests = read_digests(args.sha256)
    inputs: dict[str, tuple[str, ...]] = {}
    for corpus in corpora:
        if corpus.name in CORPORA and corpus == CORPORA[corpus.name]:
            print(f"{corpus.name}: {corpus.described()}", flush=True)
        inputs[corpus.name] = fetch(corpus, data_dir / corpus.name, digests, args.force_redownload)
    if args.download_only:
        streamed = [source for sources in inputs.values() for source in sources if is_remote(source)]
        if streamed:
            raise DataError(f"{streamed[0]} is read while it is tokenized; leave out --download-only")
        return 0
    if args.archive:
        files = [*chain.from_iterable(inputs.values())]
        count = write_archive(args.archive, read_documents(files, skip_bad=args.skip_bad))
        print(f"{args.archive}: {count:,} documents")
        return 0
    spec = tokenizer_files(args, data_dir)
    if args.combine:
        inputs = {args.combine: tuple(chain.from_iterable(inputs[corpus.name] for corpus in corpora))}
    for name, files in inputs.items():
        prefix = data_dir / name / name
        report = preprocess(
            PreprocessSettings(
                inputs=files,
                output_prefix=str(prefix),
                tokenizer=spec,
                append_eod=True,
                workers=args.workers,
                memory_mb=args.memory_mb,
                skip_bad=args.skip_bad,
            )
        )
        print(f"{prefix}_text_document: {report.documents['text']:,} documents, {report.tokens['text']:,} tokens")
    return 0


def read_digests(given: list[str]) -> dict[str, str]:
    """Parse FILE=DIGEST pairs. Raises DataError for other text."""
    pairs = {}
    for pair in given:
        file, _, digest = pair.rpartition("=")
        if not file or len(digest) != 64:
            raise DataError("--sha256 takes FILE=DIGEST with the 64 hex digits of `sha256sum`")
        pairs[file] = digest
    return pairs


def fetch(corpus: NamedCorpus, folder: Path, digests: dict[str, str], force: bool) -> tuple[str, ...]:
    """Download the sources that are URLs; return the files of all sources in order."""
    clashes = clashing_names(corpus.sources)
    if clashes:
        raise DataError(f"{corpus.name}: several sources are called {', '.join(clashes)}; download them separately")
    files: list[str] = []
    if corpus.address_list:
        files += listed_addresses(corpus.address_list)
    for source in corpus.sources:
        if is_remote(source) and not is_url(source):
            files += expand_inputs([source], config=corpus.config)
            continue
        if not is_url(source):
            files.append(source)
            continue
        name = local_name(source)
        with progress(f"downloading {name}", unit="B") as bar:
            path = download(source, folder / name, sha256=digests.get(name), force=force, received=bar.update)
        files.append(str(path))
    return tuple(files)


def tokenizer_files(args: argparse.Namespace, data_dir: Path) -> TokenizerSpec:
    """Return the tokenizer. If GPT2BPETokenizer is given no files, GPT-2's own are downloaded."""
    vocab = args.vocab_file
    merges = args.merge_file
    if args.tokenizer == "GPT2BPETokenizer":
        vocab = vocab or str(download(GPT2_VOCAB, data_dir / "gpt2-vocab.json"))
        merges = merges or str(download(GPT2_MERGES, data_dir / "gpt2-merges.txt"))
    return TokenizerSpec(args.tokenizer, vocab, merges)


if __name__ == "__main__":
    run_script(main)
