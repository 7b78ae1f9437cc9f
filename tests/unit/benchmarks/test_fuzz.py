"""Drawing, comparing and reporting random cases; some are trained in the slow tests."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.fuzz import coverage
from tests.fuzzing.cases import draw, is_accepted, named
from tests.fuzzing.settings import LAYOUTS, MODELS, TRAINING
from tests.fuzzing.trials import Outcome, first_difference, report_line, try_cases, write_data


def test_a_seed_draws_the_same_accepted_cases_and_a_report_names_them():
    for number in range(3):
        case = draw(random.Random(f"5 {number}"))
        assert case == draw(random.Random(f"5 {number}"))
        assert is_accepted(case)
        line = json.loads(report_line(case, Outcome("agrees"), 5, number))
        assert named(json.dumps(line["case"])) == case


def test_settings_have_names_of_their_own():
    names = [setting.name for setting in (*MODELS, *TRAINING, *LAYOUTS)]
    assert len(set(names)) == len(names)


def test_a_number_that_differs_is_found():
    right = {(1, "train/lm_loss"): 5.0, (2, "train/lm_loss"): 4.0, (2, "train/grad_norm"): 1.0}
    assert not first_difference(right, right)[0]
    for key in right:
        text, difference = first_difference(right, {**right, key: right[key] * 1.01})
        assert key[1] in text
        assert difference == pytest.approx(0.01)
    assert first_difference(right, {**right, (2, "train/lm_loss"): float("nan")})[0]


def test_coverage_counts_cases_that_agree():
    lines = [{"kind": "agrees", "names": ["ZeRO 1", "resumed ZeRO 1"]}, {"kind": "fails", "names": ["ZeRO 2"]}]
    rows = {line.split(maxsplit=1)[1]: int(line.split()[0]) for line in coverage(lines).splitlines()[:-1]}
    assert rows["ZeRO 1"] == 2
    assert rows["ZeRO 2"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(12))
def test_random_cases_agree_with_one_rank(tmp_path, seed):
    case = draw(random.Random(f"slow {seed}"))
    (outcome,) = try_cases([case], tmp_path / "work", write_data(tmp_path), 400)
    assert outcome.kind in ("agrees", "idle"), (case.to_json(), outcome.detail)
