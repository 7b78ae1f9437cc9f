"""Step `filter-urls`: joins lists of URLs without the unwanted, malformed and repeated ones."""

from __future__ import annotations

import codecs
import ipaddress
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
from neox.storage import files_at, is_remote, open_file
from neox.workers import ordered_map
from tools.web_text.lines import total_bytes
from tools.web_text.step import Job, Settings, Step

DUPLICATE = "duplicate"
_LINES = 8192
_BUCKETS = 64
_ENTRY = np.dtype([("digest", "<u8"), ("number", "<u8")])
# Parameters that say where a visitor came from, or which visitor it is. Names that others use for contents of a page
# (`source`, `ref`, `cid`, `keyword`, `gallery`) are none of them.
_TRACKER = re.compile(
    r"(?:utm|mtm|pk|piwik|matomo|hsa|vero|oly)_\w+|_hsenc|_hsmi|__hs\w+|mkt_tok|mc_[ce]id|_ga|_gl|_ke|ref_src|ref_url"
    r"|(?:fb|g|y|tw|tt)clid|dclid|gclsrc|msclkid|gbraid|wbraid|wickedid|igshid|igsh|li_fat_id|srsltid"
    r"|xtor|phpsessid|jsessionid|aspsessionid\w*|cfid|cftoken",
    re.IGNORECASE,
)
_SESSION_IN_PATH = re.compile(r";(?:jsessionid|phpsessid)=[^/;]*", re.IGNORECASE)
_MALFORMED = re.compile(r"[\s\x00-\x1f\x7f<>\"{}|\\^`]")
# OpenWebText's list, and two endings that are missing in it by mistake (.7z and .ai).
_EXTENSIONS = (
    "3gp 7z ai aif apk app avi bin bmp bz2 css csv dat deb dmg doc docx exe gif gifv gz iso jar jpeg jpg js log mid "
    "midi mkv mov mp3 mp4 mpeg mpg ogg ogv otf pdf pkg png pps ppt pptx psd py qt ram rar sql svg swf tar tgz tiff ttf "
    "txt wav webm webp wma wmv xls xlsx xml xz zip"
)


class FilterUrlsSettings(Settings):
    """Filter lists of URLs by domain, extension, length and form, and keep each URL once.

    The inputs are `.txt` files with one URL in a line.
    """

    domains: tuple[Path, ...] = ()
    """Files with more domains to leave out, written like `tools/web_text/default_domains.txt`."""

    default_domains: bool = True
    """Whether the domains of `tools/web_text/default_domains.txt` are left out."""

    extensions: tuple[str, ...] = tuple(_EXTENSIONS.split())
    """Endings of paths to leave out, without their dots."""

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
        domains: Domains; hosts below them are left out, too.
        names: Names that are left out under every public suffix.
    """

    domains: frozenset[str]
    names: frozenset[str]

    def blocks(self, host: str, name: str) -> bool:
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
    texts: dict[str, str] = {}
    if default:
        texts["default"] = (package_files("tools.web_text") / "default_domains.txt").read_text()
    for path in paths:
        try:
            texts[str(path)] = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"a list of domains cannot be read: {error}") from error
    domains: set[str] = set()
    names: set[str] = set()
    problems: list[str] = []
    for source, text in texts.items():
        for number, line in enumerate(text.splitlines(), start=1):
            entry = line.partition("#")[0].strip().lower().removeprefix("www.")
            if not entry:
                continue
            if entry.endswith(".*") and re.fullmatch(r"[\w-]+", entry[:-2]):
                names.add(entry[:-2])
            elif all(_suffixes()(entry)):
                domains.add(entry)
            else:
                problems.append(f"{source}:{number}: {entry!r} is no registered domain; write example.com or example.*")
    if problems:
        raise ConfigError(problems)
    return DomainList(frozenset(domains), frozenset(names))


@dataclass(frozen=True)
class UrlFilter:
    """Function of lines, for worker processes: checks each line."""

    settings: FilterUrlsSettings
    blocked: DomainList

    def __call__(self, lines: list[bytes]) -> list[tuple[str, str | None, int]]:
        """Return for each line its URL, the reason why it is dropped (or None), and a digest of its normal form."""
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
        if len(url) < settings.min_length:
            return url, "too short", 0
        if len(url) > settings.max_length:
            return url, "too long", 0
        parts = _split(url)
        if parts is None or parts.hostname is None:
            return url, "malformed", 0
        host = parts.hostname.rstrip(".")
        name, suffix = _suffixes()(host)
        if not (name and suffix) and not settings.keep_addresses:
            return url, "no registered domain", 0
        if self.blocked.blocks(host, name):
            return url, "domain", 0
        if parts.path.lower().endswith(tuple(f".{extension.lower()}" for extension in settings.extensions)):
            return url, "extension", 0
        url = parts._replace(fragment="").geturl()
        with suppress(ValueError):  # of hosts that no client asks for
            return url, None, url_digest(url)
        return url, "malformed", 0


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
    return len(ascii_host) < 254 and re.fullmatch(r"[\w-]{1,63}(\.[\w-]{1,63})*\.*", ascii_host) is not None


def url_digest(url: str) -> int:
    """Return 64 bits of a hash of a URL's normal form (`normal_form`)."""
    return int.from_bytes(blake2b(normal_form(url).encode(), digest_size=8).digest(), "little")


def normal_form(url: str) -> str:
    """Return what is equal in two URLs of one page.

    It is what a client sends for the URL (RFC 3986, 6.2: case, percent-encoding, dots in the path, default port),
    without scheme, `www.`, the dot at the end of a host, the last slash of a path, and the parameters of trackers and
    sessions.
    Other parameters are sorted by name. Those of one name keep their order, and one without `=` is a name, too.
    """
    import yarl

    parts = yarl.URL(url)
    host = (parts.raw_host or "").rstrip(".").removeprefix("www.")
    port = ""
    if not parts.is_default_port() and parts.explicit_port is not None:
        port = f":{parts.explicit_port}"
    path = _SESSION_IN_PATH.sub("", parts.raw_path)
    kept = []
    for parameter in parts.raw_query_string.replace("%20", "+").split("&"):
        if parameter and _TRACKER.fullmatch(parameter.partition("=")[0]) is None:
            kept.append(parameter)
    kept.sort(key=lambda parameter: parameter.partition("=")[0])
    if not kept:
        return f"{host}{port}{path.rstrip('/')}"
    return f"{host}{port}{path}?{'&'.join(kept)}"


def filter_urls(job: Job[FilterUrlsSettings]) -> None:
    """Write the URLs to keep, and the dropped ones with their reasons."""
    settings = job.settings
    check = UrlFilter(settings, read_domains(settings.domains, default=settings.default_domains))
    urls = job.work / "urls"
    digests = [job.work / f"digests{number:02}" for number in range(_BUCKETS)]
    with atomic_write(job.dropped) as dropped:
        # Each line is checked. URLs that pass go to a file, and the digests of their normal forms to buckets, so that
        # equal ones come together.
        count = 0
        with ExitStack() as stack:
            passed = stack.enter_context(open(urls, "wb"))
            buckets = [stack.enter_context(open(path, "wb")) for path in digests]
            bar = stack.enter_context(progress(job.name, total_bytes(job.files), "B"))
            read = read_lines(job.files, 4 * settings.max_length, bar.update)
            batches = iter(lambda: list(islice(read, _LINES)), [])
            for lines, results in ordered_map(check, batches, settings.workers):
                job.counts.documents_in += len(lines)
                job.counts.bytes_in += sum(map(len, lines))
                found = []
                for url, reason, digest in results:
                    if reason is None:
                        found.append((digest, count))
                        passed.write(url.encode() + b"\n")
                        count += 1
                    else:
                        _drop(job, dropped, url, reason)
                entries = np.array(found, _ENTRY)
                bucket_of = entries["digest"] % _BUCKETS
                for number in np.unique(bucket_of):
                    buckets[number].write(entries[bucket_of == number].tobytes())

        # A URL is repeated if an earlier one has its digest. Memory holds one bucket at a time.
        repeated = np.zeros(count, bool)
        for path in digests:
            entries = np.fromfile(path, _ENTRY)
            first = np.unique(entries["digest"], return_index=True)[1]
            again = np.ones(len(entries), bool)
            again[first] = False
            repeated[entries["number"][again]] = True

        with atomic_write(settings.output) as output, open(urls, "rb") as lines_of_urls:
            for line, is_repeated in zip(lines_of_urls, repeated, strict=True):
                if is_repeated:
                    _drop(job, dropped, line[:-1].decode(), DUPLICATE)
                else:
                    output.write(line)
                    job.counts.documents_out += 1
                    job.counts.bytes_out += len(line) - 1


def _drop(job: Job[FilterUrlsSettings], dropped: IO[bytes], url: str, reason: str) -> None:
    job.counts.drop(reason, len(url.encode()))
    dropped.write(f"{reason}\t{url}\n".encode())


def read_lines(paths: Iterable[str], limit: int, consumed: Callable[[int], object]) -> Iterator[bytes]:
    """Yield lines that are not blank, without their line ends.

    Args:
        paths: Text files.
        limit: Longest line in bytes; a longer line is cut off.
        consumed: Function that is called with the number of bytes newly read.
    """
    for path in paths:
        with os_errors(DataError, f"{path} cannot be read"), open_file(path) as file:
            position = 0
            while line := file.readline(limit + 2):
                size = len(line)
                rest = line
                while len(rest) > limit and not rest.endswith(b"\n"):
                    rest = file.readline(limit + 2)
                    size += len(rest)
                if not position:
                    line = line.removeprefix(codecs.BOM_UTF8)
                position += size
                consumed(size)
                if line := line.strip():
                    yield line


def expand_suffixes(paths: Sequence[Path | str], suffixes: tuple[str, ...]) -> tuple[str, ...]:
    """Replace each directory by the files in it whose names have one of some endings, sorted by name.

    Raises:
        DataError: If a path does not exist, has another ending, or is a directory without such files.
    """
    files: list[str] = []
    for given in paths:
        if is_remote(given):
            files += files_at(str(given), suffixes)
            continue
        path = Path(given)
        found = [path]
        if path.is_dir():
            found = sorted(file for file in path.iterdir() if file.name.endswith(suffixes))
        if not path.exists():
            problem = "does not exist"
        elif not found:
            problem = "holds no input"
        elif not path.is_dir() and not path.name.endswith(suffixes):
            problem = "is no input"
        else:
            files += map(str, found)
            continue
        raise DataError(f"{path} {problem}: give files that end with {', '.join(suffixes)}, or directories of them")
    return tuple(files)


FILTER_URLS = Step(
    "filter-urls",
    FilterUrlsSettings,
    filter_urls,
    suffixes=(".txt",),
    expand=partial(expand_suffixes, suffixes=(".txt",)),
    packages=("tldextract", "yarl"),
)
