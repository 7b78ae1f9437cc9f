"""The needle test: what is in its texts, what counts as found, and its picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from neox.errors import EvaluationError
from neox.evaluation.needle import DEPTHS, Cell, heat_map, hidden_key, needle
from neox.evaluation.scoring import Scorer
from neox.evaluation.tasks import parse_tasks
from neox.parallel import ParallelGrid
from tests.unit.evaluation.table_model import ByteTokenizer

TOKENIZER = ByteTokenizer()
KEY = " The pass key is "


class Reader:
    """A model that knows the key if it stands in the last `memory` bytes, and never guesses."""

    device = torch.device("cpu")
    scores_by_length = False
    max_length = 4096

    def __init__(self, memory: int) -> None:
        self.memory = memory

    def score(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hits = torch.zeros(labels.shape, dtype=torch.bool)
        for row, (ids, answers) in enumerate(zip(tokens.tolist(), labels.tolist(), strict=True)):
            text = TOKENIZER.decode(ids)
            question = text.rfind(KEY) + len(KEY)
            place = text.find(KEY)
            hits[row] = question - place <= self.memory
            assert TOKENIZER.decode(answers)[question - 1 :].strip().isdigit() or not any(ids)
        return torch.where(hits, 0.0, -1.0), hits


def scorer(model: Reader, window: int = 1024) -> Scorer:
    return Scorer(model, TOKENIZER, ParallelGrid.single(), window, batch_size=1, limit=2)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_text_has_its_length_and_holds_the_key_at_its_depth(depth: int) -> None:
    span = hidden_key(Cell(600, depth), 0, TOKENIZER)
    assert span is not None
    assert len(span.tokens) == 601
    text = TOKENIZER.decode(list(span.tokens))
    key = TOKENIZER.decode(list(span.tokens[span.first :])).strip()
    assert text.count(key) == 3
    place = text.find(KEY) / (len(text) - 110)
    assert abs(place - depth / 100) < 0.1
    assert span == hidden_key(Cell(600, depth), 0, TOKENIZER)
    assert span != hidden_key(Cell(600, depth), 1, TOKENIZER)


def test_found_keys_are_counted_by_length_and_depth_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "needle.svg"
    result = needle(picture, scorer(Reader(memory=300)))
    assert result.metrics["acc_1024_100"] == 1.0
    assert result.metrics["acc_1024_0"] == 0.0
    assert result.metrics["acc_256_0"] == 1.0
    cells = [value for name, value in result.metrics.items() if name.startswith("acc_")]
    assert result.metrics["acc"] == pytest.approx(sum(cells) / len(cells))
    assert result.counts["texts"] == 2 * len(cells)
    assert picture.read_text().count("<rect") == 1 + len(cells)


def test_a_heat_map_leaves_out_what_was_not_tried() -> None:
    assert heat_map({Cell(64, 0): 1.0, Cell(128, 50): 0.0}).count("hsl(") == 2


def test_a_window_that_is_too_short_and_another_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError):
        needle(tmp_path / "x.svg", scorer(Reader(10), window=40))
    with pytest.raises(EvaluationError):
        parse_tasks(["needle=needle.png"])
    (task,), names = parse_tasks([f"needle={tmp_path}/x.svg"])
    assert (task.kind, task.name, names) == ("needle", "needle", [])
