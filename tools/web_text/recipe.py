"""Recipes: YAML files that run steps one after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neox.config.yaml_file import ParsedFile, read_file
from neox.errors import ConfigError
from tools.web_text.step import Settings, Step

_DEFAULTS = ("workers", "seed", "skip_bad")  # settings of every step
_KEYS = ("directory", *_DEFAULTS, "steps")


@dataclass(frozen=True)
class RecipeStep:
    """Step of a recipe with its settings."""

    step: Step[Any]
    settings: Settings


def read_recipe(path: Path, steps: Mapping[str, Step[Any]]) -> list[RecipeStep]:
    """Read a recipe.

    Its keys are `directory` (of the outputs), `workers`, `seed` and `skip_bad` (defaults of all steps) and `steps`: a
    list of names, or of one-key mappings `name: {setting: value}`. The input of a step is by default what the step
    before it writes; its output is by default `directory/NN-name`.

    Args:
        path: YAML file.
        steps: Known steps by name.

    Returns:
        The steps in order, with checked settings.

    Raises:
        ConfigError: If the recipe is malformed, or a setting is unknown or unsuitable, with file and line.
    """
    parsed = read_file(path)
    if parsed.problems:
        raise ConfigError(parsed.problems)
    values = parsed.values
    if unknown := [key for key in values if key not in _KEYS]:
        raise ConfigError([f"{_at(parsed, key)} is no key of a recipe; they are {', '.join(_KEYS)}" for key in unknown])
    listed = values.get("steps")
    if not isinstance(listed, list) or not listed or not isinstance(values.get("directory"), str):
        raise ConfigError(f"{path}: a recipe needs `directory`, a path, and `steps`, a list")
    result: list[RecipeStep] = []
    written: dict[Path, str] = {}
    for number, entry in enumerate(listed):
        chosen = _recipe_step(parsed, number, entry, steps, result[-1] if result else None)
        for output in chosen.step.outputs(chosen.settings):
            if (earlier := written.get(output.resolve())) is not None:
                place = _at(parsed, f"steps.{number}.{chosen.step.name}.output", f"steps.{number}")
                raise ConfigError(f"{place} of step {chosen.step.name}: {output} is written by the step {earlier}, too")
            written[output.resolve()] = chosen.step.name
        result.append(chosen)
    return result


def _recipe_step(
    parsed: ParsedFile, number: int, entry: Any, steps: Mapping[str, Step[Any]], before: RecipeStep | None
) -> RecipeStep:
    """Return a step of a recipe with its settings.

    Args:
        parsed: The recipe.
        number: Number of the step, from 0.
        entry: Item of `steps`.
        steps: Known steps by name.
        before: The step before it; its outputs are the default inputs.
    """
    path = f"steps.{number}"
    if isinstance(entry, str):
        entry = {entry: None}
    if not isinstance(entry, dict) or len(entry) != 1:
        raise ConfigError(f"{_at(parsed, path)}: give a step's name, or `name: {{setting: value}}`")
    ((name, given),) = entry.items()
    if name not in steps:
        raise ConfigError(f"{_at(parsed, f'{path}.{name}', path)} is no step; they are {', '.join(steps)}")
    step = steps[name]
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise ConfigError(f"{_at(parsed, f'{path}.{name}', path)}: its settings must be `key: value` pairs")
    spelled: dict[str, Any] = {}
    for key, value in given.items():
        if key.replace("-", "_") in spelled:
            raise ConfigError(f"{_at(parsed, f'{path}.{name}.{key}')} is given twice, with `-` and `_`; remove one")
        spelled[key.replace("-", "_")] = value

    # Its own settings go before those of the recipe, and these before what follows from its place.
    defaults = {key: parsed.values[key] for key in _DEFAULTS if key in parsed.values}
    suffix = step.suffixes[0] if step.suffixes else ""
    output = Path(parsed.values["directory"]) / f"{number + 1:02}-{step.name}{suffix}"
    own: dict[str, Any] = {**defaults, "output": str(output), **spelled}
    if "input" not in own and before is not None:
        own["input"] = before.step.outputs(before.settings)

    def where(key: str) -> str:
        others = (key,) if key in defaults else (f"{path}.{step.name}", path)
        return f"{_at(parsed, f'{path}.{step.name}.{key}', *others)} of step {step.name}"

    return RecipeStep(step, step.make_settings(own, where))


def _at(parsed: ParsedFile, path: str, *others: str) -> str:
    """Return file, line and name of a key. If the key is not in the file, the line is that of another path."""
    key = path.rsplit(".", 1)[-1]
    for candidate in (path, path.replace("_", "-"), *others):
        if candidate in parsed.lines:
            return f"{parsed.name}:{parsed.lines[candidate]}: `{key}`"
    return f"{parsed.name}: `{key}`"
