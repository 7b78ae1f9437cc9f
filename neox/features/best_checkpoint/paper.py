"""The best checkpoint on paper."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.feature import FeaturePaper
from neox.problems import Problem

_GROUPS = ("validation/", "validation_ema/", "eval/")
_SCORES = ("lm_loss", "lm_loss_ppl", "lm_loss_bits_per_byte", "lm_loss_char_ppl")
"""Scores of an evaluation whose only objective is the next token."""


def problems(config: NeoXConfig) -> Iterator[Problem]:
    """The metric must be one of evaluations, and an evaluation must meet a save before the last step."""
    metric = config.checkpoint.save_best
    if metric is None:
        return
    if not metric.startswith(_GROUPS):
        yield config.problem("save_best", f"names no scalar of evaluations, which begin with {', '.join(_GROUPS)}")
        return
    if (unknown := _unknown_scalar(config, metric)) is not None:
        yield config.problem("save_best", unknown)
    if metric.startswith("eval/") and not config.generation.eval_tasks:
        yield config.problem("save_best", "is a score of a task, and `eval_tasks` names none")
    steps = config.training.train_iters
    interval = config.training.eval_interval
    saved = config.checkpoint.save_iterations(steps)
    if len(saved) > 1 and not any(step % interval == 0 for step in saved[:-1]):
        message = (
            f"`eval_interval: {interval}` evaluates after none of the steps that are saved before the last one "
            f"({', '.join(map(str, saved[:3]))} ...), so that save_best compares nothing"
        )
        yield config.problem_about(message, "save_best", "eval_interval", "checkpoint_factor")


def _unknown_scalar(config: NeoXConfig, metric: str) -> str | None:
    """Return why no evaluation of text reports a scalar; None if one may report it.

    Scores of tasks are known to the harness alone, and those of other objectives to the objective: the first evaluation
    compares them.
    """
    group, _, rest = metric.partition("/")
    if group == "eval" or config.model.objective != "causal_lm" or config.preferences.on_preferences:
        return None
    if group == "validation_ema" and not config.optimizer.eval_ema:
        return "is a scalar of averaged weights, which `eval_ema: true` evaluates"
    name, slash, score = rest.rpartition("/")
    sets = config.data.validation_sets
    if slash and name not in sets:
        known = f"those with a name are {', '.join(sets)}" if sets else "`valid_data_paths` gives none a name"
        return f"names a validation set {name!r}; {known}"
    adds_scores = config.training.lm_z_loss or config.distillation.teacher_logits or config.experts.moe_num_experts > 1
    if adds_scores or score in _SCORES:
        return None
    scores = [f"{group}/{name}{slash}{score}" for score in _SCORES]
    return f"names no scalar of this run's evaluations, which are {', '.join(scores)}"


PAPER = FeaturePaper(problems=problems, off=("save_best=null",))
