"""Rules of the training data: shares of splits, weights and labels of blends."""

from __future__ import annotations

import re
from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.config.sections.data import Blend, split_shares
from neox.errors import ConfigError
from neox.problems import Problem


def data_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about data that are broken."""
    if config.data.train_data_paths is None:
        yield from _split(config)
    yield from _numbers_of_datasets(config)
    for blend in config.data.blends:
        yield from _weights(config, blend)
        yield from _labels(config, blend)


def _split(config: NeoXConfig) -> Iterator[Problem]:
    split = config.data.split
    try:
        split_shares(split)
    except ConfigError as error:
        yield config.problem_about(str(error), "split", "train_data_paths")
    if len(re.split("[,/]", split.rstrip(",/ "))) > 3:
        yield config.problem("split", "has more than three parts; they are training, validation and test")


def _numbers_of_datasets(config: NeoXConfig) -> Iterator[Problem]:
    """Yield keys that have a number for each dataset, and too few or too many of them."""
    paths = len(config.data.train_data_paths or ())
    for key in ("fim_rate", "train_data_max_passes"):
        value = config.value(key)
        if isinstance(value, tuple) and len(value) != paths:
            rule = f"has {len(value)} numbers for {paths} train_data_paths; give one number, or one for each path"
            yield config.problem(key, rule, "train_data_paths")


def _weights(config: NeoXConfig, blend: Blend) -> Iterator[Problem]:
    key = f"{blend.split}_data_weights"
    paths = f"{blend.split}_data_paths"
    if blend.weights is None:
        return
    if blend.paths is None or len(blend.paths) != len(blend.weights):
        count = f"`{key}` has {len(blend.weights)} weights for {len(blend.paths or ())} {paths}"
        yield config.problem_about(f"{count}; give one weight for each path", key, paths)
    if not any(blend.weights):
        yield config.problem(key, "must not all be 0")


def _labels(config: NeoXConfig, blend: Blend) -> Iterator[Problem]:
    key = f"{blend.split}_label_data_paths"
    paths = f"{blend.split}_data_paths"
    if blend.labels is not None and len(blend.paths or ()) != len(blend.labels):
        rule = f"does not go with `{paths}: {list(blend.paths or ())}`"
        advice = "give one label file for each data file, in order (data_path has none)"
        yield config.problem(key, f"{rule}; {advice}", paths)
