"""Recipes: YAML files that run steps one after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neox.config.yaml_file import ParsedFile, read_file
from neox.errors import ConfigError
from tools.web_text.step import Settings, Step

_KEYS = ("directory", "workers", "seed", "skip_bad", "steps")


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
        raise ConfigError([problem.text for problem in parsed.problems])
    values = parsed.values
    if unknown := [key for key in values if key not in _KEYS]:
        raise ConfigError([f"{_at(parsed, key)} is no key of a recipe; they are {', '.join(_KEYS)}" for key in unknown])
    listed = values.get("steps")
    if not isinstance(listed, list) or not listed or not isinstance(values.get("directory"), str):
        raise ConfigError(f"{path}: a recipe needs `directory`, a path, and `steps`, a list")
    defaults: dict[str, Any] = {key: values[key] for key in ("workers", "seed", "skip_bad") if key in values}
    result, written = list[RecipeStep](), dict[Path, str]()
    for number, entry in enumerate(listed):
        step, given = _entry(parsed, f"steps.{number}", entry, steps)
        name = f"{number + 1:02}-{step.name}{step.suffixes[0] if step.suffixes else ''}"
        own: dict[str, Any] = {**defaults, "output": str(Path(values["directory"]) / name), **given}
        if "input" not in own and result:
            own["input"] = result[-1].step.outputs(result[-1].settings)

        def where(key: str, item: str = f"steps.{number}", label: str = step.name) -> str:
            others = (key,) if key in defaults else (f"{item}.{label}", item)
            return f"{_at(parsed, f'{item}.{label}.{key}', *others)} of step {label}"

        chosen = RecipeStep(step, step.make_settings(own, where))
        for path in map(Path.resolve, step.outputs(chosen.settings)):
            if path in written:
                raise ConfigError(f"{where('output')}: {path} is written by the step {written[path]}, too")
            written[path] = step.name
        result.append(chosen)
    return result


def _entry(
    parsed: ParsedFile, path: str, entry: Any, steps: Mapping[str, Step[Any]]
) -> tuple[Step[Any], dict[str, Any]]:
    """Return step and given settings of an item of `steps`."""
    if isinstance(entry, str):
        entry = {entry: None}
    if not isinstance(entry, dict) or len(entry) != 1:
        raise ConfigError(f"{_at(parsed, path)}: give a step's name, or `name: {{setting: value}}`")
    ((name, given),) = entry.items()
    if name not in steps:
        raise ConfigError(f"{_at(parsed, f'{path}.{name}', path)} is no step; they are {', '.join(steps)}")
    if not isinstance(given, dict | None):
        raise ConfigError(f"{_at(parsed, f'{path}.{name}', path)}: its settings must be `key: value` pairs")
    given = given or {}
    if twice := [key for key in given if "-" in key and key.replace("-", "_") in given]:
        raise ConfigError(f"{_at(parsed, f'{path}.{name}.{twice[0]}')} is given twice, with `-` and `_`; remove one")
    return steps[name], {key.replace("-", "_"): value for key, value in given.items()}


def _at(parsed: ParsedFile, path: str, *others: str) -> str:
    """Return file, line and name of a key; if it is not there, the line of another one."""
    line = next((f":{parsed.lines[p]}" for p in (path, path.replace("_", "-"), *others) if p in parsed.lines), "")
    return f"{parsed.name}{line}: `{path.rsplit('.', 1)[-1]}`"
