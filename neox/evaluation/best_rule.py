"""The rule of a run with `save_best`: by which scalar its checkpoints are compared, and on what that is measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from neox.checkpoint.save_directory.best import JOINED_BY, SCORED_OF_DOCUMENTS, BestRule
from neox.config.sections.base import Section
from neox.config.sections.data import split_shares
from neox.errors import ConfigError
from neox.evaluation.evaluation_scalars import JOINED, set_of_scalar
from neox.evaluation.tasks import files_of_scalar
from neox.metrics import goal_of
from neox.plan import RunPlan

GOAL_UNKNOWN = "may be better small or large: give `save_best_goal`, min or max"
"""What is wrong with a metric whose name does not say its goal."""
_OF_TASKS = ("eval_stride", "eval_num_fewshot", "eval_limit")
_OF_OTHER_DATA = ("train_data", "train_label", "train_reward", "test_", "data_stages", "fim_")
"""Parts of the names of keys about training or test data, of which evaluations read nothing."""
_OF_READING = (
    "data_cache_dir",
    "data_cache_gb",
    "data_block_dir",
    "data_impl",
    "mmap_warmup",
    "num_workers",
    "max_lost_labels",
)
"""Keys that change nothing about what is read."""
_SAID_BY_SETS = ("data_path", "split", "valid_data_paths", "valid_data_weights", "valid_label_data_paths")
_DIGITS_OF_SHARES = 6
_LOSSES_OF_EXPERTS = ("moe_aux_loss_coeff", "moe_aux_loss_type", "moe_z_loss_coeff")
_OF_LABELS = "lm_loss"
"""Start of the names of scores that terms of a trained loss do not enter."""


def best_rule(plan: RunPlan) -> BestRule:
    """Return the rule of a run with `save_best`. Raises ConfigError if its goal is neither given nor in its name."""
    keys = plan.config.checkpoint
    assert keys.save_best is not None
    if keys.save_best.startswith("eval/"):
        measured_on = _of_tasks(plan, keys.save_best)
    else:
        measured_on = _of_validation(plan, keys.save_best)
    goal = keys.save_best_goal or goal_of(keys.save_best)
    if goal is None:
        raise ConfigError(plan.config.problem("save_best", GOAL_UNKNOWN))
    return BestRule(keys.save_best, goal, measured_on)


def _of_tasks(plan: RunPlan, metric: str) -> dict[str, Any]:
    """Return what a score of a task is measured on, as JSON holds it; further tasks change nothing about it.

    The score's name says which task of the harness it is of, whether that is listed itself, by its group or a pattern.
    """
    keys = plan.config.generation
    found: dict[str, Any] = {"eval_tasks": files_of_scalar(keys.eval_tasks or (), metric)}
    found |= keys.model_dump(mode="json", include={*_OF_TASKS}, exclude_none=True)
    found["seq_length"] = plan.config.model.seq_length
    if any(task.startswith("perplexity=") for task in found["eval_tasks"]):
        found[SCORED_OF_DOCUMENTS] = "text"
    return found


def _of_validation(plan: RunPlan, metric: str) -> dict[str, Any]:
    """Return what a scalar of validation is measured on, as JSON holds it.

    It is every key of the sections about data and objectives whose value is not its default, but for a few that
    evaluations do not read: a key that is added to them counts from then on.
    """
    config = plan.config
    data = config.data
    found: dict[str, Any] = {"seq_length": config.model.seq_length}
    sections: list[tuple[Section, Iterable[str]]] = [(config.model, ("max_preds_per_seq",))]
    sections.append((data, _keys_of_evaluation(data)))
    sections.append((config.preferences, _keys_of_evaluation(config.preferences)))
    if not metric.rpartition("/")[2].startswith(_OF_LABELS):
        sections.append((config.distillation, _keys_of_evaluation(config.distillation)))
        sections.append((config.training, ("lm_z_loss",)))
        sections.append((config.experts, _LOSSES_OF_EXPERTS))
    for section, keys in sections:
        found |= section.model_dump(mode="json", include={*keys}, exclude_defaults=True)

    # Of which texts, and with which shares. Neither other sets nor their weights change anything about one set.
    sets = data.evaluated_sets
    one_set = set_of_scalar(metric, [item.name for item in sets if item.name is not None])
    for key in _SAID_BY_SETS:
        found.pop(key, None)
    named = {}
    for item in sets:
        if one_set not in (None, item.name):
            continue
        if item.part is not None:
            found["data_path"] = data.data_path
            found["split"] = _rounded(split_shares(data.split))
        elif item.name is None:
            found["valid_data_paths"] = list(item.paths)
            found["valid_label_data_paths"] = list(item.labels)
            found["valid_data_weights"] = _rounded(item.shares)
        else:
            weight = 1.0 if one_set is not None else item.weight
            named[item.name] = {"path": item.paths[0], "labels": item.labels[0], "weight": _rounded([weight])[0]}
    if named:
        found["valid_data_paths"] = named
    if one_set is None and len(sets) > 1 and metric.endswith(JOINED):
        found[JOINED_BY] = "labels"

    # Of how many samples, and which.
    samples = config.training.evaluation_samples(plan.batch.train_batch_size)
    found["samples"] = "all" if samples is None else samples
    found["eval_order"] = config.training.eval_order
    found["loss_normalization"] = plan.loss_normalization
    if samples is not None:
        found["seed"] = config.training.seed
    elif plan.loss_normalization == "micro_batch":
        found["loss_normalization"] = "tokens"  # a whole set's mean does not depend on how it is cut
    return found


def _rounded(shares: Sequence[float]) -> list[float]:
    """Return shares without what calculation adds: weights `[1, 1, 1]` and `[3, 3, 3]` are the same ones."""
    return [round(share, _DIGITS_OF_SHARES) for share in shares]


def _keys_of_evaluation(section: Section) -> Iterator[str]:
    """Yield the keys of a section that say what evaluations read, and how."""
    for name in type(section).model_fields:
        if name not in _OF_READING and not any(part in name for part in _OF_OTHER_DATA):
            yield name
