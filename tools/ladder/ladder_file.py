"""Ladder files: YAML that names the target's configuration, and the small runs that predict it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neox.config.keys import alias_target
from neox.config.sections.schedule import ScheduleConfig
from neox.config.yaml_file import ParsedFile, read_file
from neox.errors import ConfigError
from neox.plan.time.step import COMPUTE_OPTIMAL_RATIO
from neox.problems import Source
from tools.ladder.fits import FEWEST_RATES
from tools.ladder.schedule import SWITCHES, is_off
from tools.sweep.sweep_file import Sweep, SweepRun, place, read_settings, sources_of

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
_OF_SHAPE = "give `sizes`, or `shapes` with the keys of each network"
_OF_BATCH = "give `batch_size` or `batch_exponent`; a micro batch is at most the target's"
_OF_SCHEDULE = "it is the target's, scaled to the steps of each run; change it in the target's files"
_SHAPE_KEYS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "mlp_width",
)
OWN_KEYS = {
    **dict.fromkeys(_SHAPE_KEYS, _OF_SHAPE),
    "train_iters": "give `tokens_per_parameter`",
    "num_train_epochs": "give `tokens_per_parameter`",
    "exit_interval": "every run trains all its tokens",
    "train_batch_size": _OF_BATCH,
    "train_micro_batch_size_per_gpu": _OF_BATCH,
    "gradient_accumulation_steps": _OF_BATCH,
    "seq_length": "the loss depends on it; change it in the target's files",
    "eval_iters": "every run evaluates as many samples as the target; change it in the target's files",
    "optimizer.params.lr": "the rate is the target's, scaled; give `exponent` and `factors` of `learning_rate`",
    "data_stages": _OF_SCHEDULE,
    **{key: _OF_SCHEDULE for key in ScheduleConfig.model_fields if key not in SWITCHES},
}
"""Keys that the ladder decides in each small run, and what to do instead of setting them."""
ADJUSTED_KEYS = (
    "attention_config",
    "pipe_parallel_size",
    "model_parallel_size",
    "planned_num_gpus",
    "eval_interval",
    "checkpoint_scale",
    "checkpoint_factor",
    "save_best",
    "hf_export",
)
"""Keys that the ladder sets in each small run, and `set` may set otherwise: ranks, and when to evaluate and save."""
_RATE_KEYS = ("exponent", "factors", "searched")
_FEWEST_SIZES = 3
_BATCH_EXPONENT = 2 / 3
_RATE_EXPONENT = -1 / 3
"""Batch and learning rate grow with these powers of the parameters (arXiv:2406.19146)."""
_FACTORS = (0.5, 1.0, 2.0)
_SEARCHED = FEWEST_RATES


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
        sources: Places of the settings in the ladder's file, by key.
    """

    name: str
    directory: Path
    configs: tuple[str, ...]
    conf_dir: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[float, ...] = ()
    shapes: tuple[Mapping[str, Any], ...] = ()
    tokens_per_parameter: tuple[float, ...] = (COMPUTE_OPTIMAL_RATIO,)
    rate_exponent: float | None = None
    factors: tuple[float, ...] = _FACTORS
    searched: int = _SEARCHED
    batch_size: int | None = None
    batch_exponent: float = _BATCH_EXPONENT
    slots_per_run: int | None = None
    sources: Mapping[str, Source] = field(default_factory=dict)

    def sweep(self, runs: Sequence[SweepRun], *, following: int = 0, has_table: bool = True) -> Sweep:
        """Return the sweep that trains runs of the ladder.

        Args:
            runs: The runs.
            following: As for `Sweep`.
            has_table: As for `Sweep`.
        """
        return Sweep(
            self.name,
            self.directory,
            self.configs,
            tuple(runs),
            self.conf_dir,
            compares=False,
            following=following,
            has_table=has_table,
            sources=self.sources,
        )

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
    exponent = None if "exponent" not in rate else _number(parsed, "learning_rate.exponent", rate["exponent"])
    factors = _numbers(parsed, "learning_rate.factors", rate.get("factors", list(_FACTORS)))
    name = str(values.get("name", path.stem))
    return Ladder(
        name=name,
        directory=Path(values.get("directory", f"runs/{name}")),
        configs=tuple(configs),
        conf_dir=values.get("conf_dir"),
        settings=_settings(parsed, values.get("set") or {}),
        sizes=tuple(sorted(sizes)),
        shapes=tuple(_shape(parsed, number, shape) for number, shape in enumerate(shapes)),
        tokens_per_parameter=_ratios(parsed, values.get("tokens_per_parameter", COMPUTE_OPTIMAL_RATIO)),
        rate_exponent=exponent,
        factors=tuple(sorted(factors)),
        searched=_whole(parsed, "learning_rate.searched", rate.get("searched", _SEARCHED)),
        batch_size=None if "batch_size" not in values else _whole(parsed, "batch_size", values["batch_size"]),
        batch_exponent=_number(parsed, "batch_exponent", values.get("batch_exponent", _BATCH_EXPONENT)),
        slots_per_run=values.get("slots_per_run"),
        sources=sources_of(parsed),
    )


def _settings(parsed: ParsedFile, given: Any) -> dict[str, Any]:
    """Return the settings of the small runs.

    Raises:
        ConfigError: One of them is the ladder's, under whatever name; it would train other tokens or another schedule.
    """
    settings = read_settings(parsed, "set", given)
    for key, value in given.items():
        _refuse_own_key(parsed, "set", key, OWN_KEYS)
        switch = key.partition(".")[0].replace("-", "_")
        if switch in SWITCHES and not is_off(value):
            raise ConfigError(f"{place(parsed, f'set.{key}')} can only be switched off (null): {_OF_SCHEDULE}")
        if switch in settings and is_off(value):
            settings[switch] = None
    return settings


def _shape(parsed: ParsedFile, number: int, given: Any) -> dict[str, Any]:
    """Return the keys of one network. Raises ConfigError if one of them is the ladder's."""
    path = f"shapes.{number}"
    shape = read_settings(parsed, path, given)
    others = {key: reason for key, reason in OWN_KEYS.items() if key not in _SHAPE_KEYS}
    for key in given:
        _refuse_own_key(parsed, path, key, {**others, **dict.fromkeys(SWITCHES, _OF_SCHEDULE)})
    return shape


def _refuse_own_key(parsed: ParsedFile, path: str, key: str, own_keys: Mapping[str, str]) -> None:
    """Raise ConfigError if a key is one of the ladder's, an alias of one, a block that holds one, or a part of one."""
    target = alias_target(key.replace("-", "_"))
    for own, instead in own_keys.items():
        if target == own or target.startswith(f"{own}.") or own.startswith(f"{target}."):
            sets = "" if own == key.replace("-", "_") else f" sets {own}, which"
            raise ConfigError(f"{place(parsed, f'{path}.{key}')}{sets} is the ladder's own: {instead}")


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


def _number(parsed: ParsedFile, path: str, given: Any) -> float:
    if type(given) not in (int, float) or not math.isfinite(given):  # YAML reads -1/3 as text
        raise ConfigError(f"{place(parsed, path)} must be a number, such as -0.3333")
    return float(given)


def _whole(parsed: ParsedFile, path: str, given: Any) -> int:
    if type(given) is not int or given < 1:
        raise ConfigError(f"{place(parsed, path)} must be a whole number above 0")
    return given
