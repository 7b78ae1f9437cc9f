"""Loading of configuration files and `--set` overrides into a `NeoXConfig`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from neox.config.base_shapes import read_base_shapes
from neox.config.flat import FlatKeys, without
from neox.config.keys import ALIASES, REPLACEABLE, TOKENIZER_KEYS
from neox.config.neox_config import NeoXConfig, is_text_key
from neox.config.yaml_file import ParsedFile, parse_value, read_file
from neox.errors import ConfigError
from neox.problems import COMMAND_LINE, Problem, Source, in_file_order
from neox.shipped_files import shipped_config

OVERRIDES = "overrides"
"""Section of a file whose keys replace those of earlier files."""
_SUFFIXES = (".yml", ".yaml", ".json")
_MAX_REPEATED = 3  # repeated keys of an earlier file that are reported one by one; more become one problem


@dataclass(frozen=True)
class LoadedConfig:
    """Files and overrides as far as they can be read.

    Attributes:
        config: Configuration of the valid keys.
        problems: Problems of the other keys, in file order.
        doubtful: Dotted paths whose value is therefore unknown.
    """

    config: NeoXConfig
    problems: tuple[Problem, ...] = ()
    doubtful: frozenset[str] = frozenset()

    def certain(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return the problems that depend on no doubtful key."""
        return [problem for problem in problems if not problem.concerns(self.doubtful)]


def load_config(
    files: Sequence[str | Path], *, conf_dir: str | Path | None = None, overrides: Sequence[str] = ()
) -> LoadedConfig:
    """Read configuration files and overrides.

    Args:
        files: YAML or JSON; `.yml` may be left out. A key may be in one file only, unless it is one of `REPLACEABLE`,
            which a later file replaces, or stands in the section `overrides` of a later file.
        conf_dir: Directory prefixed to each file.
        overrides: `key=value`, which win over files; dots reach into blocks (`optimizer.params.lr=1e-4`), and `None`
            and `null` unset.

    Returns:
        What could be read, with the problems of single keys.

    Raises:
        ConfigError: A file cannot be read or parsed.
    """
    flat = merge_files([find_file(file, conf_dir) for file in files])
    for override in overrides:
        apply_override(override, flat)
    flat.spread_extra_args()
    read_base_shapes(flat)
    config, problems = NeoXConfig.parse(flat.values, flat.sources)
    flat.problems += problems
    if config is not None and not flat.problems:
        return LoadedConfig(config)
    return _load_valid_keys(flat)


def _load_valid_keys(flat: FlatKeys) -> LoadedConfig:
    """Return the configuration of the keys without problems, with the problems of the others."""
    doubtful = _keys_of(flat.problems)
    for name, alias in ALIASES.items():
        if alias.target in doubtful:
            doubtful.add(name)
    config, problems = NeoXConfig.parse(without(flat.values, doubtful), flat.sources)
    if config is None:  # a block lacks what it needs, because a wrong value was left out
        doubtful |= _keys_of(problems)
        config = NeoXConfig.from_flat(without(flat.values, doubtful), flat.sources)
    return LoadedConfig(config, tuple(in_file_order(flat.problems)), frozenset(doubtful))


def _keys_of(problems: Iterable[Problem]) -> set[str]:
    return {key for problem in problems for key in problem.keys}


def find_file(file: str | Path, conf_dir: str | Path | None = None) -> Path:
    """Return the path of a configuration file: in the directory if it has it, else as it is given.

    Args:
        file: Path of the file, perhaps without its suffix.
        conf_dir: Directory that is looked in first (`-d`).

    Raises:
        ConfigError: There is none; with a hint at the file that may have been meant.
    """
    path = Path(file) if conf_dir is None else Path(conf_dir, file)
    candidates = _spellings(path)
    elsewhere = [] if conf_dir is None else _spellings(Path(file))
    for candidate in (*candidates, *elsewhere):
        if candidate.exists():
            return candidate
    for candidate in candidates:
        shipped = shipped_config(candidate)
        if shipped is not None:
            return shipped
    message = f"no such file{_where_else(path, Path(file))}"
    raise ConfigError(Problem((), message, Source.in_file(str(candidates[0]))))


def _spellings(path: Path) -> list[Path]:
    """Return the paths that a file may have whose suffix may be left out."""
    if path.suffix in _SUFFIXES:
        return [path]
    return [*(path.with_name(path.name + suffix) for suffix in _SUFFIXES), path]


def _where_else(path: Path, file: Path) -> str:
    """Return a hint at the file that may have been meant by one that does not exist."""
    there = []
    for other in sorted(path.parent.glob("*")):
        if other.suffix in _SUFFIXES and ".schema" not in other.suffixes:
            there.append(other.name)
    stems = [Path(name).stem for name in there]
    if close := get_close_matches(path.name, [*there, *stems], n=1, cutoff=0.75):
        return f"; did you mean {close[0]}?"
    if directory := _shipped_directory(file):
        return f"; {directory} has it: did you forget `-d {directory}`?"
    if not path.parent.is_dir():
        return f"; there is no directory {path.parent}"
    if not there:
        return ""
    return f"; {path.parent} has {', '.join(there[:40])}"


def _shipped_directory(file: Path) -> str:
    """Return the project's configs/, relative to the working directory, if `file` is in it; else nothing."""
    shipped = Path(__file__).resolve().parents[2] / "configs"
    candidates = [shipped / f"{file}{suffix}" for suffix in ("", *_SUFFIXES)]
    if file.is_absolute() or not any(candidate.is_file() for candidate in candidates):
        return ""
    return os.path.relpath(shipped)


def merge_files(paths: Sequence[Path]) -> FlatKeys:
    """Return all keys of all files with their places; a key that two files give is among its problems.

    Raises:
        ConfigError: A file cannot be read or parsed.
    """
    flat = FlatKeys({}, {})
    unreadable: list[Problem] = []
    basenames: dict[str, Path] = {}
    for path in paths:
        if path.name in basenames:
            unreadable.append(_same_name(path, basenames[path.name]))
            continue
        basenames[path.name] = path
        try:
            parsed = read_file(path)
        except ConfigError as error:
            unreadable.extend(error.problems)
            continue
        flat.problems += parsed.problems
        repeated = []
        for key in parsed.values:
            if key in flat.values and key not in REPLACEABLE:
                repeated.append(key)
            elif key != OVERRIDES:
                _add_key(key, parsed, flat)
        _report_repeated(repeated, parsed, flat)
        _apply_section(parsed, flat)
    if unreadable:
        raise ConfigError([*unreadable, *flat.problems])
    return flat


def _apply_section(parsed: ParsedFile, flat: FlatKeys) -> None:
    """Let the keys of a file's section `overrides` replace those of earlier files, blocks as a whole."""
    section = parsed.values.get(OVERRIDES)
    if section is None:
        return
    if not isinstance(section, dict):
        message = f"`{OVERRIDES}` should hold `key: value` pairs that replace those of earlier files"
        flat.report(message, OVERRIDES, source=parsed.source(OVERRIDES))
        return
    for written, value in section.items():
        key = written.replace("-", "_")
        path = f"{OVERRIDES}.{written}"
        here = parsed.source(path)
        if key in parsed.values:
            flat.report(f"`{key}` is also given outside of `{OVERRIDES}` in this file; remove one", key, source=here)
            continue
        former = flat.source(key) if key in flat.values else None
        _forget_sources(key, flat.sources)
        for dotted in parsed.lines:
            if dotted.startswith(f"{path}."):
                flat.sources[key + dotted.removeprefix(path)] = parsed.source(dotted)
        dropped = tuple(_dropped(flat.values.get(key), value))
        flat.sources[key] = Source.in_file(here.file, here.line, replaces=former, dropped=dropped)
        flat.values[key] = value


def _dropped(former: Any, value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the settings inside a block that the block in its place does not have, as `path: value`."""
    if not isinstance(former, dict) or not isinstance(value, dict):
        return
    for name, setting in former.items():
        if name not in value:
            yield f"{prefix}{name}: {setting}"
        else:
            yield from _dropped(setting, value[name], f"{prefix}{name}.")


def _same_name(path: Path, first: Path) -> Problem:
    advice = "is given twice; name it once" if path == first else f"has the name of {first}; rename one"
    return Problem((), advice, Source.in_file(str(path)))


def _add_key(key: str, parsed: ParsedFile, flat: FlatKeys) -> None:
    """Add a key of a file to those of earlier files."""
    if key not in flat.values:
        for dotted in parsed.lines:
            if dotted == key or dotted.startswith(f"{key}."):
                flat.sources[dotted] = parsed.source(dotted)
    else:
        _replace(key, parsed, flat)
    flat.values[key] = parsed.values[key]


def _report_repeated(keys: Sequence[str], parsed: ParsedFile, flat: FlatKeys) -> None:
    """Report the keys that earlier files also give: a problem per key, or a single one per earlier file if many."""
    by_file: dict[str, list[str]] = {}
    for key in keys:
        by_file.setdefault(flat.sources[key].file, []).append(key)
    for file, repeated in by_file.items():
        if len(repeated) > _MAX_REPEATED:
            places = [f"`{key}` (line {flat.sources[key].line})" for key in repeated]
            message = (
                f"{len(repeated)} keys are also given in {file}: {', '.join(places)}; give each in one file, or move "
                f"those that this file changes to its section `{OVERRIDES}:`"
            )
            flat.report(message, *repeated, source=parsed.source(repeated[0]))
            continue
        for key in repeated:
            advice = f"keep it in one file, or replace it (in `{OVERRIDES}:` or with --set)"
            message = f"`{key}` is also given at {flat.sources[key]}; {advice}"
            flat.report(message, key, source=parsed.source(key))


def _replace(key: str, parsed: ParsedFile, flat: FlatKeys) -> None:
    """Prepare that a file replaces a key of an earlier one: its source names both places.

    A tokenizer is replaced whole: what the earlier file says of it, and this one does not, is removed. It is a problem
    if a file gives only a part of a tokenizer again.
    """
    here = parsed.source(key)
    former = flat.sources[key]
    _forget_sources(key, flat.sources)
    for dotted in parsed.lines:
        if dotted.startswith(f"{key}."):
            flat.sources[dotted] = parsed.source(dotted)
    flat.sources[key] = Source.in_file(here.file, here.line, replaces=former)
    if key not in TOKENIZER_KEYS:
        return
    for name in TOKENIZER_KEYS[:2]:
        if name not in parsed.values:
            message = f"`{key}` is also given at {former}, and a tokenizer is replaced whole: give {name} here, too"
            flat.report(message, key, source=here)
            return
    for name in TOKENIZER_KEYS:
        if name not in parsed.values and flat.values.pop(name, None) is not None:
            flat.sources.pop(name, None)


def apply_override(override: str, flat: FlatKeys) -> None:
    """Apply `key=value` in place; blocks are copied. A malformed override is a problem."""
    key, equals, text = override.partition("=")
    key = key.strip().replace("-", "_")
    *blocks, last = key.split(".")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        message = f"`{override}` should be key=value, such as --set train_iters=100"
        flat.report(message, key.partition(".")[0], source=COMMAND_LINE)
        return
    try:
        value = parse_value(text)
    except ConfigError as error:
        for problem in error.problems:
            flat.report(f"`{key}`: {problem.message}", key.partition(".")[0], source=COMMAND_LINE)
        return
    if value is not None and not blocks and is_text_key(last):
        value = text
    block = flat.values
    for depth, name in enumerate(blocks, start=1):
        inner = block.get(name)
        if inner is not None and not isinstance(inner, dict):
            message = f"`{key}`: `{'.'.join(blocks[:depth])}` is {inner!r}, not a block"
            flat.report(message, blocks[0], source=COMMAND_LINE)
            return
        block[name] = dict(inner or {})
        block = block[name]
    if value is None:
        block.pop(last, None)
    else:
        block[last] = value
    _forget_sources(key, flat.sources)
    flat.sources[key] = COMMAND_LINE


def _forget_sources(key: str, sources: dict[str, Source]) -> None:
    """Remove the sources of a dotted path and of what is inside it."""
    for dotted in list(sources):
        if dotted == key or dotted.startswith(f"{key}."):
            del sources[dotted]
