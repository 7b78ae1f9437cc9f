"""Rules of sequence_parallel, and what the plan says of it."""

from __future__ import annotations

from typing import Any

import pytest

from neox.errors import ConfigError
from tests.plans import small_plan

ODD_LENGTHS = {
    "enabled": True,
    "min_difficulty": 3,
    "max_difficulty": 16,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 3},
}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"seq_length": 15}, ("seq_length: 15", "model_parallel_size: 2", "14 or 16")),
        ({"soft_prompt_tuning": {"enabled": True, "num_tokens": 2}}, ("sequence_parallel: true", "soft_prompt")),
        (
            {"checkpoint_activations": True, "partition_activations": True},
            ("partition_activations: true", "sequence_parallel"),
        ),
        ({"curriculum_learning": ODD_LENGTHS}, ("sequence_parallel: true", "curriculum_learning has 3")),
    ],
)
def test_what_cannot_be_divided_is_refused(keys: dict[str, Any], words: tuple[str, ...]):
    with pytest.raises(ConfigError) as error:
        small_plan(2, model_parallel_size=2, sequence_parallel=True, **keys)
    assert any(all(word in problem for word in words) for problem in error.value.problems)


def test_one_tensor_rank_has_nothing_to_divide():
    plan = small_plan(sequence_parallel=True)
    assert not plan.grid.sequence_parallel
    assert any("sequence_parallel: true" in note and "model_parallel_size: 1" in note for note in plan.notes)


def test_stages_pass_on_shares_as_they_are():
    plan = small_plan(4, model_parallel_size=2, pipe_parallel_size=2, sequence_parallel=True)
    assert plan.grid.sequence_parallel
    assert plan.deepspeed["pipeline"] == {"pipe_partitioned": False, "grad_partitioned": False}
