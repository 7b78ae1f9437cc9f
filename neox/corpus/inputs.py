"""Expansion of inputs (files, directories, saved `datasets`, remote addresses) to lists of files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from neox.corpus.left_out import LeftOut, is_desktop_file
from neox.corpus.streams import is_output, is_readable, suffixes
from neox.errors import DataError, needs_package, refusals
from neox.log import get_logger
from neox.storage import attempt, files_at, has_wildcards, is_remote, matches, name_of

_log = get_logger(__name__)
_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_ADDRESS = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FORM = "hf://datasets/ORG/NAME[@REVISION][/PATTERN]"
_USUAL_SPLITS = ("train", "validation", "valid", "dev", "test")


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
    files: list[str] = []
    chosen = False  # whether an input is a dataset, from which split and configuration may be chosen
    with refusals():
        for given in paths:
            text = str(given)
            path = Path(given)
            if text.startswith("hf://"):
                chosen = chosen or not is_readable(name_of(text))
                files += _hub_files(text, split, config)
            elif is_remote(text):
                files += files_at(text, suffixes(), is_readable)
            elif (path / _SPLITS).is_file() or (path / _STATE).is_file():
                chosen = True
                files += _saved_files(path, split)
            elif path.is_dir():
                files += _files_in(path)
            elif not path.exists():
                raise DataError(f"{path} does not exist; give a file, a directory, or several with commas between them")
            elif is_desktop_file(path.name):
                raise DataError(f"{path}: this file is of the operating system or an editor, and no document")
            elif not is_readable(path.name):
                raise DataError(f"{path}: this file format is not supported; supported are {', '.join(suffixes())}")
            else:
                files.append(text)
        if (split or config) and not chosen:
            raise DataError("--split and --config need a dataset on the Hub or a saved one, but no input is one")
    return tuple(files)


def _files_in(directory: Path) -> list[str]:
    """Return the inputs in a directory, sorted; count what else is there. Raises DataError if there is no input."""
    files = []
    subdirectories = []
    left_out = LeftOut(str(directory))
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if not left_out.takes(entry.name):
            continue
        if entry.is_dir():
            subdirectories.append(entry.name)
        elif is_readable(entry.name):
            files.append(str(directory / entry.name))
        elif not is_output(entry.name):
            left_out.add("files of other formats", entry.name)
    if not files:
        hint = ""
        if subdirectories:
            hint = f" itself; its subdirectories ({', '.join(subdirectories[:5])}) can be given"
        raise DataError(f"{directory}: the directory has no inputs{hint}; supported are {', '.join(suffixes())}")
    for name in subdirectories:
        left_out.add("subdirectories, which can be given too", name)
    left_out.report()
    return files


def _saved_files(directory: Path, split: str | None) -> list[str]:
    """Return the files of a saved dataset in order. Raises DataError as `expand_inputs`."""
    marker = directory / _SPLITS
    try:
        if marker.is_file():
            splits = json.loads(marker.read_text(encoding="utf-8"))["splits"]
            directory = directory / _chosen_split(str(directory), splits, split)
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


def _chosen_split(name: str, splits: Iterable[str], split: str | None) -> str:
    """Return the wanted split of a dataset, or its only one. Raises DataError if it must be chosen."""
    known = list(splits)
    if split is None and len(known) == 1:
        return known[0]
    listed = ", ".join(known)
    if split is None:
        raise DataError(f"{name} has several splits: choose one with --split ({listed})")
    if split not in known:
        raise DataError(f"{name} has no split {split!r}; it has {listed}")
    return split


def _hub_files(address: str, split: str | None, config: str | None) -> list[str]:
    """Return the addresses of the files of a dataset on the Hub, which include the current commit of its revision.

    The dataset card (`configs`) defines the files of a split. Without such an entry, file names decide
    (`train-00000-of-00002.parquet`).

    Args:
        address: `hf://datasets/ORG/NAME[@REVISION][/PATTERN]`. A slash in a revision is written as %2F.
        split: Split to read; needed if there are several and no pattern is given.
        config: Configuration to read; needed if there are several and no pattern is given.

    Raises:
        DataError: If the Hub refuses access, there is no such file, or split or configuration must be chosen.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise DataError(f"{address}: an address on the Hub has the form {_FORM}")
    repository, revision = found[1], found[2]
    pattern = (found[3] or "").strip("/")
    is_file = is_readable(pattern) and not has_wildcards(pattern)
    if is_file and revision and _COMMIT.fullmatch(revision):
        return [address]
    with needs_package(DataError, address, "huggingface_hub", "requirements-storage.txt"):
        from huggingface_hub import HfApi
    branch = revision and revision.replace("%2F", "/")
    info = attempt(lambda: HfApi().dataset_info(repository, revision=branch), address)

    files = sorted(entry.rfilename for entry in info.siblings or () if is_readable(entry.rfilename))
    if has_wildcards(pattern):
        files = [file for file in files if matches(file, pattern)]
    elif pattern:
        files = [file for file in files if f"{file}/".startswith(f"{pattern}/")]

    patterns = None
    if not pattern or config:
        patterns = _config_patterns(address, info.card_data, config)
    if patterns is not None:
        chosen = patterns[_chosen_split(address, list(patterns), split)]
        files = [file for file in files if any(matches(file, form) for form in chosen)]
    elif split is not None:
        files = _named(files, split)
        if not files:
            raise DataError(f"{address}: no file has {split!r} in its name; give a file pattern")
    elif not pattern:
        known = [usual for usual in _USUAL_SPLITS if _named(files, usual)]
        if len(known) > 1:
            _chosen_split(address, known, None)  # raises: one must be chosen
    if not files:
        raise DataError(f"{address}: the dataset has no readable file there")
    return [f"hf://datasets/{repository}@{info.sha}/{file}" for file in files]


def _named(files: Iterable[str], split: str) -> list[str]:
    """Return the files whose names have a split as a word."""
    word = re.compile(rf"(^|[/._-]){re.escape(split)}([/._-]|$)")
    return list(filter(word.search, files))


def _config_patterns(address: str, card: Any, config: str | None) -> Mapping[str, list[str]] | None:
    """Return the patterns of each split of a configuration in the card; None if the card has no configurations."""
    configs = dict(card.to_dict() if card is not None else {}).get("configs") or []
    known: dict[str, Any] = {}
    for entry in configs:
        if "data_files" in entry:
            known[entry["config_name"]] = entry
    if not known:
        if config is not None:
            raise DataError(f"{address}: --config {config}: its card lists no configurations; give a file pattern")
        return None
    if config is None and len(known) > 1:
        defaults = [name for name, entry in known.items() if entry.get("default") or name == "default"]
        defaults.sort(key=lambda name: not known[name].get("default"))  # a mark goes before the name
        config = next(iter(defaults), None)
        if config is None:
            listed = ", ".join(known)
            raise DataError(f"{address} has several configurations: choose one with --config ({listed})")
    if config is not None and config not in known:
        raise DataError(f"{address} has no configuration {config!r}; it has {', '.join(known)}")
    entry = known[config] if config is not None else next(iter(known.values()))

    # A card gives one pattern, a list of patterns, or a pattern or list for each split.
    data_files = entry["data_files"]
    if isinstance(data_files, str):
        data_files = [data_files]
    splits: dict[str, list[str]] = {}
    for item in data_files:
        if isinstance(item, str):
            splits.setdefault("train", []).append(item)
        elif isinstance(item["path"], str):
            splits.setdefault(item["split"], []).append(item["path"])
        else:
            splits.setdefault(item["split"], []).extend(item["path"])
    return splits
