"""Step `filter-urls`: lists of URLs to one list without unwanted, malformed and repeated ones."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from importlib.resources import files as package_files
from itertools import islice
from pathlib import Path
from typing import IO
from urllib.parse import SplitResult, urlsplit

import numpy as np
from pydantic import Field

from neox.errors import ConfigError, DataError, os_errors
from neox.files import atomic_write
from neox.log import progress
from neox.workers import ordered_map
from tools.web_text.step import Job, Settings, Step

DUPLICATE = "duplicate"
_LINES = 8192
_BUCKETS = 64
_ENTRY = np.dtype([("digest", "<u8"), ("number", "<u8")])
_MALFORMED = re.compile(r"[\s\x00-\x1f\x7f<>\"{}|\\^`]")
# OpenWebText's list, with the two that it lost (.7z and .ai).
_EXTENSIONS = (
    "3gp 7z ai aif apk app avi bin bmp bz2 css csv dat deb dmg doc docx exe gif gifv gz iso jar jpeg jpg js log mid "
    "midi mkv mov mp3 mp4 mpeg mpg ogg ogv otf pdf pkg png pps ppt pptx psd py qt ram rar sql svg swf tar tgz tiff ttf "
    "txt wav webm webp wma wmv xls xlsx xml xz zip"
)


class FilterUrlsSettings(Settings):
    """Filter lists of URLs: by domain, extension, length and form, and each URL once.

    The inputs are `.txt` files with one URL in a line.
    """

    domains: tuple[Path, ...] = ()
    """Files with more domains to leave out, in the form of `tools/web_text/default_domains.txt`."""

    default_domains: bool = True
    """Whether the domains of `tools/web_text/default_domains.txt` are left out."""

    extensions: tuple[str, ...] = tuple(_EXTENSIONS.split())
    """Endings of paths to leave out, without the dot."""

    min_length: int = Field(9, ge=1)
    """Fewest characters of a URL."""

    max_length: int = Field(2048, ge=1)
    """Most characters of a URL."""

    keep_addresses: bool = False
    """Whether to keep URLs whose host is an address or has no public suffix, for private networks."""


@dataclass(frozen=True)
class DomainList:
    """Domains to leave out.

    Attributes:
        domains: Domains, each with everything below it.
        names: Names under any public suffix.
    """

    domains: frozenset[str]
    names: frozenset[str]

    def reason(self, host: str, name: str) -> bool:
        """Return whether a host, whose registered domain is `name.SUFFIX`, is left out."""
        if name in self.names:
            return True
        labels = host.split(".")
        return any(".".join(labels[i:]) in self.domains for i in range(len(labels) - 1))


@lru_cache(maxsize=1)
def _suffixes() -> Callable[[str], tuple[str, str]]:
    """Return the function from a host to the name of its registered domain and its public suffix."""
    import tldextract

    extract = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)  # the package's snapshot, never the network

    @lru_cache(maxsize=1 << 16)
    def split(host: str) -> tuple[str, str]:
        found = extract.extract_str(host)
        return found.domain, found.suffix

    return split


def read_domains(paths: Sequence[Path], *, default: bool) -> DomainList:
    """Read lists of domains.

    Raises:
        ConfigError: If a line is no domain, or a public suffix, under which anyone can register.
        DataError: If a file cannot be read.
    """
    texts = {"default": (package_files("tools.web_text") / "default_domains.txt").read_text()} if default else {}
    try:
        texts |= {str(path): path.read_text(encoding="utf-8") for path in paths}
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"a list of domains cannot be read: {error}") from error
    domains, names, problems = set(), set(), []
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), start=1):
            entry = line.partition("#")[0].strip().lower().removeprefix("www.")
            if not entry:
                continue
            if entry.endswith(".*") and re.fullmatch(r"[\w-]+", entry[:-2]):
                names.add(entry[:-2])
            elif _suffixes()(entry)[0] and _suffixes()(entry)[1]:
                domains.add(entry)
            else:
                problems.append(f"{path}:{number}: {entry!r} is no registered domain; write example.com or example.*")
    if problems:
        raise ConfigError(problems)
    return DomainList(frozenset(domains), frozenset(names))


@dataclass(frozen=True)
class UrlFilter:
    """Filter of lines; the same for every worker."""

    settings: FilterUrlsSettings
    blocked: DomainList

    def __call__(self, lines: list[bytes]) -> list[tuple[str, str | None, int]]:
        """Return for each line its URL, the reason why it is dropped or None, and a digest of its normal form."""
        return [self.check(line) for line in lines]

    def check(self, line: bytes) -> tuple[str, str | None, int]:
        """Check one line."""
        settings = self.settings
        if len(line) > 4 * settings.max_length:
            return f"{line[:80]!r}...", "too long", 0
        try:
            url = line.decode("utf-8").strip()
        except UnicodeDecodeError:
            return repr(line), "not UTF-8", 0
        if not settings.min_length <= len(url) <= settings.max_length:
            return url, "too short" if len(url) < settings.min_length else "too long", 0
        parts = _split(url)
        if parts is None or parts.hostname is None:
            return url, "malformed", 0
        host = parts.hostname.rstrip(".")
        name, suffix = _suffixes()(host)
        if not (name and suffix) and not settings.keep_addresses:
            return url, "no registered domain", 0
        if self.blocked.reason(host, name):
            return url, "domain", 0
        if parts.path.lower().endswith(tuple(f".{extension.lower()}" for extension in settings.extensions)):
            return url, "extension", 0
        url = parts._replace(fragment="").geturl()
        return url, None, url_digest(url)


def _split(url: str) -> SplitResult | None:
    """Return the parts of an http or https URL; None if it is malformed."""
    if _MALFORMED.search(url):
        return None
    with suppress(ValueError):
        parts = urlsplit(url)
        _ = parts.port  # raises for a bad one
        host = parts.hostname
        if parts.scheme in ("http", "https") and host and parts.username is None and _is_host(host):
            return parts
    return None


def _is_host(host: str) -> bool:
    if ":" in host:
        return bool(ipaddress.ip_address(host.partition("%")[0]))
    try:
        ascii_host = host.encode("idna").decode()
    except UnicodeError:
        return False
    return len(ascii_host) < 254 and all(
        re.fullmatch(r"[\w-]{1,63}", part) for part in ascii_host.rstrip(".").split(".")
    )


def url_digest(url: str) -> int:
    """Return 64 bits of a hash of a URL's normal form.

    The normal form has no scheme, `www.`, default port, fragment, last slash and tracking parameters, and sorts the
    parameters.
    """
    from courlan import normalize_url

    normal = normalize_url(url, strict=False, trailing_slash=False).partition("#")[0]
    normal = normal.partition("://")[2].removeprefix("www.").rstrip("/")
    return int.from_bytes(blake2b(normal.encode(), digest_size=8).digest(), "little")


def filter_urls(job: Job[FilterUrlsSettings]) -> None:
    """Write the URLs to keep, and the dropped ones with their reasons."""
    settings = job.settings
    check = UrlFilter(settings, read_domains(settings.domains, default=settings.default_domains))
    kept_path, digests = job.work / "urls", [job.work / f"digests{number:02}" for number in range(_BUCKETS)]
    total = sum(os.path.getsize(file) for file in job.files)
    count = 0
    with ExitStack() as stack:
        kept = stack.enter_context(open(kept_path, "wb"))
        buckets = [stack.enter_context(open(path, "wb")) for path in digests]
        dropped = stack.enter_context(atomic_write(job.dropped))
        bar = stack.enter_context(progress(job.name, total, "B"))
        batches = _batches(read_lines(job.files, 4 * settings.max_length, bar.update))
        for lines, results in ordered_map(check, batches, settings.workers):
            job.counts.documents_in += len(lines)
            job.counts.bytes_in += sum(map(len, lines))
            found = []
            for url, reason, digest in results:
                if reason is None:
                    found.append((digest, count))
                    kept.write(url.encode() + b"\n")
                    count += 1
                else:
                    _drop(job, dropped, url, reason)
            _distribute(np.array(found, _ENTRY), buckets)
        for file in (kept, *buckets):
            file.flush()
        repeated = _repeated(digests, count)
        with atomic_write(settings.output) as output, open(kept_path, "rb") as urls:
            for number, line in enumerate(urls):
                if repeated[number]:
                    _drop(job, dropped, line[:-1].decode(), DUPLICATE)
                else:
                    output.write(line)
                    job.counts.documents_out += 1
                    job.counts.bytes_out += len(line) - 1


def _drop(job: Job[FilterUrlsSettings], dropped: IO[bytes], url: str, reason: str) -> None:
    job.counts.drop(reason, len(url.encode()))
    dropped.write(f"{reason}\t{url}\n".encode())


def read_lines(paths: Iterable[str], limit: int, consumed: Callable[[int], object]) -> Iterator[bytes]:
    """Yield lines that are not blank, without their ends; of a line over `limit` bytes only its start."""
    for path in paths:
        with os_errors(DataError, f"{path} cannot be read"), open(path, "rb") as file:
            while line := file.readline(limit + 2):
                size, rest = len(line), line
                while len(rest) > limit and not rest.endswith(b"\n"):
                    rest = file.readline(limit + 2)
                    size += len(rest)
                consumed(size)
                if line := line.strip():
                    yield line


def _batches(lines: Iterator[bytes]) -> Iterator[list[bytes]]:
    while batch := list(islice(lines, _LINES)):
        yield batch


def _distribute(entries: np.ndarray, buckets: Sequence[IO[bytes]]) -> None:
    """Append entries to the buckets of their digests, so that equal ones come together."""
    bucket = entries["digest"] % len(buckets)
    for number in np.unique(bucket):
        buckets[number].write(entries[bucket == number].tobytes())


def _repeated(paths: Sequence[Path], count: int) -> np.ndarray:
    """Return for each URL whether an earlier one has its digest; memory holds one bucket and a byte for each URL."""
    repeated = np.zeros(count, bool)
    for path in paths:
        entries = np.fromfile(path, _ENTRY)
        first = np.unique(entries["digest"], return_index=True)[1]
        again = np.ones(len(entries), bool)
        again[first] = False
        repeated[entries["number"][again]] = True
    return repeated


def expand_suffixes(paths: Sequence[Path], suffixes: tuple[str, ...]) -> tuple[str, ...]:
    """Replace each directory by the files in it whose names have one of these ends, sorted by name.

    Raises:
        DataError: If a path does not exist, has another end, or is a directory without such files.
    """
    files: list[str] = []
    for path in paths:
        inside = sorted(str(file) for file in path.iterdir() if file.name.endswith(suffixes)) if path.is_dir() else []
        if not inside and (path.is_dir() or not path.exists() or not path.name.endswith(suffixes)):
            problem = "holds no input" if path.is_dir() else "is no input" if path.exists() else "does not exist"
            raise DataError(f"{path} {problem}: give files that end with {', '.join(suffixes)}, or directories of them")
        files += inside or [str(path)]
    return tuple(files)


FILTER_URLS = Step(
    "filter-urls",
    FilterUrlsSettings,
    filter_urls,
    suffixes=(".txt",),
    expand=partial(expand_suffixes, suffixes=(".txt",)),
    packages=("tldextract", "courlan"),
)
