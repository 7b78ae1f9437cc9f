"""Questions in SQuAD's format, answers of a span model, and the official scores (arXiv:1806.03822)."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neox.errors import DataError

_BEST = 20  # starts and ends of a window that are tried together


@dataclass(frozen=True)
class Question:
    """One question about a text.

    Attributes:
        id: Its name in the file.
        question: The question.
        context: The text that holds the answer.
        answers: Accepted answers; empty if the text holds none.
        starts: First character of each answer in the text.
    """

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]


def read_squad(path: str | Path) -> list[Question]:
    """Read a file of SQuAD 1.1 or 2.0.

    Raises:
        DataError: If it cannot be read, has another format, no question, or an answer that is not in its text.
    """
    try:
        articles = json.loads(Path(path).read_text(encoding="utf-8"))["data"]
        questions = [
            Question(
                str(entry["id"]),
                entry["question"],
                paragraph["context"],
                tuple(answer["text"] for answer in entry.get("answers", ())),
                tuple(answer["answer_start"] for answer in entry.get("answers", ())),
            )
            for article in articles
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
        ]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no file of SQuAD's format ({type(error).__name__}: {error})") from error
    if not questions:
        raise DataError(f"{path} holds no question")
    for question in questions:
        for answer, start in zip(question.answers, question.starts, strict=True):
            if question.context[start : start + len(answer)] != answer:
                raise DataError(f"{path}: question {question.id}: {answer!r} is not at character {start} of its text")
    return questions


def normalize_answer(text: str) -> str:
    """Return an answer in lower case without punctuation, articles and repeated white space, as the official script."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def exact_match(prediction: str, answer: str) -> float:
    """Return 1 if a prediction is an answer, up to `normalize_answer`."""
    return float(normalize_answer(prediction) == normalize_answer(answer))


def f1(prediction: str, answer: str) -> float:
    """Return the harmonic mean of precision and recall over words; without words on one side, their equality."""
    predicted, expected = normalize_answer(prediction).split(), normalize_answer(answer).split()
    if not predicted or not expected:
        return float(predicted == expected)
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected)) if common else 0.0


def score(questions: Sequence[Question], predictions: Mapping[str, str]) -> dict[str, float]:
    """Return the official scores in percent: `exact` and `f1`, each the best over a question's answers.

    Args:
        questions: The questions; one without answers expects the empty prediction.
        predictions: Answer by the question's id; a missing one is empty.
    """
    totals = {"exact": 0.0, "f1": 0.0}
    for question in questions:
        prediction = predictions.get(question.id, "")
        answers = [answer for answer in question.answers if normalize_answer(answer)] or [""]
        totals["exact"] += max(exact_match(prediction, answer) for answer in answers)
        totals["f1"] += max(f1(prediction, answer) for answer in answers)
    return {name: 100 * total / len(questions) for name, total in totals.items()}


@dataclass(frozen=True)
class Window:
    """Part of a text that one input of the model holds.

    Attributes:
        question: Number of the question.
        offsets: First character of each token and the one after its last, int64 [tokens, 2]; -1 outside the text.
    """

    question: int
    offsets: np.ndarray


def span_of(window: Window, start: int, stop: int) -> tuple[int, int] | None:
    """Return the first and last token of characters [start, stop); None if they are not all in the window."""
    first = np.flatnonzero((window.offsets[:, 0] <= start) & (window.offsets[:, 1] > start))
    last = np.flatnonzero((window.offsets[:, 0] < stop) & (window.offsets[:, 1] >= stop))
    return (int(first[0]), int(last[-1])) if len(first) and len(last) else None


def best_answers(
    questions: Sequence[Question],
    windows: Iterable[Window],
    starts: np.ndarray,
    ends: np.ndarray,
    *,
    longest: int,
    may_be_empty: bool,
) -> dict[str, str]:
    """Return the most probable answer of each question, over all its windows.

    Args:
        questions: The questions.
        windows: Windows of their texts.
        starts: Logits of each token being an answer's first [windows, tokens].
        ends: Logits of each token being its last [windows, tokens].
        longest: Most tokens of an answer.
        may_be_empty: Whether the first token stands for no answer, as in SQuAD 2.0.
    """
    best: dict[int, tuple[float, str]] = {}
    none: dict[int, float] = {}
    for window, start_logits, end_logits in zip(windows, starts, ends, strict=True):
        number = window.question
        none[number] = min(none.get(number, np.inf), float(start_logits[0] + end_logits[0]))
        inside = window.offsets[:, 0] >= 0
        firsts, lasts = (np.where(inside, logits, -np.inf) for logits in (start_logits, end_logits))
        for first in np.argsort(-firsts)[:_BEST].tolist():
            for last in np.argsort(-lasts)[:_BEST].tolist():
                value = float(firsts[first] + lasts[last])
                fits = first <= last < first + longest and np.isfinite(value)
                if fits and value > best.get(number, (-np.inf, ""))[0]:
                    begin, stop = int(window.offsets[first, 0]), int(window.offsets[last, 1])
                    best[number] = (value, questions[number].context[begin:stop])
    answers = {}
    for number, question in enumerate(questions):
        value, text = best.get(number, (-np.inf, ""))
        answers[question.id] = "" if may_be_empty and none.get(number, -np.inf) > value else text
    return answers
