"""Log-probabilities of texts in JSON lines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from neox.errors import DataError
from neox.evaluation.text_probabilities import TextSummary, lines_with_probabilities
from tests.errors import raises_naming
from tests.unit.evaluation.table_model import ByteTokenizer, TableModel

EOD = ByteTokenizer.eod


def scored(directory: Path, *records: Any, skip_bad: int = 0) -> tuple[list[dict[str, Any]], TextSummary]:
    file = directory / "texts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = TextSummary()
    model = TableModel()
    lines = lines_with_probabilities(model, ByteTokenizer(), [str(file)], summary, batch=2, skip_bad=skip_bad)
    return list(map(json.loads, lines)), summary


def test_texts_follow_the_start_of_a_text_and_completions_their_prompt(tmp_path: Path) -> None:
    model = TableModel()
    text = {"text": "Käse", "id": 7}
    found, summary = scored(tmp_path, text, {"prompt": "ab", "completion": "cde"}, {"text": "a much longer one"})
    alone = model.total([EOD, *"Käse".encode()])
    after = model.total(list(b"abcde"), first=2)
    longer = model.total([EOD, *b"a much longer one"])
    assert [line["log_probability"] for line in found] == pytest.approx([alone, after, longer], rel=1e-5)
    assert [line["tokens"] for line in found] == [line["bytes"] for line in found] == [5, 3, 17]
    assert found[0]["id"] == 7
    assert found[0]["perplexity"] == pytest.approx(math.exp(-alone / 5), rel=1e-5)
    assert found[0]["bits_per_byte"] == pytest.approx(-alone / math.log(2) / 5, rel=1e-5)
    assert (summary.texts, summary.tokens, summary.size) == (3, 25, 25)
    assert summary.log_probability == pytest.approx(alone + after + longer, rel=1e-5)


def test_a_text_that_is_longer_than_the_context_is_scored_in_windows(tmp_path: Path) -> None:
    """The next token of this model depends on the last one alone, so that windows change nothing."""
    model = TableModel()
    text = "some words, " * 20
    found, summary = scored(tmp_path, {"text": text}, {"text": "b"}, {"chosen": text, "rejected": "b"})
    long = model.total([EOD, *text.encode()])
    short = model.total([EOD, *b"b"])
    assert len(text) > 3 * model.max_length
    assert [found[0]["log_probability"], found[1]["log_probability"]] == pytest.approx([long, short], rel=1e-5)
    assert [found[2]["chosen_log_probability"], found[2]["rejected_log_probability"]] == pytest.approx([long, short])
    assert [found[0]["tokens"], found[1]["tokens"], found[2]["chosen_tokens"]] == [len(text), 1, len(text)]
    assert summary.tokens == 2 * len(text) + 2


def test_pairs_are_compared_with_and_without_a_prompt(tmp_path: Path) -> None:
    model = TableModel()
    first = {"prompt": "a", "chosen": "bc", "rejected": "xyz"}
    second = {"chosen": "xyz", "rejected": "bc"}
    found, summary = scored(tmp_path, first, second)
    of_first = [model.total(list(b"abc"), first=1), model.total(list(b"axyz"), first=1)]
    of_second = [model.total([EOD, *b"xyz"]), model.total([EOD, *b"bc"])]
    for line, expected in zip(found, (of_first, of_second), strict=True):
        values = [line["chosen_log_probability"], line["rejected_log_probability"]]
        assert values == pytest.approx(expected, rel=1e-5)
    assert (found[0]["chosen_tokens"], found[0]["rejected_tokens"]) == (2, 3)
    assert summary.pairs == 2
    assert summary.right == sum(chosen > rejected for chosen, rejected in (of_first, of_second))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"txt": "a"}, "completion"),
        ({"text": "a", "completion": "b"}, "completion"),
        ({"chosen": "a"}, "rejected"),
        ({"text": ""}, "no text"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, "prompt"),
        ({"prompt": "a", "completion": "a" * 65}, "prompt"),
        ("a", "completion"),
    ],
)
def test_bad_lines_are_named_by_file_and_line_and_may_be_skipped(tmp_path: Path, record: Any, words: str) -> None:
    good = {"text": "a"}
    with raises_naming(DataError, tmp_path / "texts.jsonl", "2", words):
        scored(tmp_path, good, record)
    found, summary = scored(tmp_path, good, record, good, skip_bad=1)
    assert len(found) == summary.texts == 2
