"""Questions in SQuAD's format, answers of a span model, and the official scores (arXiv:1806.03822)."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neox.errors import DataError

_BEST = 20
"""Number of starts, and of ends, of a window that are tried together."""


@dataclass(frozen=True)
class Question:
    """One question about a text.

    Attributes:
        id: Name in the file.
        question: The question.
        context: Text that holds the answer.
        answers: Accepted answers; none if the text holds no answer.
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
    questions = []
    try:
        for article in json.loads(Path(path).read_text(encoding="utf-8-sig"))["data"]:
            for paragraph in article["paragraphs"]:
                for entry in paragraph["qas"]:
                    answers = entry.get("answers", ())
                    questions.append(
                        Question(
                            id=str(entry["id"]),
                            question=entry["question"],
                            context=paragraph["context"],
                            answers=tuple(answer["text"] for answer in answers),
                            starts=tuple(answer["answer_start"] for answer in answers),
                        )
                    )
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
    """Return an answer as the official script compares it.

    It is in lower case, without punctuation, articles and repeated white space.
    """
    kept = text.lower().translate(str.maketrans("", "", string.punctuation))
    without_articles = re.sub(r"\b(a|an|the)\b", " ", kept)
    return " ".join(without_articles.split())


def exact_match(prediction: str, answer: str) -> float:
    """Return 1 if a prediction is an answer, up to `normalize_answer`."""
    return float(normalize_answer(prediction) == normalize_answer(answer))


def f1(prediction: str, answer: str) -> float:
    """Return the harmonic mean of precision and recall over words; 1 if both sides have no words."""
    predicted = normalize_answer(prediction).split()
    expected = normalize_answer(answer).split()
    if not predicted or not expected:
        return float(predicted == expected)
    common = (Counter(predicted) & Counter(expected)).total()
    return 2 * common / (len(predicted) + len(expected))


def score(questions: Sequence[Question], predictions: Mapping[str, str]) -> dict[str, float]:
    """Return the official scores in percent: `exact` and `f1`, each the best over a question's answers.

    Args:
        questions: The questions. For one without answers the empty prediction is right.
        predictions: Question's id -> predicted answer; empty if it is missing.
    """
    exact_total = 0.0
    f1_total = 0.0
    for question in questions:
        prediction = predictions.get(question.id, "")
        answers = list(filter(normalize_answer, question.answers)) or [""]
        exact_total += max(exact_match(prediction, answer) for answer in answers)
        f1_total += max(f1(prediction, answer) for answer in answers)
    return {"exact": 100 * exact_total / len(questions), "f1": 100 * f1_total / len(questions)}


@dataclass(frozen=True)
class Window:
    """Part of a text that one input of the model holds.

    Attributes:
        question: Number of the question.
        offsets: First character of each token and the character after its last one, int64 [tokens, 2]; -1 for tokens
            outside the text.
    """

    question: int
    offsets: np.ndarray


def span_of(window: Window, start: int, stop: int) -> tuple[int, int] | None:
    """Return the first and last token of characters [start, stop); None if they are not all in the window."""
    begins = window.offsets[:, 0]
    ends = window.offsets[:, 1]
    first = np.flatnonzero((begins <= start) & (ends > start))
    last = np.flatnonzero((begins < stop) & (ends >= stop))
    if len(first) == 0 or len(last) == 0:
        return None
    return int(first[0]), int(last[-1])


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
        starts: Logits of each token as an answer's first token [windows, tokens].
        ends: Logits of each token as an answer's last token [windows, tokens].
        longest: Largest number of tokens of an answer.
        may_be_empty: Whether the first token stands for no answer, as in SQuAD 2.0.

    Returns:
        Question's id -> answer.
    """
    best = [_Answer(-np.inf, "")] * len(questions)
    empty = [np.inf] * len(questions)  # score of no answer, the least one over the windows
    for window, start_logits, end_logits in zip(windows, starts, ends, strict=True):
        number = window.question
        empty[number] = min(empty[number], float(start_logits[0] + end_logits[0]))
        answer = _best_answer(questions[number].context, window, start_logits, end_logits, longest)
        best[number] = max(best[number], answer, key=lambda found: found.score)
    answers = {}
    for number, question in enumerate(questions):
        is_empty = may_be_empty and best[number].score < empty[number] < np.inf
        answers[question.id] = "" if is_empty else best[number].text
    return answers


class _Answer(NamedTuple):
    """An answer and the sum of the logits of its first and its last token."""

    score: float
    text: str


def _best_answer(
    context: str, window: Window, start_logits: np.ndarray, end_logits: np.ndarray, longest: int
) -> _Answer:
    """Return the most probable answer in one window; an empty one with -inf if none fits."""
    is_text = window.offsets[:, 0] >= 0
    firsts = np.where(is_text, start_logits, -np.inf)
    lasts = np.where(is_text, end_logits, -np.inf)
    best = _Answer(-np.inf, "")
    for first in np.argsort(-firsts)[:_BEST].tolist():
        for last in np.argsort(-lasts)[:_BEST].tolist():
            score = float(firsts[first] + lasts[last])
            if first <= last < first + longest and score > best.score:
                begin = int(window.offsets[first, 0])
                stop = int(window.offsets[last, 1])
                best = _Answer(score, context[begin:stop])
    return best
