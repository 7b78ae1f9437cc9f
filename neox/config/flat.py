"""Flat keys -> sections: aliases translated, keys that do not exist or do not work here named."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from neox.config.keys import ALIASES, UNSUPPORTED, alias_target
from neox.config.problem import Problem

# What a type error means, in the words of someone who writes YAML.
_RULES = {
    "bool_parsing": "should be true or false",
    "bool_type": "should be true or false",
    "dict_type": "should be a block of `key: value` pairs",
    "float_parsing": "should be a number",
    "float_type": "should be a number",
    "int_from_float": "should be a whole number",
    "int_parsing": "should be a whole number",
    "int_parsing_size": "is too large",
    "int_type": "should be a whole number",
    "model_type": "should be a block of `key: value` pairs",
    "model_attributes_type": "should be a block of `key: value` pairs",
    "string_type": "should be text; write it in quotes",
    "tuple_type": "should be a list, such as [1, 2] or [a, b]",
    "too_long": "has too many values",
}

# Later gpt-neox hands this block to DeepSpeed as it is; here its keys are checked like all others.
EXTRA_ARGS = "deepspeed_extra_args"

# Keys of other programs' blocks whose meaning lives elsewhere.
_ELSEWHERE = {"optimizer.params.max_grad_norm": "; gradient_clipping is the key for that"}


@dataclass(frozen=True)
class Grouped:
    """Flat keys grouped by section, and what is wrong with them."""

    sections: dict[str, dict[str, Any]]
    problems: tuple[Problem, ...]


@cache
def section_classes(root: type[BaseModel]) -> Mapping[str, type[BaseModel]]:
    """Return section name -> class of a configuration class, in order."""
    classes: dict[str, type[BaseModel]] = {}
    for name, info in root.model_fields.items():
        assert isinstance(info.annotation, type)
        classes[name] = info.annotation
    return classes


@cache
def key_sections(root: type[BaseModel]) -> Mapping[str, str]:
    """Return flat key -> section name."""
    owners: dict[str, str] = {}
    for section, cls in section_classes(root).items():
        for key in cls.model_fields:
            assert key not in owners, f"{key} in two sections"
            owners[key] = section
    return owners


def is_text_key(root: type[BaseModel], key: str) -> bool:
    """Whether a flat key holds text, so that `--set vocab_file=007` stays text."""
    section = key_sections(root).get(key)
    return section is not None and section_classes(root)[section].model_fields[key].annotation in (str, str | None)


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
            text = f"{at(key, sources)}`{key}` is given twice, at the top level and in {EXTRA_ARGS}; keep the first"
            yield Problem(text, (key,))
        else:
            values[key] = value


def group(root: type[BaseModel], flat: Mapping[str, Any], sources: Mapping[str, str]) -> Grouped:
    """Group normalised flat keys by section, naming every unknown, contradictory or wrongly typed key."""
    owners, classes = key_sections(root), section_classes(root)
    nested = {key: value for key, value in flat.items() if key in owners}
    unknown = [key for key in flat if key not in owners and key not in ALIASES and key not in UNSUPPORTED]
    problems = [_unknown(key, known_keys(root), flat, sources) for key in unknown]
    problems += _translate_aliases(flat, nested, sources)
    grouped: dict[str, dict[str, Any]] = {name: {} for name in classes}
    for key, value in nested.items():
        grouped[owners[key]][key] = value
    for name, cls in classes.items():
        try:
            cls.model_validate(grouped[name])
        except ValidationError as error:
            for detail in error.errors():
                problems.append(_type_problem(cls, dict(detail), sources))
    return Grouped(grouped, tuple(problems))


def without(flat: Mapping[str, Any], bad: Collection[str]) -> dict[str, Any]:
    """Return flat keys less the dotted paths in `bad`."""
    rest: dict[str, Any] = {}
    for key, value in flat.items():
        if key in bad:
            continue
        inner = [path.removeprefix(f"{key}.") for path in bad if path.startswith(f"{key}.")]
        if not inner:
            rest[key] = value
        elif isinstance(value, Mapping):
            rest[key] = without(value, inner)
    return rest


def known_keys(root: type[BaseModel]) -> list[str]:
    """Return every key that means something: sections, aliases, and those known but refused."""
    return sorted({*key_sections(root), *ALIASES, *UNSUPPORTED})


def at(key: str, sources: Mapping[str, str]) -> str:
    """Return `file:line: ` of a key for the start of a message, or nothing where it is not known."""
    path = key
    while path or path in sources:
        if path in sources:
            return f"{sources[path]}: "
        path = path.rpartition(".")[0]
    inside = next((place for dotted, place in sources.items() if dotted.startswith(f"{key}.")), None)
    return "" if inside is None else f"{inside}: "


def _unknown(key: str, known: list[str], flat: Mapping[str, Any], sources: Mapping[str, str]) -> Problem:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f"; did you mean `{near[0]}`?" if near else "; configs/neox_arguments.md lists all keys"
    meant = (alias_target(name) for name in near if name not in flat)
    return Problem(f"{at(key, sources)}unknown key `{key}`{hint}", (key, *meant))


def _translate_aliases(
    flat: Mapping[str, Any], nested: dict[str, Any], sources: Mapping[str, str]
) -> Iterator[Problem]:
    """Move aliases (`gas`, `zero_stage`, ...) to the keys they stand for, in `nested`; yield contradictions."""
    for name in flat:
        alias = ALIASES.get(name)
        if alias is None:
            continue
        agreeing = alias.agreeing(flat[name])
        present, value = _look_up(nested, alias.target)
        if not agreeing or (present and value in agreeing):
            continue
        if present:
            text = (
                f"{at(name, sources)}`{name}: {flat[name]}` contradicts `{alias.target}: {value}` "
                f"({sources.get(alias.target, 'given')}); they are one setting, so remove one"
            )
            yield Problem(text, (name, alias.target))
            continue
        _put(nested, alias.target, agreeing[0])


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


def _type_problem(cls: type[BaseModel], detail: Mapping[str, Any], sources: Mapping[str, str]) -> Problem:
    """Turn one pydantic error into a sentence with place, key, value and rule."""
    path = [str(part) for part in detail["loc"]]
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], _fields_beside(cls, path), n=1, cutoff=0.6)
        hint = f"; did you mean `{near[0]}`?" if near else _ELSEWHERE.get(key, "")
        block = ".".join(path[:-1])
        text = f"{at(key, sources)}`{block}` has no key `{path[-1]}`{hint}"
        return Problem(text, (key, *(f"{block}.{name}" for name in near)))
    if detail["type"] == "missing":  # a list that is too short names its first missing place
        key, rule = ".".join(path[:-1]), "has too few values"
    else:
        rule = _RULES.get(detail["type"]) or str(detail["msg"]).removeprefix("Input ")
    return Problem(f"{at(key, sources)}`{key}: {_shown(detail['input'])}` {rule}{_nearest_choice(detail)}", (key,))


def _shown(value: Any) -> str:
    """Return a value as it was written, cut where it is long."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _nearest_choice(detail: Mapping[str, Any]) -> str:
    """Return a suggestion for a misspelled choice."""
    if detail["type"] != "literal_error" or not isinstance(detail["input"], str):
        return ""
    choices = re.findall(r"'([^']*)'", str(detail["ctx"]["expected"]))
    near = difflib.get_close_matches(detail["input"], choices, n=1, cutoff=0.6)
    return f"; did you mean `{near[0]}`?" if near else ""


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
