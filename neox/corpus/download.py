"""Files from URLs: resumed where they stopped, checked, and in place only when whole."""

from __future__ import annotations

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neox.errors import DataError
from neox.files import fsync_file, partial_path, replace_file, write_text
from neox.log import get_logger

_log = get_logger(__name__)
_CHUNK = 1 << 20
_TRIES = 5


def download(
    url: str,
    path: str | Path,
    *,
    sha256: str | None = None,
    force: bool = False,
    received: Callable[[int], None] | None = None,
    pause: float = 1.0,
) -> Path:
    """Fetch a URL to `path`; what is there already is kept, what was begun goes on.

    The digest is written to `PATH.sha256` in the form of `sha256sum`, and a file that is there is checked against it.
    sha256: the digest it must have (hex). force: fetch again. received: called with bytes received. pause: seconds
    before the second try, doubled each time.
    Raises DataError, naming URL and file, when it cannot be fetched in five tries, or its size or digest is wrong.
    """
    path = Path(path)
    note, beside = path.with_name(path.name + ".sha256"), partial_path(path)
    if path.exists() and not force:
        _check_present(path, note, sha256)
        return path
    if force:
        beside.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, _TRIES + 1):
        try:
            _fetch(url, beside, received)
            break
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code not in (408, 429, 500, 502, 503, 504):
                raise DataError(f"{url}: {error}; give another source with NAME=URL, or a local path") from error
            if attempt == _TRIES:
                raise DataError(f"{url}: {error}, {_TRIES} times; the same command goes on where it was") from error
            _log.warning("%s: %s; trying again", url, error)
            time.sleep(pause * 2 ** (attempt - 1))
    digest = file_digest(beside)
    if sha256 is not None and digest != sha256.lower():
        beside.unlink()
        raise DataError(f"{url} has the sha256 {digest}, not {sha256}: nothing was kept")
    write_text(note, f"{digest}  {path.name}\n")
    replace_file(beside, path)
    return path


def file_digest(path: Path) -> str:
    """Return the sha256 of a file, hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_present(path: Path, note: Path, sha256: str | None) -> None:
    noted = note.read_text(encoding="utf-8").split()[:1] if note.exists() else []
    wanted = sha256.lower() if sha256 else (noted[0] if noted else None)
    if wanted is not None and (found := file_digest(path)) != wanted:
        raise DataError(f"{path} has the sha256 {found}, not {wanted}; fetch it again with --force-redownload")


def _fetch(url: str, beside: Path, received: Callable[[int], None] | None) -> None:
    """Append what is missing. A server that does not continue is read from the start."""
    have = beside.stat().st_size if beside.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-", "User-Agent": "neox"})
    try:
        response: Any = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing is missing: the file was whole
            return
        raise
    with response:
        continues = getattr(response, "status", None) == 206
        length = response.headers.get("Content-Length")
        total = None if length is None else int(length) + (have if continues else 0)
        with open(beside, "ab" if continues else "wb") as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                if received is not None:
                    received(len(chunk))
            fsync_file(file)
    if total is not None and (size := beside.stat().st_size) != total:
        raise OSError(f"the connection ended after {size:,} of {total:,} bytes")
