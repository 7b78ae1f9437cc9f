"""Division of a run's time into useful time and the parts of the rest."""

from __future__ import annotations

import pytest

from benchmarks.useful_time import Kill, parts


def test_each_second_belongs_to_one_part() -> None:
    steps = [(float(second), second) for second in range(1, 11)]  # a step a second; the checkpoint is that of step 8
    steps += [(17.0 + second, 9 + second) for second in range(10)]
    lines = [(0.2, "training from iteration 0"), (14.0, "loading checkpoint x"), (15.5, "training from iteration 8")]
    numbers = parts(steps, lines, [11.5], [Kill(10.5, 10)])
    expected = {"noticing": 1.0, "loading": 1.5, "restarting": 17 - 11.5 - 1.5, "repeated": 1.0}
    assert numbers["parts"] == pytest.approx({**expected, "useful": 25 - sum(expected.values())})
    assert sum(numbers["shares"].values()) == pytest.approx(1, abs=1e-3)
    assert (numbers["kills"], numbers["steps"], numbers["steps_with_repeated"]) == (1, 18, 20)


def test_a_second_kill_before_all_is_repeated() -> None:
    steps = [(1.0, 1), (2.0, 2), (3.0, 3), (6.0, 1), (9.0, 1), (10.0, 2), (11.0, 3), (12.0, 4)]
    ends = [4.0, 7.0]
    numbers = parts(steps, [], ends, [Kill(3.5, 3), Kill(6.5, 1)])
    assert numbers["parts"]["repeated"] == 2.0  # steps 2 and 3 after the second kill
