"""Rules of the training data: shares of splits, weights and labels of blends."""

from __future__ import annotations

import re
from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.config.sections.data import MOST_DATASETS, Blend, split_shares
from neox.errors import ConfigError
from neox.problems import Problem


def data_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about data that are broken."""
    if config.data.train_data_paths is None:
        yield from _split(config)
    yield from _numbers_of_datasets(config)
    yield from _validation_sets(config)
    yield from _whole_sets(config)
    for blend in config.data.blends:
        if blend.split == "valid" and config.data.validation_sets:
            continue
        yield from _number_of_paths(config, blend)
        yield from _weights(config, blend)
        yield from _labels(config, blend)


def _split(config: NeoXConfig) -> Iterator[Problem]:
    split = config.data.split
    try:
        training = split_shares(split)[0]
    except ConfigError as error:
        yield config.problem_about(str(error), "split", "train_data_paths")
    else:
        if config.data.data_path is not None and not training:
            yield config.problem("split", "leaves no documents to train on; its first part is training", "data_path")
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


def _validation_sets(config: NeoXConfig) -> Iterator[Problem]:
    """Yield keys that do not go with validation sets that have names."""
    data = config.data
    if isinstance(data.valid_data_paths, dict) and not data.validation_sets:
        yield config.problem("valid_data_paths", "names no set; give `NAME: PATH`, or remove it")
    if not data.validation_sets:
        return
    in_block = {"valid_data_weights": "weight", "valid_label_data_paths": "labels"}
    for key, inner in in_block.items():
        if config.value(key) is not None:
            rule = f"is for a list of valid_data_paths; give each set its own: `NAME: {{path: PATH, {inner}: ...}}`"
            yield config.problem(key, rule, "valid_data_paths")
    if config.model.objective != "masked_lm":
        return
    for name, item in data.validation_sets.items():
        if item.labels is not None:
            key = f"valid_data_paths.{name}.labels"
            message = (
                f"`{key}: {item.labels}` does not go with `objective: masked_lm`: only masked tokens are in its loss"
            )
            yield config.problem_about(f"{message}; remove it", key, "objective")


def _whole_sets(config: NeoXConfig) -> Iterator[Problem]:
    """Yield blends of several datasets of which an evaluation should read all samples once, whatever their weights."""
    if config.training.eval_iters != "all" or config.preferences.on_preferences:
        return
    for blend in config.data.blends[1:]:
        if blend.paths is not None and len(blend.paths) > 1:
            key = f"{blend.split}_data_paths"
            advice = "give a number of batches, or one path"
            if blend.split == "valid":
                advice = "give each path a name and a weight in the mean: `NAME: {path: PATH, weight: 1}`"
            rule = f"reads each sample once, which a blend of {len(blend.paths)} {key} does not; {advice}"
            yield config.problem("eval_iters", rule, key)


def _number_of_paths(config: NeoXConfig, blend: Blend) -> Iterator[Problem]:
    count = len(blend.paths or ())
    in_stages = blend.split == "train" and config.data.data_stages is not None  # they make no blend
    if count > MOST_DATASETS and not in_stages and not config.preferences.on_preferences:
        key = f"{blend.split}_data_paths"
        message = (
            f"`{key}` has {count} datasets, and a blend at most {MOST_DATASETS}; join some (tools/merge_datasets.py)"
        )
        yield config.problem_about(message, key)


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
