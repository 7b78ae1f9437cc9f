"""Recipes: YAML files that run steps one after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neox.config.yaml_file import ParsedFile, read_file
from neox.errors import ConfigError
from neox.webtext.step import Settings, Step

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
    result: list[RecipeStep] = []
    for number, entry in enumerate(listed):
        step, given = _entry(parsed, f"steps.{number}", entry, steps)
        name = f"{number + 1:02}-{step.name}{step.suffix}"
        own: dict[str, Any] = {**defaults, "output": str(Path(values["directory"]) / name), **given}
        if "input" not in own and result:
            own["input"] = result[-1].step.outputs(result[-1].settings)

        def where(key: str, prefix: str = f"steps.{number}.{step.name}", label: str = step.name) -> str:
            line = _at(parsed, f"{prefix}.{key}", f"steps.{prefix.split('.')[1]}")
            return f"{line} of step {label}"

        result.append(RecipeStep(step, step.make_settings(own, where)))
    return result


def _entry(
    parsed: ParsedFile, path: str, entry: Any, steps: Mapping[str, Step[Any]]
) -> tuple[Step[Any], dict[str, Any]]:
    """Return step and given settings of an item of `steps`."""
    if isinstance(entry, str):
        entry = {entry: None}
    if not isinstance(entry, dict) or len(entry) != 1:
        raise ConfigError(f"{parsed.name}: {path}: give a step's name, or `name: {{setting: value}}`")
    ((name, given),) = entry.items()
    if name not in steps:
        raise ConfigError(f"{_at(parsed, f'{path}.{name}', path)} is no step; they are {', '.join(steps)}")
    if not isinstance(given, dict | None):
        raise ConfigError(f"{_at(parsed, f'{path}.{name}', path)}: its settings must be `key: value` pairs")
    return steps[name], {key.replace("-", "_"): value for key, value in (given or {}).items()}


def _at(parsed: ParsedFile, path: str, otherwise: str = "") -> str:
    """Return file, line and name of a key."""
    line = next((f":{parsed.lines[p]}" for p in (path, path.replace("_", "-"), otherwise) if p in parsed.lines), "")
    return f"{parsed.name}{line}: `{path.rsplit('.', 1)[-1]}`"
