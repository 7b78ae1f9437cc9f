"""Operations on flat keys: spelling, nested blocks, aliases, and the problems found in them."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from neox.config.keys import ACTIVATION_KEYS, ALIASES

# Later gpt-neox hands this block to DeepSpeed as it is; here its keys are checked like all others.
EXTRA_ARGS = "deepspeed_extra_args"
ACTIVATION_BLOCK = "activation_checkpointing"

_PREFIX = re.compile(r"(?P<file>[^\n]*?):(?P<line>\d+)(?: \(replacing [^\n]*?\))?: ")


class Problem(NamedTuple):
    """Something wrong with the keys of a configuration.

    Attributes:
        text: One complete message.
        about: Dotted paths whose value is in doubt, those that may have been meant included.
    """

    text: str
    about: tuple[str, ...] = ()


def texts(problems: Iterable[Problem]) -> list[str]:
    """Return the messages alone."""
    return [problem.text for problem in problems]


def doubtful_paths(problems: Iterable[Problem]) -> frozenset[str]:
    """Return every path that a problem is about; an item of a list (`betas.1`) stands for the list."""
    return frozenset(re.sub(r"(\.\d+)+$", "", path) for problem in problems for path in problem.about)


def in_file_order(messages: Iterable[str]) -> list[str]:
    """Sort messages that begin with `file:line: ` by line, files in the order of their first message; others last."""
    files: dict[str, int] = {}

    def position(message: str) -> tuple[int, int]:
        match = _PREFIX.match(message)
        if match is None:
            return (sys.maxsize, 0)
        return files.setdefault(match["file"], len(files)), int(match["line"])

    return sorted(messages, key=position)


def source_prefix(key: str, sources: Mapping[str, str]) -> str:
    """Return `file:line: ` of a key for the start of a message, or nothing where its source is not known.

    Args:
        key: Flat key or dotted path. The nearest block around it, or else a key inside it, may give the source.
        sources: Dotted path -> source.
    """
    path = key
    while path or path in sources:
        if path in sources:
            return f"{sources[path]}: "
        path = path.rpartition(".")[0]
    inside = next((source for dotted, source in sources.items() if dotted.startswith(f"{key}.")), None)
    return "" if inside is None else f"{inside}: "


def normalise(flat: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return flat keys spelled with `_`, without unset (None) ones, and a problem for each key given twice."""
    result: dict[str, Any] = {}
    problems = []
    for written, value in flat.items():
        key = written.replace("-", "_")
        if key in result:
            problems.append(Problem(f"`{key}` is given twice (`-` and `_` are the same); remove one", (key,)))
        if value is not None:
            result[key] = value
    return result, problems


def spread_extra_args(values: dict[str, Any], sources: dict[str, str]) -> Iterator[Problem]:
    """Move the keys inside `deepspeed_extra_args` to the top level, in place; yield a problem for each given twice."""
    block = values.get(EXTRA_ARGS)
    if not isinstance(block, Mapping):
        return
    del values[EXTRA_ARGS]
    for path in [path for path in sources if path.startswith(f"{EXTRA_ARGS}.")]:
        sources.setdefault(path.removeprefix(f"{EXTRA_ARGS}."), sources.pop(path))
    for key, value in block.items():
        if key in values:
            where = source_prefix(key, sources)
            text = f"{where}`{key}` is given twice, at the top level and in {EXTRA_ARGS}; keep the first"
            yield Problem(text, (key,))
        else:
            values[key] = value


def spread_activation_checkpointing(values: dict[str, Any], sources: dict[str, str]) -> Iterator[Problem]:
    """Replace DeepSpeed's block of this name by the flat keys it stands for, in place; yield what is wrong with it."""
    block = values.get(ACTIVATION_BLOCK)
    if not isinstance(block, Mapping):
        return
    del values[ACTIVATION_BLOCK]
    for inner, value in block.items():
        path, key = f"{ACTIVATION_BLOCK}.{inner}", ACTIVATION_KEYS.get(inner)
        if key is None:
            near = get_close_matches(inner, ACTIVATION_KEYS, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else f"; it has {', '.join(ACTIVATION_KEYS)}"
            text = f"{source_prefix(path, sources)}`{ACTIVATION_BLOCK}` has no key `{inner}` here{hint}"
            yield Problem(text, (path,))
        elif values.setdefault(key, value) != value:
            text = f"{source_prefix(path, sources)}`{path}: {value}` contradicts `{key}: {values[key]}`; remove one"
            yield Problem(text, (path, key))
        elif path in sources:
            sources.setdefault(key, sources[path])


def translate_aliases(values: dict[str, Any], sources: Mapping[str, str]) -> Iterator[Problem]:
    """Replace aliases (`gas`, `zero_stage`, ...) by the keys they stand for, in place; yield contradictions."""
    for name in [name for name in values if name in ALIASES]:
        target, agreeing = ALIASES[name].target, ALIASES[name].agreeing(given := values.pop(name))
        present, value = look_up(values, target)
        if not agreeing or (present and value in agreeing):
            continue
        if present:
            text = (
                f"{source_prefix(name, sources)}`{name}: {given}` contradicts `{target}: {value}` "
                f"({sources.get(target, 'given')}); they are one setting, so remove one"
            )
            yield Problem(text, (name, target))
        else:
            _put(values, target, agreeing[0])


def without(flat: Mapping[str, Any], paths: Collection[str]) -> dict[str, Any]:
    """Return flat keys less some dotted paths."""
    rest: dict[str, Any] = {}
    for key, value in flat.items():
        if key in paths:
            continue
        inner = [path.removeprefix(f"{key}.") for path in paths if path.startswith(f"{key}.")]
        if not inner:
            rest[key] = value
        elif isinstance(value, Mapping):
            rest[key] = without(value, inner)
    return rest


def look_up(flat: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    """Return whether a dotted path is present, and its value. A block of a wrong type counts as absent."""
    value: Any = flat
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False, None
        value = value[part]
    return True, value


def _put(flat: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted path, copying blocks on the way; a block of a wrong type is left for validation to refuse."""
    *blocks, last = path.split(".")
    block = flat
    for name in blocks:
        inner = block.get(name, {})
        if not isinstance(inner, Mapping):
            return
        block[name] = dict(inner)
        block = block[name]
    block[last] = value
