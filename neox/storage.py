"""Remote files in object storage, on the Hugging Face Hub and on web servers, read through fsspec.

Failed reads are retried; a response that is too short counts as a failure. A refusal by the server (no such file, no
permission) is an error at once.
"""

from __future__ import annotations

import fnmatch
import io
import json
import os
import re
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from email.message import Message
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from neox.errors import DataError, NeoXError, needs_package
from neox.log import get_logger

_log = get_logger(__name__)
SCHEMES = ("s3", "gs", "hf", "https", "http")
"""Schemes of addresses that are read through fsspec."""

WRITABLE_SCHEMES = ("s3", "gs")
"""Those of them to which checkpoints are written."""

CHECKPOINT_CACHE = "runs/fetched"
"""Default directory of copies of checkpoints."""

CHECKPOINT_SAVES = "runs/saved"
"""Directory of the checkpoints of runs whose `save` is an address."""

BLOCK_BYTES = 8 << 20
ATTEMPTS = 7
FIRST_PAUSE = 0.5
LONGEST_RETRY_AFTER = 300.0
"""Longest time in seconds that is waited because a server asks for it (`Retry-After`)."""
# botocore and the hub's client read http_proxy, https_proxy and no_proxy by themselves, aiohttp only if it is asked to
_CLIENT = {"gs": {"session_kwargs": {"trust_env": True}}} | {
    scheme: {"client_kwargs": {"trust_env": True}} for scheme in ("http", "https")
}
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "https": "aiohttp", "http": "aiohttp"}
_TEMPORARY_STATUS = (408, 425, 429)
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError")
_HUB_REFUSALS: Mapping[str, str] = {
    "RevisionNotFound": "the repository has no such revision: check the branch, tag or commit after @",
    "EntryNotFound": "the repository has no such file in this revision",
    "GatedRepo": "only those who have accepted its terms get it: do so on its page, and log in with HF_TOKEN",
    "RepoNotFound": "there is no such repository, or these credentials (HF_TOKEN) do not give access to it",
}
"""X-Error-Code of the hub -> what it means."""
_WILDCARDS = set("*?[")
_WEB_ADDRESS = re.compile(r"(https?://)(?:[^\s/'\"]*@)?([^\s?#'\"]*)(?:[?#][^\s'\"]*)?")
"""An address in a text: its scheme, a user name, host and path, and a query. The second and the last may be secrets."""

_COMMIT = re.compile(r"@[0-9a-f]{40}(?:/|$)")
T = TypeVar("T")


@dataclass(frozen=True)
class FileState:
    """Size and version of a file, which identify its content without reading it.

    Attributes:
        size: Number of bytes.
        version: Modification time of a local file in nanoseconds, or the server's tag of the content.
    """

    size: int
    version: int | str


def is_remote(path: str | Path) -> bool:
    """Return whether a path is a remote address: object storage, the Hub or a web server."""
    scheme, separator, _ = str(path).partition("://")
    return bool(separator) and scheme in SCHEMES


def shown(path: str | Path) -> str:
    """Return a path for messages and sidecars: addresses without query and user name, which may be secrets."""
    text = str(path)
    if not is_remote(text):
        return text
    parts = urlsplit(text)
    if parts.scheme in ("http", "https"):
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return text


def ids_file(prefix: str | Path) -> Path:
    """Return the file of a dataset's ids: `PREFIX.bin`, or `PREFIX.remote.json` if that names one in object storage."""
    whole = Path(f"{prefix}.bin")
    remote = Path(f"{prefix}.remote.json")
    if remote.is_file() and not whole.is_file():
        return remote
    return whole


@dataclass(frozen=True)
class RemoteIds:
    """Description of a `.bin` in object storage.

    Attributes:
        address: Its address.
        size: Its number of bytes.
        version: The server's tag of its content.
        limit: Most bytes of it that a host keeps.
        directory: Directory of the blocks, in which each host has its own.
        crc32: Checksum of the whole file; None if it is not known.
    """

    address: str
    size: int
    version: str
    limit: int
    directory: str
    crc32: int | None

    def to_json(self) -> str:
        """Return the text of the description."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> RemoteIds:
        """Read a description. Raises DataError if it is damaged."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{path} cannot be read ({error}); remove it, and give the command again") from error


def cache_folder(address: str, cache: str | Path) -> Path:
    """Return the directory of a cache that belongs to an address of a directory, such as `CACHE/s3/bucket/run`."""
    scheme, _, rest = address.partition("://")
    parts = [part for part in rest.split("/") if part not in ("", ".")]
    return Path(cache, scheme, *("__" if part == ".." else part for part in parts))


def cached_address(directory: Path, cache: str | Path) -> str | None:
    """Return the address to which a directory of a cache belongs (`cache_folder`); None if it is not in the cache."""
    try:
        parts = directory.resolve().relative_to(Path(cache).resolve()).parts
    except ValueError:
        return None
    if len(parts) < 2 or parts[0] not in SCHEMES:
        return None
    return f"{parts[0]}://{'/'.join(parts[1:])}"


def named_checkpoint(address: str) -> tuple[str, int | None]:
    """Return the address of a directory of checkpoints, and the iteration if the address ends with `/global_stepN`."""
    address = address.rstrip("/")
    root, _, last = address.rpartition("/")
    step = last.removeprefix("global_step")
    if step != last and step.isdecimal():
        return root, int(step)
    return address, None


def why_not_writable(address: str) -> str | None:
    """Return why an address cannot be that of a directory of checkpoints, with advice; None if it can.

    Args:
        address: The address, such as `s3://bucket/run`.
    """
    scheme, separator, _ = address.partition("://")
    if not separator or scheme not in WRITABLE_SCHEMES:
        known = " or ".join(f"{name}://" for name in WRITABLE_SCHEMES)
        return f"is no address that checkpoints can be written to; give one that begins with {known}"
    if named_checkpoint(address)[1] is not None:
        return "names one checkpoint; give the address of the directory around it"
    if cache_folder(address, "").parts[1:] == ():
        return "names no bucket; give one"
    return None


def name_of(path: str | Path) -> str:
    """Return the file name at the end of a path or an address."""
    text = str(path)
    if text.startswith(("http://", "https://")):
        text = urlsplit(text).path
    return text.rstrip("/").rpartition("/")[2]


def filesystem(address: str, kind: type[NeoXError] = DataError) -> Any:
    """Return the fsspec file system for an address.

    Args:
        address: Address in one of SCHEMES.
        kind: Class of errors.

    Raises:
        NeoXError: An error of class `kind`, if a package is missing or the file system cannot be created.
    """
    scheme = address.partition("://")[0]
    file = "requirements-gcs.txt" if scheme == "gs" else "requirements-storage.txt"
    with needs_package(kind, shown(address), f"fsspec with {_PACKAGES[scheme]}", file):
        import fsspec

        try:
            return fsspec.filesystem(scheme, **_CLIENT.get(scheme, {}))
        except ImportError:
            raise
        except Exception as error:  # many libraries, many classes of errors
            raise kind(f"{shown(address)}: {type(error).__name__}: {error}") from error


def attempt(action: Callable[[], T], what: str, kind: type[NeoXError] = DataError) -> T:
    """Run an action on a server, and retry it after temporary errors.

    Args:
        action: The action. It is repeated as a whole.
        what: Subject of the messages.
        kind: Class of errors.

    Raises:
        NeoXError: An error of class `kind`, if the server refuses the action, or after ATTEMPTS failures.
    """
    for number in range(1, ATTEMPTS + 1):
        try:
            return action()
        except NeoXError:
            raise
        except Exception as caught:  # those of many libraries
            error = caught
            cause = caught.__cause__
            # fsspec reports each failure of a request to a web server as a missing file
            hides = isinstance(caught, FileNotFoundError) and type(cause).__module__.startswith("aiohttp")
            if hides and isinstance(cause, Exception) and _http_status(cause) != HTTPStatus.NOT_FOUND:
                error = cause
            reason = _refusal(error)
            if reason is not None:
                raise kind(f"{what}: {reason}") from error
            described = _described(error)
            if _http_status(error) is None:
                described = f"{type(error).__name__}: {described}"
            if number == ATTEMPTS:
                advice = f"run the same command again to continue{proxy_advice(error)}"
                raise kind(f"{what}: {described}, {ATTEMPTS} times; {advice}") from error
            _log.warning("%s: %s; retrying", what, described)
            headers = getattr(getattr(error, "response", None), "headers", None) or getattr(error, "headers", None)
            time.sleep(max(FIRST_PAUSE * 2 ** (number - 1), min(retry_after(headers), LONGEST_RETRY_AFTER)))
    raise AssertionError


def retry_after(headers: Any) -> float:
    """Return how many seconds a server wants a client to wait before it asks again; 0 if it does not say.

    Args:
        headers: Headers of its answer, a mapping, whose `Retry-After` is a number of seconds or a date (RFC 9110,
            10.2.3); None without an answer.
    """
    given = str(headers.get("Retry-After") or "").strip() if isinstance(headers, Mapping | Message) else ""
    if given.isdecimal():
        return float(given)
    try:
        return max(0.0, parsedate_to_datetime(given).timestamp() - time.time())
    except (ValueError, TypeError):
        return 0.0


def proxy_advice(error: Exception) -> str:
    """Return the end of a message about a failed connection: the way through a proxy, if none is set.

    Args:
        error: Why the connection failed. If a server has answered, a proxy is no way, and the text is empty.
    """
    if _http_status(error) is not None or urllib.request.getproxies().keys() & {"http", "https", "all"}:
        return ""
    return " (if only a proxy leads out of this network, set https_proxy and no_proxy)"


def _refusal(error: Exception) -> str | None:
    """Return why a server refuses an action, with advice; None for a temporary error."""
    code = _hub_error(error)
    if code in _HUB_REFUSALS:
        return f"{_HUB_REFUSALS[code]} (the hub's answer: {code})"
    if isinstance(error, FileNotFoundError):
        return "it does not exist, or these credentials do not give access to it"
    status = _http_status(error)
    lasting = status is not None and 400 <= status < 500 and status not in _TEMPORARY_STATUS
    without = type(error).__name__ in _NO_CREDENTIALS
    if isinstance(error, PermissionError) or lasting or without:
        return (
            f"access is refused: {_described(error)}; check this machine's credentials and whether they have expired "
            "(s3: AWS_ACCESS_KEY_ID or a profile; hub: HF_TOKEN)"
        )
    return None


def _hub_error(error: Exception) -> str:
    """Return the hub's name of an error; an empty text if it gives none."""
    headers = getattr(getattr(error, "response", None), "headers", None)
    return str(headers.get("X-Error-Code") or "") if isinstance(headers, Mapping) else ""


def _http_status(error: Exception) -> int | None:
    """Return the HTTP status with which a server has answered, from the errors of several clients; None without one."""
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status", None)
    return status if isinstance(status, int) and status >= 100 else None


def _described(error: Exception) -> str:
    """Return an error in one line, without a full stop and without the secrets of addresses, which clients quote."""
    status = _http_status(error)
    if status is None:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    else:
        response = getattr(error, "response", None)
        messages = (getattr(error, "message", None), getattr(response, "reason_phrase", None))
        text = f"HTTP {status} {next(filter(None, messages), getattr(response, 'reason', None)) or ''}"
    return _WEB_ADDRESS.sub(r"\1\2", text).rstrip(". ")


def state_of(path: str) -> FileState:
    """Return the size and version of a file. Raises DataError, or OSError for a local file."""
    if not is_remote(path):
        status = os.stat(path)
        return FileState(status.st_size, status.st_mtime_ns)
    return _state_in(attempt(lambda: filesystem(path).info(path), shown(path)), path)


def _state_in(found: Mapping[str, Any], path: str) -> FileState:
    """Return the state in a server's description of a file. Raises DataError if it has no size."""
    size = found.get("size")
    if size is None:
        raise DataError(f"{shown(path)}: the server does not report its size; download it, and use the local file")
    version = found.get("ETag") or found.get("blob_id") or found.get("etag") or found.get("mtime") or ""
    return FileState(int(size), str(version))


def size_of(path: str) -> int:
    """Return the number of bytes of a file. Raises errors as `state_of`."""
    return state_of(path).size


def has_wildcards(path: str) -> bool:
    """Return whether an address is a pattern. In a web address `?` is not a wildcard, but starts the query."""
    if path.startswith(("http://", "https://")):
        path = urlsplit(path).path
    return bool(_WILDCARDS & set(path))


def list_files(address: str) -> list[str]:
    """Return the files below an address, or those that match it if it is a pattern, sorted by name.

    Raises:
        DataError: If the server refuses access, or cannot list files (a web server).
    """
    scheme = address.partition("://")[0]
    if scheme in ("http", "https"):
        raise DataError(f"{shown(address)}: a web server does not list files; give the address of each file")
    where = filesystem(address)
    root = address
    if has_wildcards(address):
        wild = min(address.find(sign) for sign in _WILDCARDS if sign in address)
        root = address[:wild].rpartition("/")[0]
    found = attempt(lambda: where.find(root), shown(address))
    files = [f"{scheme}://{str(name).removeprefix(f'{scheme}://')}" for name in found]
    if root != address:
        files = [file for file in files if matches(file, address)]
    return sorted(files)


def files_at(
    address: str, suffixes: tuple[str, ...], is_wanted: Callable[[str], bool] = lambda name: True
) -> list[str]:
    """Return the file at an address, or those below it or that match it, whose names have one of some endings.

    Args:
        address: Address of a file or a directory, or a pattern.
        suffixes: Endings of names.
        is_wanted: Function of a name that has such an ending.

    Raises:
        DataError: If there is none, or for the reasons of `list_files`.
    """

    def fits(file: str) -> bool:
        name = name_of(file)
        return name.endswith(suffixes) and is_wanted(name)

    if fits(address) and not has_wildcards(address):
        return [address]
    files = list(filter(fits, list_files(address)))
    if not files:
        raise DataError(f"{shown(address)}: no input is there; readable are {', '.join(suffixes)}")
    return files


def matches(name: str, pattern: str) -> bool:
    """Return whether a path matches a pattern, in which `*` matches within a directory and `**` across directories."""
    names = name.split("/")
    patterns = pattern.split("/")
    return _parts_match(names, patterns)


def _parts_match(names: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_parts_match(names[skipped:], patterns[1:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], patterns[0]) and _parts_match(names[1:], patterns[1:])


def open_file(path: str) -> IO[bytes]:
    """Open a local or remote file for reading. Raises DataError, or OSError for a local file."""
    if not is_remote(path):
        return open(path, "rb")
    return io.BufferedReader(RemoteFile(path), BLOCK_BYTES)


class RemoteFile(io.RawIOBase):
    """Remote file that is read in ranges, all of one version.

    The length of each range is checked, and failed reads are retried. After each range the server is asked for the
    version: if it is another one than at first, the range may be of a file that was replaced meanwhile. (Requests with
    `If-Match` would save the question, but servers may ignore it, and fsspec hides the headers of answers.)
    """

    def __init__(self, address: str) -> None:
        """Look up the size and the version. Raises DataError if the file cannot be read."""
        self._address = address
        self._where = filesystem(address)
        self._state = self._current_state()
        self._position = 0

    def _current_state(self) -> FileState:
        """Return the size and the version. Servers without tags tell the version by the time of the last change."""
        self._where.invalidate_cache(self._address)  # listings of a bucket are kept
        found = attempt(lambda: self._where.info(self._address), shown(self._address))
        state = _state_in(found, self._address)
        return replace(state, version=state.version or str(found.get("Last-Modified") or ""))

    def _refuse_other_version(self) -> None:
        """Raise DataError if the file is not the one that was opened."""
        if self._address.startswith("hf://") and _COMMIT.search(self._address):
            return  # the address names the version
        now = self._current_state()
        if now != self._state:
            first = f"{self._state.size:,} bytes, version {self._state.version or 'unknown'}"
            raise DataError(
                f"{shown(self._address)}: the file was replaced while it was read: at first {first}; now "
                f"{now.size:,} bytes, version {now.version or 'unknown'}; give the command again, or download the file "
                "and use the local copy"
            )

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, without a request to the server."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._state.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes. Raises DataError if they cannot be read, or the file was replaced."""
        wanted = min(len(buffer), self._state.size - self._position)
        if wanted <= 0:
            return 0
        start = self._position

        def read() -> bytes:
            data: bytes = self._where.cat_file(self._address, start=start, end=start + wanted)
            if len(data) != wanted:
                raise OSError(f"received {len(data):,} bytes instead of {wanted:,} at byte {start:,}")
            return data

        try:
            data = attempt(read, shown(self._address))
        except DataError:
            self._refuse_other_version()  # a shorter file has no such range
            raise
        self._refuse_other_version()
        buffer[:wanted] = data
        self._position += wanted
        return wanted
