"""Contents of one checkpoint: its files of weights, and whether all files are there and undamaged."""

from __future__ import annotations

import os
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from neox.checkpoint_files.manifest import check_manifest, read_manifest
from neox.checkpoint_files.names import (
    layer_file,
    mp_rank_file,
    parse_averaged_file,
    parse_layer_file,
    parse_mp_rank_file,
)
from neox.errors import CheckpointError


@dataclass(frozen=True)
class WeightFiles:
    """Files of weights of one checkpoint.

    Attributes:
        layers: Layer files by layer index and tensor rank; empty if `ranks` hold all layers.
        ranks: `mp_rank` files by model rank. With layer files, they hold counters only.
    """

    layers: Mapping[int, Mapping[int, Path]]
    ranks: Mapping[int, Path]

    @property
    def tp_size(self) -> int:
        """Tensor-parallel size of the layer files."""
        return 1 + max(max(ranks) for ranks in self.layers.values())


def weight_files(directory: Path) -> WeightFiles:
    """Find the files of weights in a checkpoint. Raises CheckpointError if there are none or some are missing."""
    layers: dict[int, dict[int, Path]] = defaultdict(dict)
    ranks: dict[int, Path] = {}
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise CheckpointError(f"{directory}: not a readable checkpoint directory ({error.strerror})") from error
    for path in entries:
        layer = parse_layer_file(path.name)
        rank = parse_mp_rank_file(path.name)
        if layer is not None:
            index, tp_rank = layer
            layers[index][tp_rank] = path
        elif rank is not None:
            ranks[rank] = path
    found = WeightFiles(layers, ranks)
    if layers:
        missing = []
        for index in sorted(layers):
            for rank in range(found.tp_size):
                if rank not in layers[index]:
                    missing.append(layer_file(index, rank))
        if missing:
            raise CheckpointError(
                f"{directory}: {found.tp_size} tensor ranks, but these layer files are missing: {', '.join(missing)}; "
                "the checkpoint was not written or copied completely"
            )
        return found
    if not ranks:
        raise CheckpointError(
            f"{directory}: no layer files ({layer_file(0, 0)}, ...) and no {mp_rank_file(0)}; "
            "give the global_stepN directory of a NeoX checkpoint"
        )
    absent = sorted(set(range(max(ranks))) - ranks.keys())
    if absent:
        raise CheckpointError(f"{directory}: missing {', '.join(map(mp_rank_file, absent))}")
    if not pickle_mentions(ranks[min(ranks)], b"sequential."):
        raise CheckpointError(f"{ranks[min(ranks)]}: holds no weights, and there are no layer files next to it")
    return found


def pickle_mentions(file: Path, key: bytes) -> bool:
    """Return whether the pickle inside a file of torch contains a key; True if it cannot be read."""
    try:
        with zipfile.ZipFile(file) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return not pickles or key in archive.read(pickles[0])
    except (OSError, zipfile.BadZipFile, EOFError, ValueError, RuntimeError, NotImplementedError):
        return True


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory contains model files itself."""
    return any(_contains_weights(file.name) for file in path.iterdir())


def _contains_weights(name: str) -> bool:
    if parse_averaged_file(name) is not None:
        return True
    return parse_layer_file(name) is not None or parse_mp_rank_file(name) is not None


def why_incomplete(path: Path, *, hashes: bool = True) -> list[str]:
    """Return the reasons why a checkpoint must not be loaded; none if it is complete.

    Args:
        path: The checkpoint.
        hashes: Whether every byte is read and compared with hashes or checksums.
    """
    try:
        if read_manifest(path) is None:
            weight_files(path)  # raises if a tensor rank's file is missing
        return _damage(path, lambda name: True, hashes=hashes)
    except CheckpointError as error:
        return [str(error)]


def damaged_weights(path: Path) -> list[str]:
    """Return what is wrong with the files of weights, which are read completely.

    It may run in a thread next to the one that converts the weights.
    """
    try:
        return _damage(path, _contains_weights, hashes=True)
    except CheckpointError as error:
        return [str(error)]


def _damage(path: Path, wanted: Callable[[str], bool], *, hashes: bool) -> list[str]:
    """Check some files of a checkpoint, and return what is wrong with them.

    Args:
        path: The checkpoint.
        wanted: Whether a file, by its name, is checked.
        hashes: Whether every byte is read and compared with hashes or checksums.
    """
    manifest = read_manifest(path)
    if manifest is None:
        archives = list(filter(lambda file: wanted(file.name), sorted(path.glob("*.pt"))))
        return _broken_archives(archives, hashes)
    files = {name: record for name, record in manifest.files.items() if wanted(name)}
    return check_manifest(path, replace(manifest, files=files), hashes=hashes)


def _broken_archives(files: list[Path], checksums: bool) -> list[str]:
    """Check files without a manifest, in threads, because checksums release the interpreter lock.

    Args:
        files: Files that `torch.save` has written.
        checksums: Whether every CRC-32 is checked, not only the structure of the zip file.
    """
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        problems = pool.map(lambda file: _broken_archive(file, checksums), files)
        return list(filter(None, problems))


def _broken_archive(file: Path, checksums: bool) -> str | None:
    """Return what is wrong with one file, or None."""
    try:
        with open(file, "rb") as stream:
            if stream.read(2) != b"PK":
                return None  # torch's format before 1.6 has no checksums
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip() if checksums else None
    except (OSError, zipfile.BadZipFile, EOFError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{file.name} is truncated or damaged ({error})"
    if bad is not None:
        return f"{file.name} is damaged (checksum of {bad})"
    return None
