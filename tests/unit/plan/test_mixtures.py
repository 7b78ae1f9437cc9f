"""Stages of the training data: where they start, which lengths they have, and shares by weight, size and passes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neox.config import load_config
from neox.errors import ConfigError
from neox.plan import DataAmounts, RunPlan, decode_payload, encode_payload, format_plan, plan_as_dict
from neox.plan.batches.dataset_shares import shares_of_stages
from neox.plan.report.data_lines import notes_on_evaluations, notes_on_passes, validation_lines
from tests.plans import SIZES, plan_of

PATHS = {"train_data_paths": ["a", "b", "c"], "train_iters": 100}
WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 25}
BATCH = 2


def staged(*stages: dict[str, Any], **keys: Any) -> RunPlan:
    return plan_of(**{**SIZES, **PATHS, **keys, "data_stages": list(stages)})


def shares_of(plan: RunPlan, sizes: list[int], **options: Any) -> list[list[float]]:
    found = shares_of_stages(plan.config, plan.batch_schedule, sizes, **options)
    return [[round(share, 6) for share in reading.shares] for reading in found]


def test_each_way_to_start_a_stage() -> None:
    plan = staged(
        {"seq_length": 8},
        {"start_step": 10, "seq_length": 16},
        {"start_tokens": 10 * BATCH * 8 + 20 * BATCH * 16 - 3, "seq_length": 32},
        {"start_fraction": 0.5},
        {"start_at_lr_decay": True, "name": "decay"},
        **WSD,
    )
    schedule = plan.batch_schedule
    assert [mixture.step for mixture in schedule.mixtures] == [0, 10, 30, 50, 75]
    assert [mixture.name for mixture in schedule.mixtures][3:] == ["stage 4", "decay"]
    lengths = [8] * 10 + [16] * 20 + [32] * 70
    assert [schedule.seq_length(step) for step in range(100)] == lengths
    segments = list(schedule.segments(100))
    assert sum(segment.tokens for segment in segments) == sum(lengths) * BATCH
    assert [segment.seq_length for segment in segments] == [8, 16, 32, 32, 32]


def test_lengths_may_shrink_and_batches_grow() -> None:
    plan = staged({}, {"start_step": 40, "seq_length": 8}, gas=4, rampup_batch_size=[2, 2, 100])
    schedule = plan.batch_schedule
    by_step = [(schedule.batch_size(i), schedule.seq_length(i)) for i in range(100)]
    assert by_step == [(s.batch_size, s.seq_length) for s in schedule.segments(100) for _ in range(s.first, s.last)]
    assert {length for _, length in by_step} == {32, 8}


def test_shares_by_weight_size_and_temperature() -> None:
    sizes = [1000, 8000, 1000]
    plan = staged(
        {"weights": [1, 3, 0]},
        {"start_step": 10, "temperature": 1},
        {"start_step": 20, "temperature": 3},
        {"start_step": 30},
        train_data_weights=[2, 1, 1],
    )
    assert shares_of(plan, sizes) == [[0.25, 0.75, 0], [0.1, 0.8, 0.1], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]
    assert shares_of(plan_of(**{**SIZES, **PATHS}), sizes) == [[round(1 / 3, 6)] * 3]
    assert shares_of(plan_of(**{**SIZES, **PATHS, "train_data_temperature": 1}), sizes) == [[0.1, 0.8, 0.1]]


def test_limits_on_passes_move_shares_to_other_datasets() -> None:
    tokens = 50 * BATCH * 32  # of each stage
    plan = staged({"weights": [1, 1, 2]}, {"start_step": 50, "weights": [1, 1, 0]}, train_data_max_passes=[1, 100, 0.5])
    sizes = [tokens // 2, tokens, tokens // 2]
    assert shares_of(plan, sizes) == [[0.375, 0.375, 0.25], [0.125, 0.875, 0]]
    read = [tokens // 4, 0, tokens // 4]
    assert shares_of(plan, sizes, read=read, from_step=50) == [[0.25, 0.75, 0]]
    with pytest.raises(ConfigError) as caught:
        shares_of(staged({}, train_data_max_passes=0.5), [tokens] * 3)
    assert caught.value.problems[0].keys[0] == "train_data_max_passes"


@pytest.mark.parametrize(
    ("stages", "keys"),
    [
        ([{"start_step": 3}], {}),
        ([{}, {}], {}),
        ([{}, {"start_step": 3, "start_tokens": 100}], {}),
        ([{}, {"start_step": 8}, {"start_step": 8}], {}),
        ([{}, {"start_step": 100}], {}),
        ([{}, {"start_at_lr_decay": True}], {}),
        ([{"weights": [1, 2]}], {}),
        ([{"weights": [0, 0, 0]}], {}),
        ([{"weights": [1, 1, 1], "temperature": 2}], {}),
        ([{"seq_length": 33}], {}),
        ([{}], {"pack_impl": "unpacked"}),
        ([{}], {"weight_by_num_documents": True}),
        ([{}], {"train_data_paths": None, "data_path": "a"}),
    ],
)
def test_stages_that_cannot_be_are_refused(stages: list[dict[str, Any]], keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        staged(*stages, **keys)
    assert [problem.keys[0] for problem in caught.value.problems] == ["data_stages"]


def test_a_length_that_tensor_ranks_cannot_divide_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        staged({"seq_length": 15}, model_parallel_size=2, sequence_parallel=True, world_size=2)
    (problem,) = caught.value.problems
    assert "data_stages" in problem.keys


def test_ranks_get_the_same_stages(tmp_path: Path) -> None:
    plan = staged({"seq_length": 8}, {"start_tokens": 1e3, "weights": [0, 1, 2]})
    assert decode_payload(encode_payload(plan)).batch_schedule == plan.batch_schedule
    assert json.loads(json.dumps(plan_as_dict(plan)))["values"]["data_stages"]["value"][0] == {
        "start_at_lr_decay": False,
        "seq_length": 8,
    }
    (tmp_path / "c.yml").write_text("train_data_paths: [a]\ndata_stages:\n  - {}\n  - {start_tokens: 2e11}\n")
    loaded = load_config([tmp_path / "c.yml"])
    assert loaded.problems == ()
    assert loaded.config.data.data_stages is not None
    assert loaded.config.data.data_stages[1].start_tokens == 2e11


def test_the_plan_shows_tokens_and_passes() -> None:
    plan = staged({"weights": [1, 1, 0]}, {"start_step": 50, "weights": [0, 1, 1], "name": "last"})
    tokens = 50 * BATCH * 32
    assert notes_on_passes(plan) == []
    sized = replace(plan, amounts=DataAmounts(dataset_tokens=(tokens // 5, tokens // 8, tokens)))
    lines = [line for line in format_plan(sized).splitlines() if " passes)" in line]
    assert [line.count("passes") for line in lines] == [2, 2]
    assert "2.5 passes" in lines[0]
    assert "last from step 50" in lines[1]
    (note,) = notes_on_passes(sized)
    assert note.startswith("b is read 8.0 times")
    assert notes_on_passes(replace(sized, amounts=DataAmounts(dataset_tokens=(tokens, tokens, tokens)))) == []


def test_the_plan_shows_each_validation_set() -> None:
    sets = {"wiki": "data/wiki_text_document", "code": {"path": "data/code", "weight": 3}}
    plan = plan_of(**SIZES, train_data_paths=["a"], valid_data_paths=sets, eval_iters=5)
    wiki, code = validation_lines(plan)
    tokens = 5 * plan.batch.train_batch_size * plan.batch_schedule.full_length
    assert f"{tokens:,} tokens" in wiki
    assert "wiki_text_document" in wiki
    assert "25 %" in wiki
    assert "75 %" in code

    plan = plan_of(**SIZES, data_path="a", valid_data_paths=sets, eval_iters=5)
    shares = [line.rpartition(", ")[2] for line in validation_lines(plan)]
    assert shares == ["20 % of the mean", "20 % of the mean", "60 % of the mean"]
    plan = plan_of(**SIZES, data_path="a", split="9,0,1", valid_data_paths=sets, eval_iters=5)
    assert [line.rpartition(", ")[2] for line in validation_lines(plan)] == ["25 % of the mean", "75 % of the mean"]


def test_the_plan_says_how_many_tokens_a_point_is_of_and_whether_it_reads_them_more_than_once() -> None:
    for samples in (5, "all"):
        plan = plan_of(**SIZES, data_path="a", eval_iters=samples)
        tokens = 5 * plan.batch.train_batch_size * plan.batch_schedule.full_length
        assert notes_on_evaluations(plan) == []
        (line,) = validation_lines(replace(plan, amounts=DataAmounts(validation_tokens=((None, 2 * tokens),))))
        assert f"{2 * tokens:,}" in line
        assert (f"{tokens:,} tokens an" in line) is (samples == 5)
        notes = notes_on_evaluations(replace(plan, amounts=DataAmounts(validation_tokens=(("wiki", tokens // 5),))))
        assert len(notes) == (samples == 5)
        assert all("wiki" in note and "5 times" in note for note in notes)
