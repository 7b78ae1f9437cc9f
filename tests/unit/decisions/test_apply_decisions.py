"""Decisions of a start are applied once, with their sources, and travel as JSON."""

from __future__ import annotations

import json

from neox.config import Decision, NeoXConfig, apply_decisions
from neox.problems import COMMAND_LINE, Source

_GIVEN = {
    "train_micro_batch_size_per_gpu": 2,
    "num_train_epochs": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.95]}},
}
_FILE = Source.in_file("run.yml", 3)


def test_decisions_set_unset_and_reach_into_blocks() -> None:
    config = NeoXConfig.from_flat(_GIVEN, {"num_train_epochs": _FILE})
    decided = apply_decisions(
        config,
        [
            Decision("train_iters", 120, "two epochs", _FILE.derived("num_train_epochs")),
            Decision("num_train_epochs", None, "two epochs", _FILE),
            Decision("optimizer.params.lr", 0.002, "as in the checkpoint", COMMAND_LINE),
            Decision("train_iters", 100, "a later decision", COMMAND_LINE),
        ],
    )
    assert decided.training.train_iters == 100
    assert decided.source("train_iters").is_command_line
    assert decided.source("train_iters").decided
    assert not decided.source("train_micro_batch_size_per_gpu").decided
    assert not decided.given("num_train_epochs")
    assert decided.value("optimizer.params.lr") == 0.002
    assert decided.value("optimizer.params.betas") == (0.9, 0.95)
    assert decided.source("optimizer.params.lr").is_command_line
    assert config.value("optimizer.params.lr") == 0.001  # what the user asked for has not changed
    assert apply_decisions(config, []) is config


def test_that_a_value_was_decided_travels_with_its_source() -> None:
    """Notes depend on it, and not on the words of the source."""
    decided = apply_decisions(NeoXConfig.from_flat(_GIVEN), [Decision("train_iters", 120, "two epochs", _FILE)])
    source = decided.source("train_iters")
    assert Source.from_json(json.loads(json.dumps(source.to_json()))) == source
    assert source.decided


def test_a_decision_travels_as_json() -> None:
    decision = Decision("train_iters", 120, "two epochs", _FILE.derived("num_train_epochs"))
    assert Decision.from_json(json.loads(json.dumps(decision.to_json()))) == decision
