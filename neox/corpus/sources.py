"""Named corpora, and downloads that are checked and can be resumed."""

from __future__ import annotations

import difflib
import http.client
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from neox.errors import DataError
from neox.files import fsync_file, partial_path, replace_file, sha256_of, write_text
from neox.log import get_logger

_log = get_logger(__name__)
_CHUNK = 1 << 20
_ATTEMPTS = 5
_TEMPORARY_STATUS = (408, 429, 500, 502, 503, 504)
_COMPONENTS = "https://the-eye.eu/public/AI/pile_preliminary_components"
_PILE = "https://the-eye.eu/public/AI/pile"
_C4 = "https://the-eye.eu/eleuther_staging/c4"


@dataclass(frozen=True)
class NamedCorpus:
    """Corpus with a name.

    Attributes:
        name: Name of the corpus and of its directory.
        sources: URLs, or paths of local files and directories, in order.
        num_documents: Number of documents, if it is known.
    """

    name: str
    sources: tuple[str, ...]
    num_documents: int | None = None


_PILE_TRAIN = tuple(f"{_PILE}/train/{shard:02}.jsonl.zst" for shard in range(30))
_PILE_VALIDATION = f"{_PILE}/val.jsonl.zst"
_PILE_TEST = f"{_PILE}/test.jsonl.zst"
_ARXIV = f"{_COMPONENTS}/2020-09-08-arxiv-extracts-nofallback-until-2007-068.tar.gz"
_C4_ENGLISH = tuple(f"{_C4}/en/c4-train.{shard:05}-of-01024.json.gz" for shard in range(1024))
_C4_NEWS = tuple(f"{_C4}/realnewslike/c4-train.{shard:05}-of-00512.json.gz" for shard in range(512))

_NAMED_CORPORA = (
    NamedCorpus("enron", ("http://eaidata.bmk.sh/data/enron_emails.jsonl.zst",), 517_401),
    NamedCorpus("pile_subset", _PILE_TRAIN[:1]),
    NamedCorpus("pile", (*_PILE_TRAIN, _PILE_VALIDATION, _PILE_TEST)),
    NamedCorpus("pile_validation", (_PILE_VALIDATION,)),
    NamedCorpus("pile_test", (_PILE_TEST,)),
    NamedCorpus("github", ("http://eaidata.bmk.sh/data/github_small.jsonl.zst",)),
    NamedCorpus("arxiv", (_ARXIV,), 1_264_405),
    NamedCorpus("europarl", (f"{_COMPONENTS}/EuroParliamentProceedings_1996_2011.jsonl.zst",), 69_814),
    NamedCorpus("freelaw", (f"{_COMPONENTS}/FreeLaw_Opinions.jsonl.zst",), 5_069_088),
    NamedCorpus("nih", (f"{_COMPONENTS}/NIH_ExPORTER_awarded_grant_text.jsonl.zst",), 985_651),
    NamedCorpus("pubmed", (f"{_COMPONENTS}/PMC_extracts.tar.gz",), 3_098_931),
    NamedCorpus("hackernews", (f"{_COMPONENTS}/hn.tar.gz",), 373_000),
    NamedCorpus("openwebtext2", (f"{_COMPONENTS}/openwebtext2.jsonl.zst.tar",), 17_103_000),
    NamedCorpus("stackexchange", (f"{_COMPONENTS}/stackexchange_dataset.tar",)),
    NamedCorpus("ubuntu_irc", (f"{_COMPONENTS}/ubuntu_irc_until_2020_9_1.jsonl.zst",), 10_605),
    NamedCorpus("youtube_subtitles", (f"{_COMPONENTS}/yt_subs.jsonl.zst",), 173_651),
    NamedCorpus("c4", _C4_ENGLISH),
    NamedCorpus("c4_openwebtext", _C4_NEWS),
    NamedCorpus("enwik8", ("https://data.deepai.org/enwik8.zip",), 1),
)
CORPORA: Mapping[str, NamedCorpus] = {corpus.name: corpus for corpus in _NAMED_CORPORA}

# Corpora that gpt-neox and Megatron-LM know by name, without a fixed URL. The user provides their files.
LOCAL_CORPORA = ("wikipedia", "webtext", "bookcorpus")

GPT2_VOCAB = "https://s3.amazonaws.com/models.huggingface.co/bert/gpt2-vocab.json"
GPT2_MERGES = "https://s3.amazonaws.com/models.huggingface.co/bert/gpt2-merges.txt"


def is_url(source: str) -> bool:
    """Return whether a source is a URL."""
    return urlsplit(source).scheme in ("http", "https", "file")


def find_corpus(request: str, data_dir: Path | None = None) -> NamedCorpus:
    """Return the corpus that a user asked for.

    Args:
        request: A known name (`enron`), the name of a directory in `data_dir`, or any name with its sources
            (`NAME=SOURCE[,SOURCE...]`; a source is a URL or a local path).
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
        hint = ""
        for similar in difflib.get_close_matches(name, CORPORA, n=1):
            hint = f" (did you mean {similar}?)"
        raise DataError(
            f"{name!r} is not a known corpus{hint}. Known: {', '.join(CORPORA)}. "
            f"For a corpus of your own, give {name}=PATH_OR_URL"
        )
    return CORPORA[name]


def local_name(url: str) -> str:
    """Return the file name of a URL. Raises DataError if it has none."""
    name = Path(urlsplit(url).path).name
    if not name:
        raise DataError(f"{url} does not end in a file name")
    return name


def clashing_names(sources: Sequence[str]) -> list[str]:
    """Return the file names that more than one URL has, sorted."""
    names = Counter(local_name(source) for source in sources if is_url(source))
    return sorted(name for name, count in names.items() if count > 1)


def download(
    url: str,
    path: str | Path,
    *,
    sha256: str | None = None,
    force: bool = False,
    received: Callable[[int], None] | None = None,
    pause: float = 1.0,
) -> Path:
    """Download a URL. An existing file is kept, and an interrupted download is resumed.

    The digest is written to `PATH.sha256` in the format of `sha256sum`. An existing file is checked against it.

    Args:
        url: URL to download.
        path: File to write. Until it is complete, its data are in `PATH.partial`.
        sha256: Digest that the file must have, in hexadecimal.
        force: Whether to download an existing file again.
        received: Function that is called with the number of bytes newly received.
        pause: Seconds before the second attempt. Each further pause is twice as long.

    Returns:
        The path.

    Raises:
        DataError: If five attempts fail, or the size or digest is wrong.
    """
    path = Path(path)
    digest_file = path.with_name(path.name + ".sha256")
    partial = partial_path(path)
    if path.exists() and not force:
        _check_existing(path, digest_file, sha256)
        return path
    if force:
        partial.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    _fetch_with_retries(url, partial, received, pause)
    digest = sha256_of(partial)
    if sha256 is not None and digest != sha256.lower():
        partial.unlink()
        raise DataError(f"{url} has the sha256 {digest}, not {sha256}: nothing was kept")
    write_text(digest_file, f"{digest}  {path.name}\n")
    replace_file(partial, path)
    return path


def _check_existing(path: Path, digest_file: Path, sha256: str | None) -> None:
    """Raise DataError if a file has another digest than the given one, or else than the one in its digest file."""
    expected = sha256
    if expected is None and digest_file.exists():
        words = digest_file.read_text(encoding="utf-8").split()
        expected = next(iter(words), None)
    if expected is None:
        return
    found = sha256_of(path)
    if found != expected.lower():
        raise DataError(f"{path} has the sha256 {found}, not {expected}; fetch it again with --force-redownload")


def _fetch_with_retries(url: str, partial: Path, received: Callable[[int], None] | None, pause: float) -> None:
    """Download the rest of a file. Raises DataError after an error that a retry cannot mend, or the last attempt."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _fetch(url, partial, received)
            return
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code not in _TEMPORARY_STATUS:
                raise DataError(f"{url}: {error}; give another source with NAME=URL, or a local path") from error
            if attempt == _ATTEMPTS:
                raise DataError(f"{url}: {error}, {_ATTEMPTS} times; the same command resumes the download") from error
            _log.warning("%s: %s: trying again", url, error)
            time.sleep(pause * 2 ** (attempt - 1))


def _fetch(url: str, partial: Path, received: Callable[[int], None] | None) -> None:
    """Download the rest of a file, or all of it if the server does not support ranges."""
    have = 0
    if partial.exists():
        have = partial.stat().st_size
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-", "User-Agent": "neox"})
    try:
        response: Any = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:  # the file is complete
            return
        raise
    with response:
        mode = "wb"
        expected_size = 0
        if getattr(response, "status", None) == HTTPStatus.PARTIAL_CONTENT:
            mode = "ab"
            expected_size = have
        length = response.headers.get("Content-Length")
        with open(partial, mode) as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                if received is not None:
                    received(len(chunk))
            fsync_file(file)
    if length is None:
        return
    expected_size += int(length)
    size = partial.stat().st_size
    if size != expected_size:
        raise OSError(f"the connection ended after {size:,} of {expected_size:,} bytes")
