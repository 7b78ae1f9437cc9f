"""Expansion of inputs (files, directories, saved `datasets`, remote addresses) to lists of files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from neox.corpus.hub import chosen_split, hub_files
from neox.corpus.streams import is_readable, suffixes
from neox.errors import DataError, refusals
from neox.log import get_logger
from neox.storage import files_at, is_remote, name_of

_log = get_logger(__name__)
_STATE = "state.json"
_SPLITS = "dataset_dict.json"


def expand_inputs(
    paths: Iterable[str | Path], *, split: str | None = None, config: str | None = None
) -> tuple[str, ...]:
    """Replace each directory, pattern and dataset by its files, sorted by name. Subdirectories are not read.

    Args:
        paths: Files, directories, directories written by `save_to_disk` of `datasets`, or addresses (`s3://`, `gs://`,
            `https://`, `hf://datasets/ORG/NAME[@REVISION][/PATTERN]`).
        split: Split of datasets that have several.
        config: Configuration of datasets on the Hub that have several.

    Raises:
        DataError: If a path does not exist, has no readable format, is a directory without inputs, or is a dataset
            from which a split must be chosen.
    """
    with refusals():
        return _expanded(paths, split, config)


def _expanded(paths: Iterable[str | Path], split: str | None, config: str | None) -> tuple[str, ...]:
    """Return the files of inputs. Raises DataError as `expand_inputs`."""
    files: list[str] = []
    chosen = False
    for given in paths:
        text = str(given)
        path = Path(given)
        if is_remote(text):
            if text.startswith("hf://") and not is_readable(name_of(text)):
                chosen = True
            files += _files_at(text, split, config)
        elif path.is_dir() and _saved(path) is not None:
            chosen = True
            files += _saved_files(path, split)
        elif path.is_dir():
            files += _files_in(path)
        elif not path.exists():
            raise DataError(f"{path} does not exist; give a file, a directory, or several with commas between them")
        elif not is_readable(path.name):
            raise DataError(f"{path}: this file format is not supported; supported are {', '.join(suffixes())}")
        else:
            files.append(text)
    if (split or config) and not chosen:
        raise DataError("--split and --config need a dataset on the Hub or a saved one, but no input is one")
    return tuple(files)


def _files_in(directory: Path) -> list[str]:
    """Return the inputs in a directory, sorted; warn about subdirectories. Raises DataError if there is no input."""
    files = []
    subdirectories = []
    for entry in os.scandir(directory):
        if entry.is_dir():
            subdirectories.append(entry.name)
        elif is_readable(entry.name):
            files.append(str(directory / entry.name))
    listed = ", ".join(sorted(subdirectories)[:5])
    if not files:
        hint = ""
        if subdirectories:
            hint = f" itself; its subdirectories ({listed}) can be given"
        raise DataError(f"{directory}: the directory has no inputs{hint}; supported are {', '.join(suffixes())}")
    if subdirectories:
        _log.warning("%s: its subdirectories (%s) are not read; give them too if you need them", directory, listed)
    return sorted(files)


def _saved(directory: Path) -> Path | None:
    """Return the file that marks a directory as written by `save_to_disk`; None if there is none."""
    for name in (_SPLITS, _STATE):
        if (directory / name).is_file():
            return directory / name
    return None


def _saved_files(directory: Path, split: str | None) -> list[str]:
    """Return the files of a saved dataset in order. Raises DataError as `expand_inputs`."""
    marker = directory / _SPLITS
    try:
        if marker.is_file():
            splits = json.loads(marker.read_text(encoding="utf-8"))["splits"]
            directory = directory / chosen_split(str(directory), splits, split)
        marker = directory / _STATE
        state = json.loads(marker.read_text(encoding="utf-8"))
        files = []
        for entry in state["_data_files"]:
            files.append(directory / entry["filename"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{marker}: is not what `save_to_disk` of datasets writes ({error})") from error
    for file in files:
        if not file.is_file():
            raise DataError(f"{file}: a file of the dataset is missing; copy the whole directory")
    return list(map(str, files))


def _files_at(address: str, split: str | None, config: str | None) -> list[str]:
    """Return the files at an address. Raises DataError as `expand_inputs`."""
    if address.startswith("hf://"):
        return hub_files(address, split, config)
    return files_at(address, suffixes(), is_readable)
