"""Named corpora, and downloads that are checked and can be resumed."""

from __future__ import annotations

import difflib
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from neox.corpus.inputs import expand_inputs
from neox.errors import DataError
from neox.files import fsync_file, partial_path, replace_file, sha256_of, write_text
from neox.log import get_logger
from neox.storage import LONGEST_RETRY_AFTER, is_remote, open_file, proxy_advice, retry_after, shown

_log = get_logger(__name__)
_CHUNK = 1 << 20
_ATTEMPTS = 5
_CONTENT_RANGE = re.compile(r"\s*bytes\s+(\d+)-\d+/(\d+|\*)")
_TEMPORARY_STATUS = (408, 429, 500, 502, 503, 504)
_FROM_COPIES = "from a stored copy of its page, which may be old (not downloaded; read the card of today)"
_PILE = "hf://datasets/monology/pile-uncopyrighted"
_PILE_NOTE = (
    "the Pile itself is no longer served; this is the Pile without Books3, BookCorpus2, OpenSubtitles, YTSubtitles and "
    "OpenWebText2"
)
_PILE_HELD_OUT = (f"{_PILE}/val.jsonl.zst", f"{_PILE}/test.jsonl.zst")
_C4 = "hf://datasets/allenai/c4"
_DOLMA = "hf://datasets/allenai/dolma/urls"
_DOLMA_NOTE = "the hub has lists of the files, which are read from AI2's server"


@dataclass(frozen=True)
class NamedCorpus:
    """Corpus with a name.

    Attributes:
        name: Name of the corpus and of its directory.
        sources: URLs, addresses of the hub, or paths of local files and directories, in order.
        size: Size that a stored copy of the corpus' card states; empty if it states none.
        licence: Licence that the copy states.
        note: What a user should know about it.
        config: Configuration of the hub's data set.
        gone: What to use instead, if the corpus is no longer served.
        address_list: Address of a text file with the addresses of more sources, one in a line.
    """

    name: str
    sources: tuple[str, ...]
    size: str = ""
    licence: str = ""
    note: str = ""
    config: str | None = None
    gone: str = ""
    address_list: str = ""

    def described(self) -> str:
        """Return what is known of the corpus, in one line."""
        facts = [self.note, self.size, self.licence and f"licence: {self.licence}"]
        return "; ".join(filter(None, [*facts, _FROM_COPIES]))


def _gone(name: str, part: str = "", instead: str = "") -> NamedCorpus:
    """Return a corpus whose server is gone.

    Args:
        name: Its name.
        part: Name of the part of the Pile that it is.
        instead: What to use, if it is no such part.
    """
    if part:
        instead = (
            f"preprocess_data.py --input {_PILE}/train --filter 'meta.pile_set_name={part}' reads it from the Pile"
        )
    return NamedCorpus(name, (), gone=instead)


_NAMED_CORPORA = (
    NamedCorpus("enwik8", ("http://mattmahoney.net/dc/enwik8.zip",), note="100 MB of Wikipedia as XML"),
    NamedCorpus(
        "pile", (f"{_PILE}/train", f"{_PILE}/val.jsonl.zst", f"{_PILE}/test.jsonl.zst"), "", "other", _PILE_NOTE
    ),
    NamedCorpus("pile_subset", (f"{_PILE}/train/00.jsonl.zst",), "", "other", f"one of 30 files; {_PILE_NOTE}"),
    NamedCorpus("pile_validation", _PILE_HELD_OUT[:1], "338 MB", "other", _PILE_NOTE),
    NamedCorpus("pile_test", _PILE_HELD_OUT[1:], "338 MB", "other", _PILE_NOTE),
    NamedCorpus("c4", (f"{_C4}/en/c4-train.*.json.gz",), "300 GB", "odc-by"),
    NamedCorpus("c4_openwebtext", (f"{_C4}/realnewslike/c4-train.*.json.gz",), "15 GB", "odc-by", "C4's realnewslike"),
    NamedCorpus("openwebtext", ("hf://datasets/Skylion007/openwebtext",), "", "cc0-1.0"),
    NamedCorpus(
        "fineweb",
        ("hf://datasets/HuggingFaceFW/fineweb",),
        "10B tokens of more than 15T",
        "odc-by",
        config="sample-10BT",
    ),
    NamedCorpus(
        "slimpajama",
        ("hf://datasets/cerebras/SlimPajama-627B/train",),
        "895 GB compressed, with its validation and test data",
        "those of its parts",
    ),
    NamedCorpus(
        "the_stack",
        ("hf://datasets/bigcode/the-stack-dedup/data",),
        "",
        "those of the files, which are permissive",
        "its terms must be accepted on the hub; the text is under --text-key content",
    ),
    NamedCorpus(
        "dolma",
        (),
        "4.5 TB compressed",
        "odc-by",
        f"version 1.7, card of April 2024; {_DOLMA_NOTE}",
        address_list=f"{_DOLMA}/v1_7.txt",
    ),
    NamedCorpus(
        "dolma_sample",
        (),
        "16.4 GB compressed, about 10 billion tokens",
        "odc-by",
        f"sample of version 1.6, card of April 2024; {_DOLMA_NOTE}",
        address_list=f"{_DOLMA}/v1_6-sample.txt",
    ),
    _gone("enron", "Enron Emails"),
    _gone("github", "Github"),
    _gone("arxiv", "ArXiv"),
    _gone("europarl", "EuroParl"),
    _gone("freelaw", "FreeLaw"),
    _gone("nih", "NIH ExPorter"),
    _gone("pubmed", "PubMed Central"),
    _gone("hackernews", "HackerNews"),
    _gone("stackexchange", "StackExchange"),
    _gone("ubuntu_irc", "Ubuntu IRC"),
    _gone("openwebtext2", instead="openwebtext is the nearest"),
    _gone("youtube_subtitles", instead="nothing near it is known"),
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
    corpus = CORPORA[name]
    if corpus.gone:
        raise DataError(
            f"{name} is no longer served where gpt-neox looks for it: {corpus.gone}; or give {name}=PATH_OR_URL"
        )
    return corpus


def listed_addresses(address: str) -> tuple[str, ...]:
    """Return the addresses in a text file at an address, one in a line.

    Raises:
        DataError: If the file cannot be read, or holds something else.
    """
    (pinned,) = expand_inputs([address])  # to a commit, on the hub
    with open_file(pinned) as file:
        lines = file.read().decode("utf-8", "replace").split()
    for line in lines:
        if not is_remote(line):
            raise DataError(f"{address}: {line[:80]!r} is no address; the list has another form than expected")
    if not lines:
        raise DataError(f"{address}: the list is empty")
    return tuple(lines)


def local_name(url: str) -> str:
    """Return the file name of a URL. Raises DataError if it has none."""
    name = Path(urlsplit(url).path).name
    if not name:
        raise DataError(f"{shown(url)} does not end in a file name")
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

    A download is only resumed if the server's tag, date and size of the file are those with which it began; else it
    starts over. So a file never holds parts of two versions. The digest is written to `PATH.sha256` in the format of
    `sha256sum`. An existing file is checked against it.

    Args:
        url: URL to download.
        path: File to write. Until it is complete, its data are in `PATH.partial`, and what the server said about them
            in `PATH.partial.version`.
        sha256: Digest that the file must have, in hexadecimal.
        force: Whether to download an existing file again.
        received: Function that is called with the number of bytes newly received.
        pause: Seconds before the second attempt. Each further pause is twice as long.

    Returns:
        The path.

    Raises:
        DataError: If five attempts fail, or the size or digest is wrong, also that of an existing file.
    """
    path = Path(path)
    digest_file = path.with_name(path.name + ".sha256")
    partial = partial_path(path)
    if path.exists() and not force:
        expected = sha256
        if expected is None and digest_file.exists():
            expected = next(iter(digest_file.read_text(encoding="utf-8").split()), None)
        if expected is not None:
            found = sha256_of(path)
            if found != expected.lower():
                raise DataError(
                    f"{path} has the sha256 {found}, not {expected}; fetch it again with --force-redownload"
                )
        return path
    if force:
        _discard(partial)
    path.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _fetch(url, partial, received)
            break
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code not in _TEMPORARY_STATUS:
                raise DataError(f"{shown(url)}: {error}; give another source with NAME=URL, or a local path") from error
            if attempt == _ATTEMPTS:
                raise DataError(
                    f"{shown(url)}: {error}, {_ATTEMPTS} times; the same command resumes the download"
                    f"{proxy_advice(error)}"
                ) from error
            _log.warning("%s: %s: trying again", shown(url), error)
            wait = retry_after(getattr(error, "headers", None))
            time.sleep(max(pause * 2 ** (attempt - 1), min(wait, LONGEST_RETRY_AFTER)))
    digest = sha256_of(partial)
    if sha256 is not None and digest != sha256.lower():
        _discard(partial)
        raise DataError(f"{shown(url)} has the sha256 {digest}, not {sha256}: nothing was kept")
    write_text(digest_file, f"{digest}  {path.name}\n")
    replace_file(partial, path)
    _discard(partial)
    return path


@dataclass(frozen=True)
class _FileVersion:
    """What a server says about a file, by which its versions are told apart.

    Attributes:
        url: URL of the file.
        etag: Its entity tag; empty if the server sends none.
        modified: Its date of modification; empty if the server sends none.
        size: Its number of bytes; None if the server does not say.
    """

    url: str
    etag: str
    modified: str
    size: int | None

    @classmethod
    def of_response(cls, url: str, headers: Any, start: int) -> _FileVersion:
        """Return the version that a response is of, whose content begins at byte `start`."""
        size = None
        if (length := headers.get("Content-Length", "")).isdecimal():
            size = start + int(length)
        found = _CONTENT_RANGE.match(headers.get("Content-Range", ""))
        if found and found[2] != "*":
            size = int(found[2])
        return cls(url, headers.get("ETag", ""), headers.get("Last-Modified", ""), size)

    @classmethod
    def read(cls, partial: Path) -> _FileVersion | None:
        """Return the version of the file that a partial file is part of; None if that is not known."""
        try:
            return cls(**json.loads(_version_file(partial).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def is_same(self, other: _FileVersion) -> bool:
        """Return whether two responses are of one version, by all that the server says in both."""
        if self.size is None or other.size is None:
            return bool(self.etag or self.modified) and (self.etag, self.modified) == (other.etag, other.modified)
        return self == other

    def condition(self) -> dict[str, str]:
        """Return the header with which a server sends the rest of this version only (RFC 9110, 13.1.5)."""
        if self.etag and not self.etag.startswith("W/"):
            return {"If-Range": self.etag}
        if self.modified:
            return {"If-Range": self.modified}
        return {}


def _version_file(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.version")


def _discard(partial: Path) -> None:
    """Remove a partial file, and the description of its version."""
    partial.unlink(missing_ok=True)
    _version_file(partial).unlink(missing_ok=True)


def _fetch(url: str, partial: Path, received: Callable[[int], None] | None) -> None:
    """Download the rest of a file, or all of it if the server does not send the rest of the same version."""
    version = _FileVersion.read(partial)
    have = 0
    if version is None or version.url != url:
        _discard(partial)
    elif partial.exists():
        have = partial.stat().st_size
        if have == version.size:
            return

    # Ask for the rest, if the file is still the same one.
    headers = {"User-Agent": "neox", "Accept-Encoding": "identity"}
    if version is not None and have:
        headers |= {"Range": f"bytes={have}-", **version.condition()}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            _discard(partial)
            raise OSError(f"the server's file is shorter than the {have:,} bytes received: it has changed") from error
        raise
    with response:
        # Some servers begin before the byte that was asked for, and some send the rest with the status of the whole.
        start = 0
        if content_range := _CONTENT_RANGE.match(response.headers.get("Content-Range", "")):
            start = int(content_range[1])
        elif getattr(response, "status", None) == HTTPStatus.PARTIAL_CONTENT:
            start = have
        found = _FileVersion.of_response(url, response.headers, start)
        if start and (start > have or version is None or not found.is_same(version)):
            _discard(partial)
            raise OSError("the file has changed on the server since the download began")
        if not start:
            _discard(partial)
            write_text(_version_file(partial), json.dumps(asdict(found)))
        with open(partial, "r+b" if start else "wb") as file:
            file.seek(start)
            file.truncate()
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                if received is not None:
                    received(len(chunk))
            fsync_file(file)
    size = partial.stat().st_size
    if found.size is not None and size != found.size:
        raise OSError(f"the connection ended after {size:,} of {found.size:,} bytes")
