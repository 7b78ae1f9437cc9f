"""Official scores of SQuAD, windows and best answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from neox.errors import DataError
from neox.evaluation.squad import Question, Window, best_answers, f1, normalize_answer, read_squad, score, span_of
from tests.errors import raises_naming


def question(number: int, *answers: str, context: str = "The cat sat.") -> Question:
    return Question(str(number), "who?", context, answers, tuple(max(0, context.find(answer)) for answer in answers))


@pytest.mark.parametrize(
    ("prediction", "answer", "exact", "overlap"),
    [
        ("The Cat!", "cat", 1, 1.0),
        ("a big cat", "the cat", 0, 2 / 3),
        ("dog", "cat", 0, 0.0),
        ("", "", 1, 1.0),
        ("the", "", 1, 1.0),
        ("cat", "", 0, 0.0),
        ("cat cat dog", "cat dog dog", 0, 2 / 3),
    ],
)
def test_scores(prediction: str, answer: str, exact: int, overlap: float) -> None:
    assert f1(prediction, answer) == pytest.approx(overlap)
    asked = question(0, *([answer] if answer else []))
    assert score([asked], {"0": prediction}) == pytest.approx({"exact": 100 * exact, "f1": 100 * overlap})


def test_the_best_of_several_answers_counts() -> None:
    scores = score([question(0, "cat", "The cat sat"), question(1, "cat")], {"0": "cat sat"})
    assert scores == {"exact": 50.0, "f1": 50.0}
    assert normalize_answer("An  apple, a day's THE end.") == "apple days end"


def test_answers_over_windows() -> None:
    context = "alpha beta gamma delta"
    offsets = np.array([[-1, -1], [0, 5], [6, 10], [11, 16], [17, 22], [-1, -1]])
    first, second = (offsets * (np.arange(6) < 3)[:, None] - (np.arange(6) >= 3)[:, None]), offsets
    windows = [Window(0, first), Window(0, second)]
    assert span_of(windows[1], 6, 16) == (2, 3)
    assert span_of(windows[0], 6, 16) is None
    starts, ends = np.zeros((2, 6)), np.zeros((2, 6))
    starts[1, 2], ends[1, 3] = 3, 3
    starts[1, 5] = 9  # outside the text
    asked = [question(0, context=context)]
    assert best_answers(asked, windows, starts, ends, longest=3, may_be_empty=True) == {"0": "beta gamma"}
    assert best_answers(asked, windows, starts, ends, longest=1, may_be_empty=False)["0"] in ("beta", "gamma")
    starts[:, 0] = 8
    assert best_answers(asked, windows, starts, ends, longest=3, may_be_empty=True) == {"0": ""}
    assert best_answers(asked, windows, starts, ends, longest=3, may_be_empty=False) == {"0": "beta gamma"}


def test_wrong_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    entry = {"id": "1", "question": "q", "answers": [{"text": "cat", "answer_start": 5}]}
    for content in ("{", "{}", '{"data": []}'):
        path.write_text(content)
        with raises_naming(DataError, path):
            read_squad(path)
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": "The cat", "qas": [entry]}]}]}))
    with raises_naming(DataError, path, "question 1", "'cat'"):
        read_squad(path)
    with raises_naming(DataError, tmp_path / "none.json"):
        read_squad(tmp_path / "none.json")
