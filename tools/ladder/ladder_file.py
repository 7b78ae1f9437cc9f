"""Ladder files: YAML that names the target's configuration, and the small runs that predict it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neox.config.yaml_file import ParsedFile, read_file
from neox.errors import ConfigError
from tools.sweep.sweep_file import place, read_settings

_KEYS = (
    "name",
    "directory",
    "configs",
    "conf_dir",
    "set",
    "sizes",
    "shapes",
    "tokens_per_parameter",
    "learning_rate",
    "batch_size",
    "batch_exponent",
    "slots_per_run",
)
_RATE_KEYS = ("exponent", "factors", "searched")
_FEWEST_SIZES = 3
_CHINCHILLA = 20.0
"""Tokens for each parameter in compute-optimal training (arXiv:2203.15556)."""
_BATCH_EXPONENT = 2 / 3
_RATE_EXPONENT = -1 / 3
"""Batch and learning rate grow with these powers of the parameters (arXiv:2406.19146)."""
_FACTORS = (0.5, 1.0, 2.0)
_SEARCHED = 3


@dataclass(frozen=True)
class Ladder:
    """A ladder.

    Attributes:
        name: Its name, and that of the trackers' group.
        directory: Directory of its runs and results.
        configs: Configuration files of the target, as for `deepy.py`.
        conf_dir: Directory that is searched first for them.
        settings: Values of keys for the small runs.
        sizes: Parameters of the small runs, ascending; empty if shapes are given.
        shapes: Values of keys that make each small network, instead of sizes.
        tokens_per_parameter: Ratios of tokens and parameters with which each size is trained.
        rate_exponent: Power of the parameters that the learning rate grows with; None for the default.
        factors: Learning rates that are tried, as multiples of that rule's.
        searched: Number of sizes, the smallest ones, at which all factors are tried.
        batch_size: Samples of a step of all small runs; None to scale the target's.
        batch_exponent: Power of the parameters that the batch grows with.
        slots_per_run: Number of slots of each run; None for all of a host.
    """

    name: str
    directory: Path
    configs: tuple[str, ...]
    conf_dir: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[float, ...] = ()
    shapes: tuple[Mapping[str, Any], ...] = ()
    tokens_per_parameter: tuple[float, ...] = (_CHINCHILLA,)
    rate_exponent: float | None = None
    factors: tuple[float, ...] = _FACTORS
    searched: int = _SEARCHED
    batch_size: int | None = None
    batch_exponent: float = _BATCH_EXPONENT
    slots_per_run: int | None = None

    def exponent(self, *, use_mup: bool) -> float:
        """Return the power of the parameters that the learning rate grows with; with muP it stays the same."""
        if self.rate_exponent is not None:
            return self.rate_exponent
        return 0.0 if use_mup else _RATE_EXPONENT


def read_ladder(path: Path) -> Ladder:
    """Read a ladder file.

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
            raise ConfigError(f"{place(parsed, key)} is no key of a ladder; they are {', '.join(_KEYS)}")
    configs = values.get("configs")
    if not isinstance(configs, list) or not configs or {*map(type, configs)} != {str}:
        raise ConfigError(f"{path}: `configs` must list the configuration files of the target")
    if ("sizes" in values) == ("shapes" in values):
        raise ConfigError(f"{path}: a ladder has one of `sizes` (parameters of each run) and `shapes` (keys of each)")
    shapes = values.get("shapes", [])
    if not isinstance(shapes, list):
        raise ConfigError(f"{place(parsed, 'shapes')} must be a list of `key: value` mappings, one for each size")
    sizes = _numbers(parsed, "sizes", values.get("sizes", []))
    if max(len(sizes), len(shapes)) < _FEWEST_SIZES:
        raise ConfigError(f"{path}: a ladder needs at least {_FEWEST_SIZES} sizes")
    rate = values.get("learning_rate", {})
    if not isinstance(rate, dict) or not {*rate} <= {*_RATE_KEYS}:
        raise ConfigError(f"{place(parsed, 'learning_rate')} has the keys {', '.join(_RATE_KEYS)}")
    factors = _numbers(parsed, "learning_rate.factors", rate.get("factors", list(_FACTORS)))
    name = str(values.get("name", path.stem))
    return Ladder(
        name=name,
        directory=Path(values.get("directory", f"runs/{name}")),
        configs=tuple(configs),
        conf_dir=values.get("conf_dir"),
        settings=read_settings(parsed, "set", values.get("set") or {}),
        sizes=tuple(sorted(sizes)),
        shapes=tuple(read_settings(parsed, f"shapes.{number}", shape) for number, shape in enumerate(shapes)),
        tokens_per_parameter=_ratios(parsed, values.get("tokens_per_parameter", _CHINCHILLA)),
        rate_exponent=rate.get("exponent"),
        factors=tuple(sorted(factors)),
        searched=_whole(parsed, "learning_rate.searched", rate.get("searched", _SEARCHED)),
        batch_size=None if "batch_size" not in values else _whole(parsed, "batch_size", values["batch_size"]),
        batch_exponent=float(values.get("batch_exponent", _BATCH_EXPONENT)),
        slots_per_run=values.get("slots_per_run"),
    )


def _ratios(parsed: ParsedFile, given: Any) -> tuple[float, ...]:
    """Return tokens per parameter, which may be one number or several."""
    if not isinstance(given, list):
        given = [given]
    return tuple(_numbers(parsed, "tokens_per_parameter", given))


def _numbers(parsed: ParsedFile, path: str, given: Any) -> Sequence[float]:
    """Return a list of different numbers above 0.

    Raises:
        ConfigError: It is none.
    """
    is_list = isinstance(given, list) and {*map(type, given)} <= {int, float}
    if not is_list or (given and min(given) <= 0) or len({*given}) < len(given):
        raise ConfigError(f"{place(parsed, path)} must be a list of different numbers above 0")
    return list(map(float, given))


def _whole(parsed: ParsedFile, path: str, given: Any) -> int:
    if type(given) is not int or given < 1:
        raise ConfigError(f"{place(parsed, path)} must be a whole number above 0")
    return given
