"""Flat keys -> sections: aliases translated, keys that do not exist or do not work here named."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from neox.config.aliases import ALIASES
from neox.config.unsupported import UNSUPPORTED
from neox.errors import ConfigError


@cache
def section_classes() -> Mapping[str, type[BaseModel]]:
    """Return section name -> class, in order."""
    from neox.config.sections import NeoXConfig

    classes: dict[str, type[BaseModel]] = {}
    for name, info in NeoXConfig.model_fields.items():
        assert isinstance(info.annotation, type)
        classes[name] = info.annotation
    return classes


@cache
def key_sections() -> Mapping[str, str]:
    """Return flat key -> section name."""
    owners: dict[str, str] = {}
    for section, cls in section_classes().items():
        for key in cls.model_fields:
            assert key not in owners, f"{key} in two sections"
            owners[key] = section
    return owners


def is_text_key(key: str) -> bool:
    """Whether a flat key holds text, so that `--set vocab_file=007` stays text."""
    section = key_sections().get(key)
    return section is not None and section_classes()[section].model_fields[key].annotation in (str, str | None)


def sections_from_flat(flat: dict[str, Any], sources: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Group flat keys by section. Raises ConfigError naming every unknown, twice given or wrongly typed key.

    `flat` is normalised in place: keys spelled with `_`, unset (None) keys removed.
    """
    problems = _normalise(flat)
    grouped: dict[str, dict[str, Any]] = {name: {} for name in section_classes()}
    nested = {key: value for key, value in flat.items() if key in key_sections()}
    problems += [_unknown(key, sources) for key in flat if not _known(key)]
    problems += _translate_aliases(flat, nested, sources)
    for key, value in nested.items():
        grouped[key_sections()[key]][key] = value
    for name, cls in section_classes().items():
        try:
            cls.model_validate(grouped[name])
        except ValidationError as error:
            problems += [_type_problem(cls, dict(detail), sources) for detail in error.errors()]
    if problems:
        raise ConfigError(problems)
    return grouped


def known_keys() -> list[str]:
    """Return every key that means something: sections, aliases, and those known but refused."""
    return sorted({*key_sections(), *ALIASES, *UNSUPPORTED})


def at(key: str, sources: Mapping[str, str]) -> str:
    """Return `file:line: ` of a key for the start of a message, or nothing where it is not known."""
    path = key
    while path:
        if path in sources:
            return f"{sources[path]}: "
        path = path.rpartition(".")[0]
    return ""


def _known(key: str) -> bool:
    return key in key_sections() or key in ALIASES or key in UNSUPPORTED


def _normalise(flat: dict[str, Any]) -> list[str]:
    problems = []
    items = list(flat.items())
    flat.clear()
    for written, value in items:
        key = written.replace("-", "_")
        if key in flat:
            problems.append(f"`{key}` is given twice (`-` and `_` are the same); remove one")
        if value is not None:
            flat[key] = value
    return problems


def _unknown(key: str, sources: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.6)
    hint = f"; did you mean `{near[0]}`?" if near else "; configs/neox_arguments.md lists all keys"
    return f"{at(key, sources)}unknown key `{key}`{hint}"


def _translate_aliases(flat: Mapping[str, Any], nested: dict[str, Any], sources: Mapping[str, str]) -> list[str]:
    """Move aliases (`gas`, `zero_stage`, ...) to the keys they stand for, in `nested`."""
    problems = []
    for name in flat:
        alias = ALIASES.get(name)
        if alias is None:
            continue
        agreeing = (flat[name],) if alias.values is None else alias.values.get(flat[name], ())
        present, value = _look_up(nested, alias.target)
        if not agreeing or (present and value in agreeing):
            continue
        if present:
            problems.append(
                f"{at(name, sources)}`{name}: {flat[name]}` contradicts `{alias.target}: {value}` "
                f"({sources.get(alias.target, 'given')}); they are one setting, so remove one"
            )
            continue
        _put(nested, alias.target, agreeing[0])
    return problems


def _look_up(nested: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    """Return whether a dotted path is present, and its value. A block of a wrong type counts as absent."""
    value: Any = nested
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False, None
        value = value[part]
    return True, value


def _put(nested: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted path, copying blocks on the way; a block of a wrong type is left for validation to refuse."""
    *blocks, last = path.split(".")
    place = nested
    for name in blocks:
        inner = place.get(name, {})
        if not isinstance(inner, Mapping):
            return
        place[name] = dict(inner)
        place = place[name]
    place[last] = value


def _type_problem(cls: type[BaseModel], detail: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Turn one pydantic error into a sentence with place, key, value and rule."""
    path = [str(part) for part in detail["loc"]]
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], _fields_beside(cls, path), n=1, cutoff=0.6)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        return f"{at(key, sources)}`{'.'.join(path[:-1])}` has no key `{path[-1]}`{hint}"
    rule = str(detail["msg"]).removeprefix("Input ").removeprefix("Value error, ")
    return f"{at(key, sources)}`{key}: {detail['input']!r}` {rule}"


def _fields_beside(cls: type[BaseModel], path: list[str]) -> list[str]:
    """Return the names allowed where `path` ends."""
    for name in path[:-1]:
        info = cls.model_fields.get(name)
        if info is None:
            return []
        candidates = [info.annotation, *getattr(info.annotation, "__args__", ())]
        inner = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not inner:
            return []
        cls = inner[0]
    return list(cls.model_fields)
