"""Files of a dataset on the Hugging Face Hub, pinned to the current commit of its revision."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from neox.corpus.streams import is_readable
from neox.errors import DataError, needs_package
from neox.storage import attempt, has_wildcards, matches

_ADDRESS = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FORM = "hf://datasets/ORG/NAME[@REVISION][/PATTERN]"


def chosen_split(name: str, splits: Iterable[str], split: str | None) -> str:
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


class HubAddress(NamedTuple):
    """Parts of an address on the Hub.

    Attributes:
        repository: `ORG/NAME`.
        revision: Branch, tag or commit; None for the default branch. A slash in it is written as %2F.
        pattern: Path or pattern of files; empty for all of them.
    """

    repository: str
    revision: str | None
    pattern: str


def parse_address(address: str) -> HubAddress:
    """Parse an address. Raises DataError if it is invalid."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise DataError(f"{address}: an address on the Hub has the form {_FORM}")
    return HubAddress(found[1], found[2], (found[3] or "").strip("/"))


def hub_files(address: str, split: str | None, config: str | None) -> list[str]:
    """Return the addresses of the files of a dataset, which include the commit.

    The dataset card (`configs`) defines the files of a split. Without such an entry, file names decide
    (`train-00000-of-00002.parquet`).

    Args:
        address: `hf://datasets/ORG/NAME[@REVISION][/PATTERN]`.
        split: Split to read; needed if there are several and no pattern is given.
        config: Configuration to read; needed if there are several and no pattern is given.

    Raises:
        DataError: If the Hub refuses access, there is no such file, or split or configuration must be chosen.
    """
    parts = parse_address(address)
    is_file = is_readable(parts.pattern) and not has_wildcards(parts.pattern)
    if is_file and parts.revision and _COMMIT.fullmatch(parts.revision):
        return [address]
    info = _info(address, parts)
    files = sorted(entry.rfilename for entry in info.siblings or () if is_readable(entry.rfilename))
    if parts.pattern:
        files = _below(files, parts.pattern)
    patterns = None
    if not parts.pattern or config:
        patterns = _config_patterns(address, info.card_data, config)
    if patterns is not None:
        files = _of_patterns(address, files, patterns, split)
    else:
        files = _of_split(address, files, split, must_choose=not parts.pattern)
    if not files:
        raise DataError(f"{address}: the dataset has no readable file there")
    return [f"hf://datasets/{parts.repository}@{info.sha}/{file}" for file in files]


def _info(address: str, parts: HubAddress) -> Any:
    """Return the Hub's information about a dataset. Raises DataError."""
    with needs_package(DataError, address, "huggingface_hub", "requirements-storage.txt"):
        from huggingface_hub import HfApi
    revision = parts.revision and parts.revision.replace("%2F", "/")
    return attempt(lambda: HfApi().dataset_info(parts.repository, revision=revision), address)


def _below(files: Iterable[str], pattern: str) -> list[str]:
    """Return the files that match a pattern, or that lie in a directory."""
    if has_wildcards(pattern):
        return list(filter(partial(matches, pattern=pattern), files))
    below = f"{pattern.rstrip('/')}/"
    return list(filter(lambda file: f"{file}/".startswith(below), files))


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
        config = _default_config(known)
        if config is None:
            listed = ", ".join(known)
            raise DataError(f"{address} has several configurations: choose one with --config ({listed})")
    if config is not None and config not in known:
        raise DataError(f"{address} has no configuration {config!r}; it has {', '.join(known)}")
    entry = known[config] if config is not None else next(iter(known.values()))
    return _patterns_by_split(entry["data_files"])


def _default_config(known: Mapping[str, Any]) -> str | None:
    """Return the configuration marked as default in a card, or named `default`; None if there is none."""
    for name, entry in known.items():
        if entry.get("default"):
            return name
    return "default" if "default" in known else None


def _patterns_by_split(data_files: Any) -> dict[str, list[str]]:
    """Return the patterns of each split from any of the formats in a card."""
    if isinstance(data_files, str):
        return {"train": [data_files]}
    splits: dict[str, list[str]] = {}
    for entry in data_files:
        if isinstance(entry, str):
            splits.setdefault("train", []).append(entry)
            continue
        paths = entry["path"]
        splits.setdefault(entry["split"], []).extend([paths] if isinstance(paths, str) else paths)
    return splits


def _of_patterns(address: str, files: list[str], splits: Mapping[str, list[str]], split: str | None) -> list[str]:
    """Return the files of the chosen split of a configuration. Raises DataError if a choice is needed."""
    name = chosen_split(address, list(splits), split)
    return [file for file in files if any(matches(file, pattern) for pattern in splits[name])]


def _of_split(address: str, files: list[str], split: str | None, *, must_choose: bool) -> list[str]:
    """Return the files whose names have a split as a word. Raises DataError if a choice is needed."""
    known = list(filter(partial(_named, files), ("train", "validation", "valid", "dev", "test")))
    if split is None:
        if must_choose and len(known) > 1:
            chosen_split(address, known, None)
        return files
    found = _named(files, split)
    if not found:
        raise DataError(f"{address}: no file has {split!r} in its name; give a file pattern")
    return found


def _named(files: Iterable[str], split: str) -> list[str]:
    word = re.compile(rf"(^|[/._-]){re.escape(split)}([/._-]|$)")
    return list(filter(word.search, files))
