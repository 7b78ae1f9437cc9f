"""Order and timing of pipeline schedules, against what their papers say."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neox.errors import ConfigError
from neox.plan.ranks.pipeline_schedules import PIPELINE_SCHEDULES
from neox.plan.time.simulation import Timeline, simulate, simulated_length

CHUNKS = {"1f1b": (1,), "interleaved": (2, 3, 4), "dualpipev": (2,)}


def run(schedule: str, ranks: int, chunks: int, micro_batches: int) -> Timeline:
    """A step whose forward pass through all chunks of a rank takes 1, and whose backward pass takes 2."""
    forward = [[1 / chunks] * chunks for _ in range(ranks)]
    backward = [[2 / chunks] * chunks for _ in range(ranks)]
    return simulate(schedule, forward, backward, micro_batches)


@given(st.sampled_from(sorted(PIPELINE_SCHEDULES)), st.integers(1, 6), st.integers(1, 5), st.data())
@settings(max_examples=60)
def test_each_rank_runs_each_pass_once_and_no_two_at_a_time(
    schedule: str, ranks: int, rounds: int, data: st.DataObject
) -> None:
    chunks = data.draw(st.sampled_from(CHUNKS[schedule]))
    micro_batches = ranks * (rounds + 1) + data.draw(st.integers(0, ranks - 1))
    timeline = run(schedule, ranks, chunks, micro_batches)
    for passes in timeline.passes:
        assert set(Counter(timed.work for timed in passes).values()) == {1}
        assert len(passes) == 2 * chunks * micro_batches
        ends = [timed.end for timed in passes]
        assert all(timed.start >= end for timed, end in zip(passes[1:], ends[:-1], strict=True))


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(4, 1, 8), (8, 1, 32), (4, 2, 8), (8, 3, 16)])
def test_bubble_is_the_papers(ranks: int, chunks: int, micro_batches: int) -> None:
    schedule = "1f1b" if chunks == 1 else "interleaved"
    waiting = ranks - 1
    expected = waiting / (chunks * micro_batches + waiting)
    assert run(schedule, ranks, chunks, micro_batches).bubble == pytest.approx(expected)


def test_dual_pipe_v_has_a_smaller_bubble_than_1f1b() -> None:
    assert run("dualpipev", 4, 2, 8).bubble < run("1f1b", 4, 1, 8).bubble


@pytest.mark.parametrize("micro_batches", [1, 3, 5, 7, 9, 14])
def test_interleaved_stages_take_any_number_of_micro_batches(micro_batches: int) -> None:
    waiting = 3 if micro_batches >= 4 else 3 + 2 * (4 - micro_batches)  # fewer than stages cannot fill the pipeline
    expected = 3 * (micro_batches + waiting / 2)
    assert run("interleaved", 4, 2, micro_batches).length <= expected + 1e-9


def test_dual_pipe_v_needs_two_micro_batches_for_each_stage() -> None:
    with pytest.raises(ConfigError):
        run("dualpipev", 4, 2, 7)


@given(st.sampled_from(sorted(PIPELINE_SCHEDULES)), st.integers(2, 5), st.integers(0, 40), st.data())
@settings(max_examples=30)
def test_a_long_step_is_as_long_as_its_whole_simulation(
    schedule: str, ranks: int, more: int, data: st.DataObject
) -> None:
    chunks = data.draw(st.sampled_from(CHUNKS[schedule]))
    durations = st.floats(1, 1.5)
    forward = [[data.draw(durations) for _ in range(chunks)] for _ in range(ranks)]
    backward = [[2 * duration for duration in of_rank] for of_rank in forward]
    arguments = (schedule, forward, backward, 7 * ranks + more, 0.1)
    assert simulated_length(*arguments) == pytest.approx(simulate(*arguments).length, rel=0.02)


def test_handoffs_lengthen_a_step() -> None:
    forward = [[1.0], [1.0]]
    backward = [[2.0], [2.0]]
    assert simulate("1f1b", forward, backward, 1, handoff=0.5).length == pytest.approx(6 + 2 * 0.5)
