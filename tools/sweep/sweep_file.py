"""Sweep files: YAML that names configuration files, and the values of keys with which they are trained."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from neox.config.yaml_file import ParsedFile, read_file
from neox.errors import ConfigError
from neox.metrics import Goal, goal_of
from neox.problems import Problem, Source

_KINDS = ("grid", "list", "random")
_KEYS = ("name", "directory", "configs", "conf_dir", "set", *_KINDS, "slots_per_run", "metric", "goal")
_OF_SWEEP = {
    "save": "every run has its own, in the directory of the sweep",
    "log_dir": "every run has its own, in the directory of the sweep",
    "hostfile": "give it to the command (-H)",
    "include": "the sweep chooses the hosts of a run",
    "exclude": "take the host out of the hostfile",
    "overwrite": "`--redo NAME` trains a run again",
}
"""Keys that a sweep sets itself, and what to do instead."""
_BLOCKS_OF_VALUES = ("set", "grid", "random.values")
_DISTRIBUTIONS = ("uniform", "log_uniform", "integer")
_LONGEST_NAME = 100
_DIGITS = 4
"""Significant digits of a random value: the name of a run shows all of them."""
_TRIES = 1_000


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        name: Its name, which is also its directory's.
        values: What the sweep varies: values by key, with dots into blocks.
    """

    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Sweep:
    """A sweep.

    Attributes:
        name: Its name, and that of the trackers' group.
        directory: Directory of the runs, the table and the picture.
        configs: Configuration files, as for `deepy.py`.
        conf_dir: Directory that is searched first for them.
        settings: Values of keys for all runs.
        runs: The runs.
        slots_per_run: Number of slots of each run; None for all of a host.
        metric: Scalar by which runs are compared; None for the loss on validation data, else the training loss.
        goal: Whether the best run has the smallest or the largest value.
        compares: Whether the runs are alternatives, of which one is the best; those of a ladder are not.
        has_table: Whether the table, the picture and the record are written. A ladder's target leaves those of the
            small runs.
        following: Number of runs that follow these, which the results of these decide; a ladder has them.
        sources: Places of the values in the sweep's file, by key.
    """

    name: str
    directory: Path
    configs: tuple[str, ...]
    runs: tuple[SweepRun, ...]
    conf_dir: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    slots_per_run: int | None = None
    metric: str | None = None
    goal: Goal = "min"
    compares: bool = True
    has_table: bool = True
    following: int = 0
    sources: Mapping[str, Source] = field(default_factory=dict)

    @property
    def varied(self) -> tuple[str, ...]:
        """Keys that differ between runs, in the order of the file."""
        found: dict[str, set[str]] = {}
        for run in self.runs:
            for key in run.values:
                found.setdefault(key, set())
        for key, texts in found.items():
            for run in self.runs:
                texts.add(_text(run.values.get(key)))
        return tuple(key for key, texts in found.items() if len(texts) > 1)


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file.

    Args:
        path: YAML file.

    Raises:
        ConfigError: The file is malformed, or a key is unknown or unsuitable; with file and line.
    """
    parsed = read_file(path)
    if parsed.problems:
        raise ConfigError(parsed.problems)
    values = parsed.values
    for key in values:
        if key not in _KEYS:
            raise ConfigError(f"{place(parsed, key)} is no key of a sweep; they are {', '.join(_KEYS)}")
    kinds = [kind for kind in _KINDS if kind in values]
    if len(kinds) != 1:
        raise ConfigError(f"{path}: a sweep has one of {', '.join(_KINDS)}; found {', '.join(kinds) or 'none'}")
    configs = values.get("configs")
    if not isinstance(configs, list) or not configs or not all(isinstance(file, str) for file in configs):
        raise ConfigError(f"{path}: `configs` must list the configuration files, as `deepy.py` takes them")
    name = str(values.get("name", path.stem))
    slots = values.get("slots_per_run")
    if slots is not None and (not isinstance(slots, int) or slots < 1):
        raise ConfigError(f"{place(parsed, 'slots_per_run')} must be a whole number above 0")
    metric = values.get("metric")
    goal = values.get("goal", "min")
    if "goal" not in values and metric is not None:
        goal = goal_of(str(metric))
    if goal is None:
        raise ConfigError(f"{place(parsed, 'metric')} may be better small or large: give `goal`, min or max")
    if goal not in ("min", "max"):
        raise ConfigError(f"{place(parsed, 'goal')} must be min or max, not {goal!r}")
    return Sweep(
        name=name,
        directory=Path(values.get("directory", f"runs/{name}")),
        configs=tuple(configs),
        conf_dir=values.get("conf_dir"),
        settings=read_settings(parsed, "set", values.get("set") or {}),
        runs=_runs(parsed, kinds[0]),
        slots_per_run=slots,
        metric=metric,
        goal=goal,
        sources=sources_of(parsed),
    )


def place(parsed: ParsedFile, path: str) -> str:
    """Return file, line and name of a key, given by its dotted path."""
    key = path.rpartition(".")[2]
    if path in parsed.lines:
        return f"{parsed.name}:{parsed.lines[path]}: `{key}`"
    return f"{parsed.name}: `{path}`"


def sources_of(parsed: ParsedFile) -> dict[str, Source]:
    """Return the place of each value of runs in a file by its key, but for lists, which have a place for each run."""
    sources = {}
    for path, line in parsed.lines.items():
        for block in _BLOCKS_OF_VALUES:
            if path.startswith(f"{block}."):
                key = path.removeprefix(f"{block}.").replace("-", "_")
                sources[key] = Source.in_file(parsed.name, line)
    return sources


def with_sources(problems: Iterable[Problem], sources: Mapping[str, Source]) -> Iterator[Problem]:
    """Yield problems of values that a command line would give with their places in the file that gives them instead."""
    for problem in problems:
        key = problem.keys[0] if problem.keys else ""
        while key not in sources and "." in key:
            key = key.rpartition(".")[0]
        if problem.source.is_command_line and key in sources:
            yield replace(problem, source=sources[key])
        else:
            yield problem


def read_settings(parsed: ParsedFile, path: str, given: Any) -> dict[str, Any]:
    """Return keys with their values, `-` in keys as `_`.

    Args:
        parsed: The file.
        path: Dotted path of the mapping in it.
        given: The mapping.

    Raises:
        ConfigError: It is no mapping, or has a key that the sweep sets itself.
    """
    if not isinstance(given, dict):
        raise ConfigError(f"{place(parsed, path)} must hold `key: value` pairs")
    settings = {}
    for written, value in given.items():
        key = written.replace("-", "_")
        if key in _OF_SWEEP:
            raise ConfigError(f"{place(parsed, f'{path}.{written}')} is no key of runs in a sweep: {_OF_SWEEP[key]}")
        settings[key] = value
    return settings


def _runs(parsed: ParsedFile, kind: str) -> tuple[SweepRun, ...]:
    """Return the runs that a file describes.

    Raises:
        ConfigError: The description is malformed, or two runs are the same.
    """
    given = parsed.values[kind]
    names: list[str | None] = []
    combinations: list[dict[str, Any]] = []
    if kind == "grid":
        combinations = list(_grid(parsed, given))
    elif kind == "random":
        combinations = list(_random(parsed, given))
    elif not isinstance(given, list) or not given:
        raise ConfigError(f"{place(parsed, kind)} must be a list of `key: value` mappings, one for each run")
    else:
        for number, entry in enumerate(given):
            values = read_settings(parsed, f"list.{number}", entry)
            name = values.pop("name", None)
            names.append(None if name is None else str(name))
            combinations.append(values)
    names = names or [None] * len(combinations)
    keys: dict[str, None] = {}
    for values in combinations:
        keys |= dict.fromkeys(values)
    runs = []
    counts: Counter[str] = Counter()
    for name, values in zip(names, combinations, strict=True):
        runs.append(SweepRun(_directory_name(name or run_name(values, list(keys))), values))
        counts[runs[-1].name] += 1
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise ConfigError(f"{place(parsed, kind)}: several runs are the same: {', '.join(repeated)}")
    return tuple(runs)


def _grid(parsed: ParsedFile, given: Any) -> Iterator[dict[str, Any]]:
    """Yield each combination of the values of several keys; the last key changes first."""
    lists = read_settings(parsed, "grid", given)
    for key, values in lists.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{place(parsed, f'grid.{key}')} must be a list of values")
    for combination in itertools.product(*lists.values()):
        yield dict(zip(lists, combination, strict=True))


def _random(parsed: ParsedFile, given: Any) -> Iterator[dict[str, Any]]:
    """Yield combinations that are drawn at random: the same ones each time, and more of them if `runs` grows."""
    if not isinstance(given, dict) or given.keys() != {"runs", "seed", "values"}:
        raise ConfigError(f"{place(parsed, 'random')} needs `runs` (their number), `seed` and `values`")
    count = given["runs"]
    if not isinstance(count, int) or count < 1 or not isinstance(given["seed"], int):
        raise ConfigError(f"{place(parsed, 'random.runs')} must be a whole number above 0, and `seed` a whole number")
    of_keys = read_settings(parsed, "random.values", given["values"])
    found: list[str] = []
    for attempt in range(count * _TRIES):
        values = {}
        for key, choice in of_keys.items():
            generator = random.Random(f"{given['seed']} {attempt} {key}")
            values[key] = _draw(choice, generator, place(parsed, f"random.values.{key}"))
        if _text(values) not in found:
            found.append(_text(values))
            yield values
        if len(found) == count:
            return
    raise ConfigError(f"{place(parsed, 'random.runs')}: the values have only {len(found)} combinations")


def _draw(choice: Any, generator: random.Random, where: str) -> Any:
    """Return one value of a list, or of a distribution `{uniform: [low, high]}`."""
    if isinstance(choice, list) and choice:
        return generator.choice(choice)
    if not isinstance(choice, dict) or len(choice) != 1 or next(iter(choice)) not in _DISTRIBUTIONS:
        known = ", ".join(_DISTRIBUTIONS)
        raise ConfigError(f"{where} must be a list of values, or {{KIND: [low, high]}} of one of the kinds {known}")
    ((kind, bounds),) = choice.items()
    is_pair = isinstance(bounds, list) and len(bounds) == 2
    if not is_pair or not all(isinstance(bound, int | float) for bound in bounds) or bounds[0] > bounds[1]:
        raise ConfigError(f"{where}: {kind} takes two numbers, [low, high]")
    low, high = bounds
    if kind == "integer":
        if not isinstance(low, int) or not isinstance(high, int):
            raise ConfigError(f"{where}: integer takes two whole numbers")
        return generator.randint(low, high)
    if kind == "uniform":
        return _rounded(generator.uniform(low, high))
    if low <= 0:
        raise ConfigError(f"{where}: log_uniform takes numbers above 0")
    return _rounded(math.exp(generator.uniform(math.log(low), math.log(high))))


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def run_name(values: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return the name of a run: its values, each after the last word of its key.

    Args:
        values: Values by dotted key.
        keys: Keys of all runs; the whole key is shown if two of them have the same last word.
    """
    last_words = [key.rpartition(".")[2] for key in keys]
    words = []
    for key, value in values.items():
        last = key.rpartition(".")[2]
        shown = last if last_words.count(last) == 1 else key
        words.append(f"{shown}={_text(value)}")
    return ",".join(words)


def _directory_name(name: str) -> str:
    """Return a name that every file system accepts. A changed one has a hash, so that no two become the same."""
    accepted = re.sub(r"[^\w.=+,-]", "_", name).lstrip(".-")
    if accepted == name and len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{accepted[: _LONGEST_NAME - 7]}-{digest}"


def _text(value: Any) -> str:
    """Return a value as text: numbers and words as they are, others as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def override(key: str, value: Any) -> str:
    """Return a value as `--set` takes it."""
    return f"{key}={_text(value)}"
