"""Corpora and vocabularies by name: where gpt-neox's `prepare_data.py` gets them, and how to say otherwise."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from neox.errors import DataError

_COMPONENTS = "https://the-eye.eu/public/AI/pile_preliminary_components"
_PILE = "https://the-eye.eu/public/AI/pile"
_C4 = "https://the-eye.eu/eleuther_staging/c4"


@dataclass(frozen=True)
class NamedCorpus:
    """A corpus by name.

    sources: URLs, or paths of local files and directories, in order. num_documents: where known.
    """

    name: str
    sources: tuple[str, ...]
    num_documents: int | None = None

    @property
    def is_local(self) -> bool:
        """Whether nothing has to be fetched."""
        return not any(is_url(source) for source in self.sources)


CORPORA: Mapping[str, NamedCorpus] = {
    corpus.name: corpus
    for corpus in (
        NamedCorpus("enron", ("http://eaidata.bmk.sh/data/enron_emails.jsonl.zst",), 517_401),
        NamedCorpus("pile_subset", (f"{_PILE}/train/00.jsonl.zst",)),
        NamedCorpus(
            "pile",
            (
                *(f"{_PILE}/train/{shard:02}.jsonl.zst" for shard in range(30)),
                f"{_PILE}/val.jsonl.zst",
                f"{_PILE}/test.jsonl.zst",
            ),
        ),
        NamedCorpus("github", ("http://eaidata.bmk.sh/data/github_small.jsonl.zst",)),
        NamedCorpus("arxiv", (f"{_COMPONENTS}/2020-09-08-arxiv-extracts-nofallback-until-2007-068.tar.gz",), 1_264_405),
        NamedCorpus("europarl", (f"{_COMPONENTS}/EuroParliamentProceedings_1996_2011.jsonl.zst",), 69_814),
        NamedCorpus("freelaw", (f"{_COMPONENTS}/FreeLaw_Opinions.jsonl.zst",), 5_069_088),
        NamedCorpus("nih", (f"{_COMPONENTS}/NIH_ExPORTER_awarded_grant_text.jsonl.zst",), 985_651),
        NamedCorpus("pubmed", (f"{_COMPONENTS}/PMC_extracts.tar.gz",), 3_098_931),
        NamedCorpus("hackernews", (f"{_COMPONENTS}/hn.tar.gz",), 373_000),
        NamedCorpus("openwebtext2", (f"{_COMPONENTS}/openwebtext2.jsonl.zst.tar",), 17_103_000),
        NamedCorpus("stackexchange", (f"{_COMPONENTS}/stackexchange_dataset.tar",)),
        NamedCorpus("ubuntu_irc", (f"{_COMPONENTS}/ubuntu_irc_until_2020_9_1.jsonl.zst",), 10_605),
        NamedCorpus("youtube_subtitles", (f"{_COMPONENTS}/yt_subs.jsonl.zst",), 173_651),
        NamedCorpus("c4", tuple(f"{_C4}/en/c4-train.{i:05}-of-01024.json.gz" for i in range(1024))),
        NamedCorpus(
            "c4_openwebtext", tuple(f"{_C4}/realnewslike/c4-train.{i:05}-of-00512.json.gz" for i in range(512))
        ),
        NamedCorpus("enwik8", ("https://data.deepai.org/enwik8.zip",), 1),
    )
}

# Names that the field gives to files of one's own: nobody serves them under a fixed address.
LOCAL_CORPORA = ("wikipedia", "webtext")

GPT2_VOCAB = "https://s3.amazonaws.com/models.huggingface.co/bert/gpt2-vocab.json"
GPT2_MERGES = "https://s3.amazonaws.com/models.huggingface.co/bert/gpt2-merges.txt"


def is_url(source: str) -> bool:
    """Whether a source is to be fetched."""
    return urlsplit(source).scheme in ("http", "https", "file")


def find_corpus(request: str, data_dir: Path | None = None) -> NamedCorpus:
    """Return the corpus that a request means: `enron`, or `NAME=SOURCE[,SOURCE...]` with URLs or local paths.

    With `=` a known name gets other sources (`pile_subset=/data/pile/00.jsonl.zst`), and a new one is made
    (`wikipedia=/data/wiki`). Any other name is the local files in `data_dir/NAME`. Raises DataError for an unknown
    name without sources, naming the nearest one, and for `wikipedia` or `webtext` where to put the files.
    """
    name, equals, given = request.partition("=")
    if not name or name in (".", "..") or "/" in name or not name.isprintable():
        raise DataError(f"{request!r}: a corpus is NAME or NAME=SOURCE[,SOURCE...], and the name is one part of a path")
    if equals:
        sources = tuple(source for source in given.split(",") if source)
        if not sources:
            raise DataError(f"{request!r}: no source behind the =; give a path or a URL")
        return NamedCorpus(name, sources)
    if name not in CORPORA and data_dir is not None and (data_dir / name).is_dir():
        return NamedCorpus(name, (str(data_dir / name),))
    if name in LOCAL_CORPORA and data_dir is not None:
        raise DataError(
            f"{name} is a corpus of local files: put them into {data_dir / name}, or give {name}=PATH_OR_URL"
        )
    if name not in CORPORA:
        near = difflib.get_close_matches(name, CORPORA, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise DataError(
            f"{name!r} is not a known corpus; {hint}Known: {', '.join(CORPORA)}. "
            f"A corpus of your own is {name}=PATH_OR_URL"
        )
    return CORPORA[name]


def local_name(url: str) -> str:
    """The file name a URL is kept under."""
    name = Path(urlsplit(url).path).name
    if not name:
        raise DataError(f"{url} does not end in a file name")
    return name


def clashing_names(sources: Sequence[str]) -> list[str]:
    """The file names that two URLs would share."""
    names = [local_name(source) for source in sources if is_url(source)]
    return sorted({name for name in names if names.count(name) > 1})
