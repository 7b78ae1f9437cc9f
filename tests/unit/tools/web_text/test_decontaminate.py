"""Removal of evaluation texts from documents."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

from neox.errors import ConfigError
from tests.errors import raises_naming
from tools.web_text import run_step
from tools.web_text.decontaminate import DECONTAMINATE, DecontaminateSettings, EvaluationGrams, cut_intervals

sys.path.append(str(Path(__file__).parent))
real: Any = importlib.import_module("real_texts")

QUESTION = "Which of the seven seas did Captain Ahab cross first, according to the old log of the ship?"


def sentences(count: int, seed: int) -> str:
    """Sentences of about 60 characters."""
    rng = random.Random(seed)
    return " ".join(f"{' '.join(rng.choices(real.WORDS, k=10))} {seed}x{n}." for n in range(count))


def run(
    tmp_path: Path, texts: list[str], evaluation: str = QUESTION, **settings: Any
) -> tuple[dict[str, Any], list[str]]:
    (tmp_path / "task.jsonl").write_text(json.dumps({"text": evaluation}) + "\n")
    source, output = real.write(tmp_path / "in.jsonl", texts), tmp_path / "out.jsonl"
    values = {"input": (source,), "output": output, "evaluation": (tmp_path / "task.jsonl",), **settings}
    report = run_step(DECONTAMINATE, DecontaminateSettings(**values))
    return report, [json.loads(line)["text"] for line in output.read_text().splitlines()]


def test_a_match_is_cut_with_its_margins_to_ends_of_sentences(tmp_path: Path) -> None:
    before, after = sentences(20, 1), sentences(20, 2)
    quoted = QUESTION.upper().replace(",", " --")  # case and punctuation do not matter
    report, texts = run(tmp_path, [f"{before} {quoted} {after}", before])
    assert len(texts) == 3
    first, second = texts[:2]
    assert before.startswith(first)
    assert after.endswith(second)
    assert first.endswith(".")
    assert 200 <= len(before) - len(first) <= 300
    assert 200 <= len(after) - len(second) <= 300
    assert texts[2] == before
    assert report["changed"] == {"cut: task.jsonl": 1}
    assert [json.loads(line).get("piece") for line in (tmp_path / "out.jsonl").open()] == [0, 1, None]


def test_short_pieces_and_documents_of_many_pieces_are_dropped(tmp_path: Path) -> None:
    part = sentences(12, 3)
    many = " ".join([part, QUESTION] * 11 + [part])
    near_start = f"{sentences(5, 4)} {QUESTION} {part}"
    report, texts = run(tmp_path, [many, QUESTION, near_start])
    assert len(texts) == 1
    assert part.endswith(texts[0])
    assert {reason: count for reason, (count, _) in report["dropped"].items()} == {
        "over 10 pieces": 1,
        "no piece of 200 characters": 1,
    }
    assert run(tmp_path, [many], most_pieces=12)[0]["documents_out"] == 12


def test_thirteen_words_match_and_twelve_do_not(tmp_path: Path) -> None:
    words = QUESTION.split()
    texts = [f"{sentences(9, 1)} {' '.join(words[2 : 2 + n])} {sentences(9, 2)}" for n in (12, 13)]
    assert run(tmp_path, texts)[0]["changed"] == {"cut: task.jsonl": 1}
    assert run(tmp_path, texts, ngram=12)[0]["changed"] == {"cut: task.jsonl": 2}


def test_short_evaluation_texts_match_whole_or_not_at_all(tmp_path: Path) -> None:
    nine, seven = " ".join(QUESTION.split()[:9]), " ".join(QUESTION.split()[:7])
    text = f"{sentences(9, 1)} {QUESTION} {sentences(9, 2)}"
    assert run(tmp_path, [text], nine)[0]["changed"] == {"cut: task.jsonl": 1}
    with raises_naming(ConfigError, "decontaminate:", "8 words"):
        run(tmp_path, [text], seven)


def test_other_evaluation_texts_are_another_job(tmp_path: Path) -> None:
    text = f"{sentences(9, 1)} {QUESTION} {sentences(9, 2)}"
    assert run(tmp_path, [text])[0]["fresh"]
    assert not run(tmp_path, [text])[0]["fresh"]
    assert run(tmp_path, [text], QUESTION + " Nobody knows.")[0]["fresh"]


def test_matches_are_those_of_a_search_of_all_windows() -> None:
    rng = random.Random(7)
    for length in (8, 10, 13):
        grams, words = EvaluationGrams(length), real.WORDS[:2]
        evaluation = rng.choices(words, k=30)
        grams.add("e", " ".join(evaluation))
        known = {tuple(evaluation[i : i + length]) for i in range(31 - length)}
        assert len(grams) == len(known)
        text = rng.choices([*words, "İx"], k=4000)
        joined, found = " ".join(text), 0
        places = {(a, b) for a, b, _ in grams.find(joined)}
        offset = 0
        for i, word in enumerate(text):
            stop = offset + len(" ".join(text[i : i + length]))
            assert ((offset, stop) in places) == (tuple(text[i : i + length]) in known)
            found += (offset, stop) in places
            offset += len(word) + 1
        assert found == len(places)


def test_cuts_are_joined_and_cover_every_match() -> None:
    rng = random.Random(9)
    for _ in range(300):
        text = "".join(rng.choices("ab. !", [8, 8, 1, 3, 0.3], k=rng.randrange(1, 300)))
        matches = [(a, min(len(text), a + rng.randrange(1, 20))) for a in rng.choices(range(len(text)), k=4)]
        margin = rng.choice([0, 5, 40])
        cuts = cut_intervals(text, matches, margin)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(cuts))
        assert all(0 <= start < stop <= len(text) for start, stop in cuts)
        for first, last in matches:
            assert any(a <= max(0, first - margin) and b >= min(len(text), last + margin) for a, b in cuts)
        assert all(start == 0 or text[start - 1] in ".!" for start, _ in cuts)
        assert all(stop == len(text) or text[stop - 1] in ".!" for _, stop in cuts)


def test_many_matches_in_a_long_text_are_cut_in_little_time() -> None:
    sentence = "the quick brown fox jumps over the lazy dog and then it runs away. "
    text = sentence * 20_000
    places = range(0, len(text) - len(sentence), 5)
    assert cut_intervals(text, ((place, place + 60) for place in places), 200) == [(0, len(text))]
