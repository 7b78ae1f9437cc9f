"""Rules of training on preferences that depend on several keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from neox.config.neox_config import NeoXConfig
from neox.config.sections.preferences import SplitAnswers
from neox.problems import Note, Problem

_KEY = "train_impl"
_WEIGHTING = (
    "train_data_weights",
    "train_data_temperature",
    "train_data_max_passes",
    "weight_by_num_documents",
)
_DROPOUT = ("attention_dropout", "hidden_dropout")


def preference_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about training on preferences that are broken."""
    keys = config.preferences
    if keys.dataset_impl is not None and (keys.dataset_impl == "pairwise") != keys.is_paired:
        rule = f"contradicts {config.describe_setting(_KEY)}, from which it follows; remove it"
        yield config.problem("dataset_impl", rule, _KEY)
    if not keys.on_preferences:
        return
    for answers in keys.answers(config.data):
        if answers.split != "valid" or not config.data.validation_sets:
            yield from _files(config, answers)
    if keys.is_paired and config.data.train_data_paths is not None:
        rule = f"holds no pairs, which {config.describe_setting(_KEY)} compares; give pos_train_data_paths instead"
        yield config.problem("train_data_paths", rule, _KEY)
    for key in _WEIGHTING:
        if config.value(key):
            rule = f"has no effect with {config.describe_setting(_KEY)}, which reads every answer once in a pass"
            yield config.problem(key, f"{rule}; remove it", _KEY)
    if config.data.validation_sets:
        rule = f"has names, which {config.describe_setting(_KEY)} does not read; give a list of files"
        yield config.problem("valid_data_paths", rule, _KEY)
    if keys.dpo_label_smoothing and keys.dpo_loss != "sigmoid":
        loss = config.describe_setting("dpo_loss")
        yield config.problem("dpo_label_smoothing", f"is for `dpo_loss: sigmoid`, not {loss}", "dpo_loss")


def _files(config: NeoXConfig, answers: SplitAnswers) -> Iterator[Problem]:
    """Yield what is wrong with the files of a split."""
    needed = _needed_keys(config, answers)
    given = [paths for paths in needed.values() if paths is not None]
    may_be_missing = answers.split != "train" or answers.scored  # a reward model is described without data, too
    if not given and may_be_missing:
        return
    counts = {len(paths) for paths in given}
    for key, paths in needed.items():
        if not paths:
            rule = f"is missing: {config.describe_setting(_KEY)} needs {' and '.join(needed)}"
            yield config.problem_about(f"`{key}` {rule} (tools/preprocess_preferences.py writes them)", key, _KEY)
    if len(counts) > 1:
        keys = " and ".join(f"`{key}`" for key in needed)
        yield config.problem_about(f"{keys} have different numbers of files; give them in the same order", *needed)
    for key, labels in _label_keys(config, answers).items():
        if labels is not None and counts != {len(labels)}:
            yield config.problem(key, "must have one file of labels for each file of answers, in the same order")


def _needed_keys(config: NeoXConfig, answers: SplitAnswers) -> Mapping[str, tuple[str, ...] | None]:
    """Return the keys of the files that a split needs, with their values."""
    split = answers.split
    if config.preferences.is_paired:
        return {f"pos_{split}_data_paths": answers.paths, f"neg_{split}_data_paths": answers.others}
    return {
        f"{split}_data_paths": answers.paths,
        f"{split}_label_data_paths": answers.labels,
        f"{split}_reward_data_paths": answers.rewards,
    }


def _label_keys(config: NeoXConfig, answers: SplitAnswers) -> Mapping[str, tuple[str, ...] | None]:
    """Return the keys of the labels of pairs, with their values. Rules of data check those of judged answers."""
    if not config.preferences.is_paired:
        return {}
    split = answers.split
    return {
        f"pos_{split}_label_data_paths": answers.labels,
        f"neg_{split}_label_data_paths": answers.other_labels,
    }


def dropout_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield dropout while the loss compares the model with a reference that drops nothing."""
    if not config.preferences.needs_reference:
        return
    for key in _DROPOUT:
        if config.value(key):
            message = f"{config.describe_setting(key)} drops numbers of the model, and the reference drops none: the "
            yield Note((key,), message + "first loss is not that of equal models; 0 is usual for preferences")
