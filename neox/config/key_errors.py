"""Messages about single keys: unknown ones, and values of a wrong type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from neox.config.flat import FlatKeys, look_up
from neox.config.key_spelling import means_the_same
from neox.config.keys import OTHER_SYSTEMS, alias_target
from neox.config.sections.optimizer import OptimizerSettings

# What a type error means, in the words of someone who writes YAML.
_TYPE_ERRORS: Mapping[str, str] = MappingProxyType(
    {
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
)

# What to write instead, for keys whose type and name do not say it.
_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "optimizer.params.max_grad_norm": "; gradient_clipping is the key for that",
        "rampup_batch_size": "; it is [first size, increment, samples of the ramp-up]",
    }
)
_LEAST_BEGINNING = 8  # letters of a key that is the beginning of another one
_LONGEST_VALUE = 100  # characters of a value that are shown


@dataclass
class _WrongValue:
    """A value that no type of its field takes.

    Attributes:
        path: Path of the field, as its names.
        shown: The path in messages, with the number of an item of a list.
        value: The value.
        rules: What each type of the field asks for.
    """

    path: tuple[str, ...]
    shown: str
    value: Any
    rules: list[str]


def report_unknown_key(
    flat: FlatKeys, key: str, known_keys: Sequence[str], sections: Iterable[type[BaseModel]]
) -> None:
    """Report a flat key that nothing knows, with the key that may have been meant.

    Args:
        flat: The keys; takes the problem.
        key: The unknown key.
        known_keys: All keys that mean something.
        sections: All sections, in whose blocks the key may stand.
    """
    if key in OTHER_SYSTEMS:
        flat.report(f"unknown key `{key}`, another system's; here it is {OTHER_SYSTEMS[key]}", key)
        return
    near = [name for name in known_keys if means_the_same(key, name)][:1]
    longer = [name for name in known_keys if name.startswith(key)]
    if not near and len(longer) == 1 and len(key) >= _LEAST_BEGINNING:
        near = longer
    if not near:
        in_blocks = [path for path in _paths_in_blocks(sections, flat) if path.endswith(f".{key}")]
        hint = (
            f"did you mean `{'` or `'.join(in_blocks)}`?" if in_blocks else "configs/neox_arguments.md lists all keys"
        )
        flat.report(f"unknown key `{key}`; {hint}", key)
        return
    meant = [alias_target(name) for name in near if name not in flat.values]
    flat.report(f"unknown key `{key}`; did you mean `{near[0]}`?", key, *meant)


def _paths_in_blocks(sections: Iterable[type[BaseModel]], flat: FlatKeys) -> Iterator[str]:
    """Yield the paths of all settings inside of blocks, such as `optimizer.params.lr`."""
    for section in sections:
        for name in section.model_fields:
            yield from _paths_below(section, (name,), flat)


def _paths_below(section: type[BaseModel], path: tuple[str, ...], flat: FlatKeys) -> Iterator[str]:
    """Yield the paths of the settings inside of a block; none for a setting and for lists and mappings of blocks."""
    block = _block_class(section, path, flat)
    field = _field(section, path, flat)
    if block is None or field is None or get_origin(field.annotation) in (dict, tuple):
        return
    for name in block.model_fields:
        yield ".".join((*path, name))
        yield from _paths_below(section, (*path, name), flat)


def report_type_errors(flat: FlatKeys, section: type[BaseModel], error: ValidationError) -> None:
    """Report what pydantic found wrong with the keys of a section, each with its key, value and rule.

    Args:
        flat: The keys; takes the problems.
        section: The section.
        error: What pydantic found.
    """
    wrong: dict[str, _WrongValue] = {}
    details = error.errors()
    of_items = [detail["loc"][:-1] for detail in details if isinstance(detail["loc"][-1], int)]
    for detail in details:
        if detail["type"] == "too_short" and detail["loc"] in of_items:
            continue  # it counts only the items without an error
        path = _field_path(section, detail["loc"], flat)
        if detail["type"] == "extra_forbidden":
            _report_unknown_key_of_block(flat, section, path)
            continue
        found = _wrong_value(section, path, dict(detail), flat)
        known = wrong.setdefault(found.shown, found)
        if known is not found:  # another type of the same field, which does not take the value either
            known.rules += [rule.removeprefix("should be ") for rule in found.rules]
    for found in wrong.values():
        key = ".".join(found.path)
        text = repr(found.value)
        if isinstance(found.value, bool):
            text = text.lower()
        if len(text) > _LONGEST_VALUE:
            text = f"{text[: _LONGEST_VALUE - 3]}..."
        if found.value == "auto":
            found.rules.append("`auto` is for the Hugging Face Trainer, which fills it in; give the value")
        field = _field(section, found.path, flat)
        if found.value is False and field is not None and field.default is None:
            found.rules.append("`null`, which switches it off")
        flat.report(f"`{found.shown}: {text}` {', or '.join(found.rules)}", key)


def _wrong_value(
    section: type[BaseModel], path: tuple[str, ...], detail: Mapping[str, Any], flat: FlatKeys
) -> _WrongValue:
    """Return a value with the rule that one of pydantic's errors says it breaks."""
    location = detail["loc"]
    last = location[-1]
    if detail["type"] != "missing":
        numbers = [str(part) for part in location[len(path) :] if isinstance(part, int)]
        rule = _TYPE_ERRORS.get(detail["type"]) or str(detail["msg"]).removeprefix("Input ")
        rule += _nearest_choice(section, path, detail["input"], flat) or _HINTS.get(".".join(path), "")
        return _WrongValue(path, ".".join([*path, *numbers]), detail["input"], [rule])
    if isinstance(last, int):  # a list that is too short, and its first missing item
        rule = "has too few values" + _HINTS.get(".".join(path), "")
        return _WrongValue(path, ".".join(path), detail["input"], [rule])
    block = path[:-1]
    return _WrongValue(block, ".".join(block), detail["input"], [f"needs `{last}`"])


def _report_unknown_key_of_block(flat: FlatKeys, section: type[BaseModel], path: tuple[str, ...]) -> None:
    *around, name = path
    block = _block_class(section, around, flat)
    there = [] if block is None else list(block.model_fields)
    near = [known for known in there if means_the_same(name, known)][:1]
    key = ".".join(path)
    if near:
        hint = f"; did you mean `{near[0]}`?"
    else:
        hint = _HINTS.get(key, f"; it has {', '.join(there)}")
    meant = [".".join([*around, other]) for other in near]
    flat.report(f"`{'.'.join(around)}` has no key `{name}`{hint}", key, *meant)


def _nearest_choice(section: type[BaseModel], path: tuple[str, ...], value: Any, flat: FlatKeys) -> str:
    """Return a suggestion for a misspelled choice; nothing for other values."""
    field = _field(section, path, flat)
    if field is None or not isinstance(value, str):
        return ""
    choices = [choice for choice in _choices(field.annotation) if isinstance(choice, str)]
    near = [choice for choice in choices if choice.lower() == value.lower()]
    if not near and len(value) > 1:
        near = [choice for choice in choices if choice.lower().startswith(value.lower())]
    if not near:
        near = [choice for choice in choices if means_the_same(value, choice)][:1]
    return f"; did you mean `{'` or `'.join(near)}`?" if near else ""


def _choices(annotation: Any) -> Iterator[Any]:
    """Yield the values of every Literal in an annotation."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
        return
    for part in get_args(annotation):
        yield from _choices(part)


def _field_path(section: type[BaseModel], location: Sequence[str | int], flat: FlatKeys) -> tuple[str, ...]:
    """Return the part of pydantic's location that names fields, and items of lists of blocks.

    Items of other lists and members of unions are left out, and pydantic's words in brackets. The last name need not
    be a field: it is the unknown or missing one.
    """
    path: list[str] = []
    for part in location:
        if str(part).startswith(("<", "[")):
            continue
        if _block_class(section, path, flat) is None or (isinstance(part, int) and not path):
            break
        path.append(str(part))
    return tuple(path)


def _field(section: type[BaseModel], path: Sequence[str], flat: FlatKeys) -> FieldInfo | None:
    """Return the field at a path; None if there is none."""
    block = _block_class(section, path[:-1], flat)
    return None if block is None else block.model_fields.get(path[-1])


def _block_class(section: type[BaseModel], path: Sequence[str], flat: FlatKeys) -> type[BaseModel] | None:
    """Return the class of the block at a path; None if no block is there."""
    block: type[BaseModel] | None = section
    chosen_name_follows = False
    for name in path:
        if name.isdigit() or chosen_name_follows:  # an item of a list of blocks, or of a mapping of names to blocks
            chosen_name_follows = False
            continue
        if block is None or name not in block.model_fields:
            return None
        if block is OptimizerSettings and name == "params":
            _, optimizer = look_up(flat.values, "optimizer.type")
            block = OptimizerSettings.params_class(optimizer or "Adam")
        else:
            annotation = block.model_fields[name].annotation
            block = _model_in(annotation)
            chosen_name_follows = block is not None and _has_mapping(annotation)
    return block


def _has_mapping(annotation: Any) -> bool:
    """Return whether an annotation has a mapping as one of its types."""
    return get_origin(annotation) is dict or any(map(_has_mapping, get_args(annotation)))


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section that an annotation such as `Block | None` or a list of blocks names; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        found = _model_in(part)
        if found is not None:
            return found
    return None
