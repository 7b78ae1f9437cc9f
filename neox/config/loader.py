"""Loading of configuration files and `--set` overrides into a `NeoXConfig`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from neox.config.flat import Problem, doubtful_paths, in_file_order, spread_extra_args, texts, without
from neox.config.keys import ALIASES, REPLACEABLE, REPLACING, TOKENIZER_KEYS
from neox.config.neox_config import NeoXConfig, is_text_key
from neox.config.yaml_file import ParsedFile, parse_value, read_file
from neox.errors import ConfigError

_SUFFIXES = (".yml", ".yaml", ".json")


@dataclass(frozen=True)
class Draft:
    """Files and overrides as far as they can be read.

    Attributes:
        config: Configuration of the valid keys.
        problems: Messages on the other keys.
        doubtful: Dotted paths whose value is therefore unknown; further messages about them may be wrong.
    """

    config: NeoXConfig
    problems: tuple[str, ...] = ()
    doubtful: frozenset[str] = frozenset()

    def certain(self, problems: Iterable[str]) -> list[str]:
        """Return the messages that mention no doubtful key."""
        words = [re.compile(rf"(?<![\w.]){re.escape(path)}(?!\w)") for path in self.doubtful]
        return [problem for problem in problems if not any(word.search(problem) for word in words)]


def draft_config(
    files: Sequence[str | Path], *, conf_dir: str | Path | None = None, overrides: Sequence[str] = ()
) -> Draft:
    """Read configuration files and overrides, and return the problems of single keys beside what could be read.

    Args:
        files: YAML or JSON; `.yml` may be left out. A key may be in one file only, unless it is one of `REPLACEABLE`,
            which a later file replaces.
        conf_dir: Directory prefixed to each file.
        overrides: `key=value`, which win over files; dots reach into blocks (`optimizer.params.lr=1e-4`), and `None`
            and `null` unset.

    Raises:
        ConfigError: A file cannot be read or parsed.
    """
    values, sources, problems = merge_files([find_file(file, conf_dir) for file in files])
    for override in overrides:
        try:
            apply_override(override, values, sources)
        except ConfigError as error:
            key = override.partition("=")[0].strip().replace("-", "_")
            problems.extend(Problem(text, (key.partition(".")[0],)) for text in error.problems)
    problems += spread_extra_args(values, sources)
    config, more = NeoXConfig.parse(values, sources)
    problems += more
    if config is not None and not problems:
        return Draft(config)
    bad = doubtful_paths(problems)
    bad |= {name for name, alias in ALIASES.items() if alias.target in bad}
    config, more = NeoXConfig.parse(without(values, bad), sources)
    if config is None:  # a block misses what it needs, now that a wrong value is left out
        bad |= doubtful_paths(more)
        config = NeoXConfig.from_flat(without(values, bad), sources)
    return Draft(config, tuple(in_file_order(texts(problems))), bad)


def find_file(file: str | Path, conf_dir: str | Path | None = None) -> Path:
    """Return the path of a configuration file.

    Raises:
        ConfigError: There is none; with what was tried and what the directory holds.
    """
    path = Path(conf_dir) / file if conf_dir is not None else Path(file)
    if path.suffix in _SUFFIXES and path.exists():
        return path
    tried = [path] if path.suffix in _SUFFIXES else [path.with_name(path.name + s) for s in _SUFFIXES]
    for candidate in tried:
        if candidate.exists():
            return candidate
    if path.exists():
        return path
    raise ConfigError(f"{tried[0]}: no such file{_where_else(path, Path(file))}")


def _where_else(path: Path, file: Path) -> str:
    """Return a hint at the file that may have been meant by one that does not exist."""
    there = sorted(p.name for p in path.parent.glob("*") if p.suffix in _SUFFIXES and ".schema" not in p.suffixes)
    if close := get_close_matches(path.name, [*there, *(Path(name).stem for name in there)], n=1, cutoff=0.75):
        return f"; did you mean {close[0]}?"
    if directory := _shipped_directory(file):
        return f"; {directory} has it: did you forget `-d {directory}`?"
    if not path.parent.is_dir():
        return f"; there is no directory {path.parent}"
    return f"; {path.parent} has {', '.join(there[:40])}" if there else ""


def _shipped_directory(file: Path) -> str:
    """Return the project's configs/, relative to the working directory, if `file` is in it; else nothing."""
    shipped = Path(__file__).resolve().parents[2] / "configs"
    if not any(not file.is_absolute() and (shipped / f"{file}{suffix}").is_file() for suffix in ("", *_SUFFIXES)):
        return ""
    return os.path.relpath(shipped)


def merge_files(paths: Sequence[Path]) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Return all keys of all files, `file:line` of each dotted path, and a problem for each duplicate.

    Raises:
        ConfigError: A file cannot be read or parsed.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    problems: list[Problem] = []
    unreadable: list[str] = []
    basenames: dict[str, Path] = {}
    for path in paths:
        if path.name in basenames:
            first = basenames[path.name]
            advice = "is given twice; name it once" if path == first else f"has the name of {first}; rename one"
            unreadable.append(f"{path}: {advice}")
            continue
        basenames[path.name] = path
        try:
            parsed = read_file(path)
        except ConfigError as error:
            unreadable.extend(error.problems)
            continue
        problems += parsed.problems
        for key, value in parsed.values.items():
            if key in REPLACEABLE and key in values:
                problems += _replace(key, values, sources, parsed)
            elif key in values:
                text = f"{parsed.name}:{parsed.lines[key]}: `{key}` is also given at {sources[key]}"
                problems.append(Problem(f"{text}; keep it in one file (or override it with --set)", (key,)))
                continue
            else:
                for dotted, line in parsed.lines.items():
                    if dotted == key or dotted.startswith(f"{key}."):
                        sources[dotted] = f"{parsed.name}:{line}"
            values[key] = value
    if unreadable:
        raise ConfigError([*unreadable, *texts(problems)])
    return values, sources, problems


def _replace(key: str, values: dict[str, Any], sources: dict[str, str], parsed: ParsedFile) -> list[Problem]:
    """Prepare that a file replaces a key of an earlier one: its source names both places.

    A tokenizer is replaced whole: what the earlier file says of it, and this one does not, is removed.

    Returns:
        A problem where only a part of the tokenizer is given again.
    """
    here, former = f"{parsed.name}:{parsed.lines[key]}", sources[key]
    sources[key] = f"{here}{REPLACING}{former})"
    if key not in TOKENIZER_KEYS:
        return []
    if missing := [name for name in TOKENIZER_KEYS[:2] if name not in parsed.values]:
        text = f"{here}: `{key}` is also given at {former}"
        return [Problem(f"{text}, and a tokenizer is replaced whole: give {missing[0]} here, too", (key,))]
    for name in TOKENIZER_KEYS:
        if name not in parsed.values and values.pop(name, None) is not None:
            sources.pop(name, None)
    return []


def apply_override(override: str, values: dict[str, Any], sources: dict[str, str]) -> None:
    """Apply `key=value` to `values` in place; blocks are copied.

    Raises:
        ConfigError: The override is malformed.
    """
    key, equals, text = override.partition("=")
    key = key.strip().replace("-", "_")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise ConfigError(f"--set {override}: should be key=value, such as --set train_iters=100")
    *blocks, last = key.split(".")
    value = parse_value(text)
    if value is not None and not blocks and is_text_key(last):
        value = text
    block = values
    for depth, name in enumerate(blocks):
        inner = block.get(name)
        if inner is not None and not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: `{'.'.join(blocks[: depth + 1])}` is {inner!r}, not a block")
        block[name] = dict(inner or {})
        block = block[name]
    if value is None:
        block.pop(last, None)
    else:
        block[last] = value
    for dotted in [d for d in sources if d == key or d.startswith(f"{key}.")]:
        del sources[dotted]
    sources[key] = "--set"
