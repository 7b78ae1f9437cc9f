"""Rules of a configuration, and notes on settings without effect.

Rules about one field and its condition stand at the fields; `fields` checks them. The other modules hold rules about
several keys. Nothing here depends on the number of ranks or on the tokenizer; `resolve` adds those checks.
"""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.features.on_paper import PAPERS
from neox.plan.rules.blocks import block_problems
from neox.plan.rules.context import context_problems
from neox.plan.rules.data import data_problems
from neox.plan.rules.data_stages import stage_problems
from neox.plan.rules.deepspeed import deepspeed_problems
from neox.plan.rules.encoder import encoder_problems
from neox.plan.rules.experts import expert_problems
from neox.plan.rules.fields import field_problems
from neox.plan.rules.multi_token import multi_token_problems
from neox.plan.rules.network import network_problems
from neox.plan.rules.notes import notes_without_effect
from neox.plan.rules.optimizer import optimizer_problems
from neox.plan.rules.parallelism import parallelism_problems
from neox.plan.rules.preferences import preference_problems
from neox.plan.rules.recurrent import indivisible_blocks, recurrent_problems
from neox.plan.rules.schedule import schedule_problems
from neox.plan.rules.training import training_problems
from neox.problems import Problem

__all__ = ["missing_for_training", "notes_without_effect", "static_problems"]

_RULES = (
    field_problems,
    network_problems,
    block_problems,
    recurrent_problems,
    encoder_problems,
    expert_problems,
    multi_token_problems,
    parallelism_problems,
    context_problems,
    optimizer_problems,
    deepspeed_problems,
    training_problems,
    data_problems,
    stage_problems,
    preference_problems,
    schedule_problems,
)


def static_problems(config: NeoXConfig) -> list[Problem]:
    """Return the problems of all rules that a configuration breaks."""
    problems = list(_unsupported_problems(config))
    for rule in (*_RULES, *(paper.problems for paper in PAPERS)):
        problems += rule(config)
    if not problems:  # only such a configuration has an architecture
        problems += indivisible_blocks(config)
    return problems


def missing_for_training(config: NeoXConfig) -> list[Problem]:
    """Return a problem for each key that training needs and that is not given, apart from data and tokenizer."""
    if config.training.train_iters == 0:
        return [config.problem("train_iters", "trains nothing; give at least 1")]
    if config.training.train_iters is not None or config.training.num_train_epochs is not None:
        return []
    message = "`train_iters` is missing: give the number of training iterations, or num_train_epochs"
    return [config.problem_about(message, "train_iters", "num_train_epochs")]


def _unsupported_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield given keys of gpt-neox that ask for a feature that does not exist here."""
    for name, key in config.unsupported():
        if key.status == "refused":
            yield config.problem(name, f"does not work here: {key.reason}")
