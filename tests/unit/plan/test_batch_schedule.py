"""Batch sizes and sequence lengths of each step, against Megatron-LM's rule and DeepSpeed's class."""

import pytest
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

from neox.config import NeoXConfig
from neox.errors import ConfigError
from neox.plan import format_plan, plan_as_dict, resolve
from neox.problems import Source
from tests.plans import SIZES, plan_of, problem_keys

CURRICULA = {
    "linear": ("fixed_linear", {"total_curriculum_step": 20, "difficulty_step": 4}),
    "root": ("fixed_root", {"total_curriculum_step": 20, "difficulty_step": 8, "root_degree": 2}),
    "discrete": ("fixed_discrete", {"difficulty": [4, 10, 32], "max_step": [5, 9]}),
}


def curriculum(kind, growth, lowest=6, highest=32):
    return {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": lowest,
        "max_difficulty": highest,
        "schedule_type": kind,
        "schedule_config": growth,
    }


@pytest.mark.parametrize(("ramp", "final"), [((4, 4, 100), 20), ((2, 6, 7), 20), ((4, 2, 1000), 40), ((8, 8, 1), 16)])
def test_a_ramp_follows_megatrons_rule(ramp, final):
    start, increment, samples = ramp
    schedule = plan_of(**SIZES, gas=final // 2, rampup_batch_size=ramp).batch_schedule
    consumed = 0
    for step in range(300):
        grown = start + consumed // (samples / ((final - start) // increment)) * increment
        size = final if consumed > samples else grown
        assert (schedule.samples(step), schedule.batch_size(step)) == (consumed, size), step
        assert schedule.steps(consumed) == schedule.steps(consumed + size - 1) == step
        consumed += int(size)


@pytest.mark.parametrize("case", CURRICULA)
def test_lengths_are_those_of_deepspeed(case):
    settings = curriculum(*CURRICULA[case])
    schedule = plan_of(**SIZES, curriculum_learning=settings).batch_schedule
    reference = CurriculumScheduler(settings)
    assert [schedule.seq_length(step) for step in range(30)] == [reference.update_difficulty(i + 1) for i in range(30)]
    assert schedule.seq_length(0) < schedule.seq_length(30) == 32


def test_the_plan_counts_what_steps_take():
    keys = {"gas": 4, "train_iters": 40, "rampup_batch_size": [2, 2, 30]}
    keys["curriculum_learning"] = curriculum(*CURRICULA["linear"])
    plan = plan_of(**{**SIZES, **keys})
    schedule = plan.batch_schedule
    segments = list(schedule.segments(40))
    assert sum(s.last - s.first for s in segments) == 40
    by_step = [(schedule.batch_size(i), schedule.seq_length(i)) for i in range(40)]
    assert by_step == [(s.batch_size, s.seq_length) for s in segments for _ in range(s.first, s.last)]
    assert plan_as_dict(plan)["figures"]["tokens"] == sum(size * length for size, length in by_step)
    text = format_plan(plan)
    assert "ramp-up   2 samples" in text
    assert "lengths   8 tokens" in text


BLOCK = "curriculum_learning"


@pytest.mark.parametrize(
    ("first", "keys"),
    [
        ("rampup_batch_size", {"rampup_batch_size": [3, 2, 9]}),
        ("rampup_batch_size", {"rampup_batch_size": [2, 3, 10]}),
        ("rampup_batch_size", {"rampup_batch_size": [8, 2, 10]}),
        ("rampup_batch_size", {"rampup_batch_size": [2, 4, 10]}),
        ("rampup_batch_size", {"rampup_batch_size": [2, 2, 0]}),
        (f"{BLOCK}.schedule_type", {BLOCK: curriculum("fixed_root", CURRICULA["linear"][1])}),
        (f"{BLOCK}.max_difficulty", {BLOCK: curriculum(*CURRICULA["linear"], highest=64)}),
        (f"{BLOCK}.min_difficulty", {BLOCK: curriculum(*CURRICULA["linear"], lowest=33)}),
        (
            f"{BLOCK}.schedule_config.max_step",
            {BLOCK: curriculum("fixed_discrete", {"difficulty": [4], "max_step": [1]})},
        ),
        (
            f"{BLOCK}.schedule_config.difficulty",
            {BLOCK: curriculum("fixed_discrete", {"difficulty": [8, 4], "max_step": [1]})},
        ),
        (
            f"{BLOCK}.curriculum_type",
            {BLOCK: {**curriculum(*CURRICULA["linear"]), "curriculum_type": "vocabularyrarity"}},
        ),
    ],
)
def test_impossible_batches_and_lengths_are_refused_by_name(first, keys):
    found = problem_keys(**{**SIZES, "gas": 4, **keys})
    assert {names[0] for names in found} == {first}


def test_what_a_curriculum_lacks_is_said_with_its_file_and_line():
    keys = {**SIZES, BLOCK: {"enabled": True, "max_difficulty": 16}}
    place = Source.in_file("lengths.yml", 3)
    config = NeoXConfig.from_flat(keys, {BLOCK: Source.in_file("lengths.yml", 1), f"{BLOCK}.enabled": place})
    with pytest.raises(ConfigError) as refused:
        resolve(config, 1, 100)
    found = {problem.keys: problem.source for problem in refused.value.problems}
    in_block = Source.in_file("lengths.yml", 1)
    assert found == {
        (f"{BLOCK}.enabled", f"{BLOCK}.min_difficulty"): place,
        (
            f"{BLOCK}.schedule_type",
            f"{BLOCK}.schedule_config.total_curriculum_step",
            f"{BLOCK}.schedule_config.difficulty_step",
        ): in_block,
    }
