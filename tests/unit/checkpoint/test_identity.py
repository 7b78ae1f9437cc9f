"""The table of differences between a checkpoint's model and the run's."""

from __future__ import annotations

import pytest

from neox.checkpoint import check_same_model, identity_state, padding_note
from neox.errors import CheckpointError
from tests.plans import SIZES, plan_of


def plan(**changes):
    return plan_of(1, 60, **{**SIZES, "num_layers": 2, "hidden_size": 16, "rotary_pct": 1, **changes})


def args(run):
    return {name: value for part in identity_state(run).values() for name, value in part.items()}


def test_the_same_model_at_other_degrees_and_padding(tmp_path):
    assert check_same_model(tmp_path, args(plan()), plan(make_vocab_size_divisible_by=8)) == {}
    assert check_same_model(tmp_path, {"num_layers": 2, "make_vocab_size_divisible_by": 7}, plan()) == {}
    assert args(plan())["vocab_size"] == 60


def test_a_table_of_what_differs(tmp_path):
    with pytest.raises(CheckpointError) as error:
        check_same_model(tmp_path, args(plan()), plan(layernorm_epsilon=0.5, gpt_j_residual=True))
    rows = [line.split() for line in str(error.value).splitlines()[1:4]]
    assert rows == [
        ["key", "checkpoint", "this", "run"],
        ["layernorm_epsilon", "1e-05", "0.5"],
        ["gpt_j_residual", "False", "True"],
    ]


def test_another_padding_is_said_aloud():
    saved = args(plan())  # 60 ids in 128 rows
    assert padding_note(saved, plan()) is None
    assert padding_note({}, plan()) is None
    note = padding_note(saved, plan(make_vocab_size_divisible_by=8))
    assert note is not None
    assert "64 rows instead of the checkpoint's 128" in note
    assert "`padded_vocab_size: 128`" in note
