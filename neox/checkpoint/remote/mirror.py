"""Mirrors of checkpoint directories in object storage. The manifest is uploaded last; downloads are hash-checked.

s3://bucket/run/global_step10/layer_00-...pt, ..., manifest.json    complete, because it has a manifest
s3://bucket/run/global_step20/layer_00-...pt                        upload in progress, or left by a killed run
s3://bucket/run/global_step30/superseded_manifest.json              ignored, because a run was rolled back before it
s3://bucket/run/latest                                              global_step10
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from neox.checkpoint_files.manifest import FileRecord, read_manifest
from neox.checkpoint_files.names import LATEST, MANIFEST, parse_step_directory, step_directory
from neox.errors import CheckpointError
from neox.files import fsync_file
from neox.log import get_logger
from neox.storage import attempt, filesystem, shown

_log = get_logger(__name__)
SUPERSEDED_MANIFEST = "superseded_manifest.json"
"""Name of the manifest of a checkpoint that is ignored: of another run, or from before a rollback."""

_READ_BYTES = 8 << 20
_SMALLEST_PART = 5 << 20  # of S3
_DOWNLOADS = 3


class Mirror:
    """Directory of checkpoints in object storage."""

    def __init__(self, address: str, *, part_bytes: int = 100 << 20) -> None:
        """Connect to the object storage.

        Args:
            address: Address of the directory, such as `s3://bucket/run`.
            part_bytes: Size of the parts of an upload.

        Raises:
            CheckpointError: If a package is missing.
        """
        self.address = address.rstrip("/")
        self._part_bytes = max(part_bytes, _SMALLEST_PART)
        self._where: Any = filesystem(self.address, CheckpointError)

    def iterations(self) -> list[int]:
        """Return the iterations of complete checkpoints, ascending. Raises CheckpointError."""

        def list_manifests() -> list[str]:
            self._where.invalidate_cache()
            found: list[str] = self._where.glob(f"{self.address}/global_step*/{MANIFEST}")
            return found

        iterations = []
        for name in attempt(list_manifests, shown(self.address), CheckpointError):
            step = parse_step_directory(name.split("/")[-2])
            if step is not None:
                iterations.append(step)
        return sorted(iterations)

    def upload(self, path: Path, progress: Callable[[], None] = lambda: None) -> None:
        """Upload a complete local checkpoint. It is complete in the mirror once its manifest is uploaded.

        Args:
            path: The checkpoint.
            progress: Function that is called after each uploaded piece.

        Raises:
            CheckpointError: If the server refuses access, or files differ from their manifest.
        """
        manifest = read_manifest(path)
        if manifest is None:
            raise CheckpointError(f"{path} has no manifest, so it cannot be mirrored")
        target = f"{self.address}/{path.name}"
        if manifest.iteration in self.iterations():  # another one of this iteration must not look complete meanwhile
            old = f"{target}/{MANIFEST}"
            attempt(partial(self._where.rm_file, old), shown(old), CheckpointError)
        for name, record in manifest.files.items():
            what = shown(f"{target}/{name}")
            put = partial(self._put, path / name, f"{target}/{name}", record, progress)
            attempt(put, what, CheckpointError)
        text = (path / MANIFEST).read_bytes()
        for name, data in ((f"{target}/{MANIFEST}", text), (f"{self.address}/{LATEST}", path.name.encode())):
            attempt(partial(self._where.pipe_file, name, data), shown(name), CheckpointError)
            progress()

    def _put(self, file: Path, target: str, record: FileRecord, progress: Callable[[], None]) -> None:
        """Upload a file in parts, and compare its size and hash with its record."""
        digest = hashlib.sha256()
        size = 0
        with open(file, "rb") as source, self._where.open(target, "wb", block_size=self._part_bytes) as out:
            while piece := source.read(_READ_BYTES):
                digest.update(piece)
                size += len(piece)
                if size > record.size:
                    break
                out.write(piece)
                progress()
        if size != record.size or digest.hexdigest() != record.sha256:
            raise CheckpointError(f"{file} has changed since it was written, so it is not mirrored")
        self._where.invalidate_cache()
        found = self._where.info(target)["size"]
        if found != size:
            raise OSError(f"{found:,} bytes arrived instead of {size:,}")

    def keep_last(self, count: int) -> None:
        """Delete all but the newest `count` complete checkpoints, each manifest first. Raises CheckpointError."""
        for iteration in self.iterations()[:-count]:
            target = f"{self.address}/{step_directory(iteration)}"
            attempt(partial(self._where.rm_file, f"{target}/{MANIFEST}"), shown(target), CheckpointError)
            attempt(partial(self._where.rm, target, recursive=True), shown(target), CheckpointError)

    def supersede_after(self, iteration: int) -> list[int]:
        """Let later checkpoints no longer count: their manifests get the name SUPERSEDED_MANIFEST, their files stay.

        Returns:
            The iterations that no longer count.

        Raises:
            CheckpointError: If the server refuses.
        """
        later = [step for step in self.iterations() if step > iteration]
        for step in later:
            target = f"{self.address}/{step_directory(step)}"
            copy = partial(self._where.pipe_file, f"{target}/{SUPERSEDED_MANIFEST}", self.manifest_text(step))
            attempt(copy, shown(target), CheckpointError)
            attempt(partial(self._where.rm_file, f"{target}/{MANIFEST}"), shown(target), CheckpointError)
        return later

    def manifest_text(self, iteration: int) -> bytes:
        """Return the content of a checkpoint's manifest. Raises CheckpointError."""
        name = f"{self.address}/{step_directory(iteration)}/{MANIFEST}"
        return attempt(lambda: bytes(self._where.cat_file(name)), shown(name), CheckpointError)

    def download(
        self,
        iteration: int,
        name: str,
        target: Path,
        record: FileRecord,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a file of a checkpoint to disk, in ranges.

        Args:
            iteration: Iteration of the checkpoint.
            name: Name of the file.
            target: Path to write.
            record: Size and hash that the file must have.
            progress: Function that is called after each piece.

        Raises:
            CheckpointError: If the server refuses, or the file differs from its record.
        """
        source = f"{self.address}/{step_directory(iteration)}/{name}"
        reason = ""
        for _ in range(_DOWNLOADS):
            reason = self._download_once(source, target, record, progress)
            if not reason:
                return
            _log.warning("%s: %s: fetching it again", shown(source), reason)
        target.unlink(missing_ok=True)
        raise CheckpointError(f"{shown(source)}: {reason}, {_DOWNLOADS} times; load another iteration")

    def _download_once(self, source: str, target: Path, record: FileRecord, progress: Callable[[], None]) -> str:
        """Download a file; return how it differs from its record, or an empty text."""
        self._where.invalidate_cache()
        found = attempt(lambda: self._where.info(source)["size"], shown(source), CheckpointError)
        if found != record.size:
            return f"it has {found:,} bytes instead of {record.size:,}"
        digest = hashlib.sha256()
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as file:
            for start in range(0, record.size, _READ_BYTES):
                end = min(start + _READ_BYTES, record.size)
                piece = attempt(partial(self._range, source, start, end), shown(source), CheckpointError)
                digest.update(piece)
                file.write(piece)
                progress()
            fsync_file(file)
        if digest.hexdigest() != record.sha256:
            return "its content is not what was saved (sha256 differs)"
        return ""

    def _range(self, source: str, start: int, end: int) -> bytes:
        data: bytes = self._where.cat_file(source, start=start, end=end)
        if len(data) != end - start:
            raise OSError(f"received {len(data):,} bytes instead of {end - start:,}")
        return data
