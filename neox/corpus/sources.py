"""Sources of corpora by name, and resumable, checked downloads."""

from __future__ import annotations

import difflib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from neox.errors import DataError
from neox.files import fsync_file, partial_path, replace_file, sha256_of, write_text
from neox.log import get_logger

_log = get_logger(__name__)
_CHUNK = 1 << 20
_TRIES = 5
_COMPONENTS = "https://the-eye.eu/public/AI/pile_preliminary_components"
_PILE = "https://the-eye.eu/public/AI/pile"
_C4 = "https://the-eye.eu/eleuther_staging/c4"


@dataclass(frozen=True)
class NamedCorpus:
    """Corpus with a name.

    Attributes:
        name: Name, also of its directory.
        sources: URLs, or paths of local files and directories, in order.
        num_documents: Number of documents, if known.
    """

    name: str
    sources: tuple[str, ...]
    num_documents: int | None = None


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
        NamedCorpus("pile_validation", (f"{_PILE}/val.jsonl.zst",)),
        NamedCorpus("pile_test", (f"{_PILE}/test.jsonl.zst",)),
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

# Corpora that gpt-neox and Megatron-LM know by name but that have no fixed URL: the user's own files.
LOCAL_CORPORA = ("wikipedia", "webtext", "bookcorpus")

GPT2_VOCAB = "https://s3.amazonaws.com/models.huggingface.co/bert/gpt2-vocab.json"
GPT2_MERGES = "https://s3.amazonaws.com/models.huggingface.co/bert/gpt2-merges.txt"


def is_url(source: str) -> bool:
    """Return whether a source is a URL."""
    return urlsplit(source).scheme in ("http", "https", "file")


def find_corpus(request: str, data_dir: Path | None = None) -> NamedCorpus:
    """Return the corpus of a request.

    Args:
        request: A known name (`enron`), a name with sources (`NAME=SOURCE[,SOURCE...]`, URLs or local paths; it may be
            known or new), or the name of a directory in `data_dir`.
        data_dir: Directory of local corpora.

    Raises:
        DataError: If the name is invalid, or unknown and without sources.
    """
    name, equals, given = request.partition("=")
    if not name or name in (".", "..") or "/" in name or not name.isprintable():
        raise DataError(f"{request!r}: a corpus is NAME or NAME=SOURCE[,SOURCE...], and the name is one part of a path")
    if equals:
        sources = tuple(source for source in given.split(",") if source)
        if not sources:
            raise DataError(f"{request!r}: no source after the =; give a path or a URL")
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
    """Return the file name of a URL. Raises DataError if it has none."""
    name = Path(urlsplit(url).path).name
    if not name:
        raise DataError(f"{url} does not end in a file name")
    return name


def clashing_names(sources: Sequence[str]) -> list[str]:
    """Return the file names that several URLs have in common."""
    names = [local_name(source) for source in sources if is_url(source)]
    return sorted({name for name in names if names.count(name) > 1})


def download(
    url: str,
    path: str | Path,
    *,
    sha256: str | None = None,
    force: bool = False,
    received: Callable[[int], None] | None = None,
    pause: float = 1.0,
) -> Path:
    """Download a URL; an existing file is kept, an interrupted download is resumed.

    The digest is written to `PATH.sha256` in the format of `sha256sum`; an existing file is checked against it.

    Args:
        url: URL to download.
        path: File to write; until it is complete, its data are in `PATH.partial`.
        sha256: Digest it must have (hex).
        force: Whether to download an existing file again.
        received: Called with the number of bytes received.
        pause: Seconds before the second attempt, doubled after each.

    Returns:
        The path.

    Raises:
        DataError: If five attempts fail, or the size or digest is wrong.
    """
    path = Path(path)
    note, partial = path.with_name(path.name + ".sha256"), partial_path(path)
    if path.exists() and not force:
        _check_present(path, note, sha256)
        return path
    if force:
        partial.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, _TRIES + 1):
        try:
            _fetch(url, partial, received)
            break
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code not in (408, 429, 500, 502, 503, 504):
                raise DataError(f"{url}: {error}; give another source with NAME=URL, or a local path") from error
            if attempt == _TRIES:
                raise DataError(f"{url}: {error}, {_TRIES} times; the same command resumes the download") from error
            _log.warning("%s: %s: trying again", url, error)
            time.sleep(pause * 2 ** (attempt - 1))
    digest = sha256_of(partial)
    if sha256 is not None and digest != sha256.lower():
        partial.unlink()
        raise DataError(f"{url} has the sha256 {digest}, not {sha256}: nothing was kept")
    write_text(note, f"{digest}  {path.name}\n")
    replace_file(partial, path)
    return path


def _check_present(path: Path, note: Path, sha256: str | None) -> None:
    noted = note.read_text(encoding="utf-8").split()[:1] if note.exists() else []
    wanted = sha256.lower() if sha256 else (noted[0] if noted else None)
    if wanted is not None and (found := sha256_of(path)) != wanted:
        raise DataError(f"{path} has the sha256 {found}, not {wanted}; fetch it again with --force-redownload")


def _fetch(url: str, partial: Path, received: Callable[[int], None] | None) -> None:
    """Download the missing rest; without support for ranges, the whole file."""
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-", "User-Agent": "neox"})
    try:
        response: Any = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # the file is complete
            return
        raise
    with response:
        continues = getattr(response, "status", None) == 206
        length = response.headers.get("Content-Length")
        total = None if length is None else int(length) + (have if continues else 0)
        with open(partial, "ab" if continues else "wb") as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                if received is not None:
                    received(len(chunk))
            fsync_file(file)
    if total is not None and (size := partial.stat().st_size) != total:
        raise OSError(f"the connection ended after {size:,} of {total:,} bytes")
