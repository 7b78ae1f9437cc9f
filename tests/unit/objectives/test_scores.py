"""Totals and counts of scores: how parts of a step are combined, and what is reported of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neox.engine.micro_batches import LabelWeights
from neox.objectives import LOSS_NORMALIZATIONS, CausalLM, LinearCombination, ScoreTable, unpack_rows
from neox.objectives.scores import pack_scores
from neox.parallel import ParallelGrid

ANSWERS: Any = SimpleNamespace(
    names=("loss", "good", "bad", "margin", "least", "most"),
    reductions={"margin": LinearCombination({"good": 1.0, "bad": -1.0}), "least": "min", "most": "max"},
)


def part(table: ScoreTable, *rows: tuple[float, float]) -> torch.Tensor:
    scalars = [(torch.tensor(total), torch.tensor(count)) for total, count in rows]
    packed = pack_scores(torch.tensor(0.5), scalars)
    assert packed.shape == (1 + 2 * len(table.rows),)
    assert packed[0] == 0.5
    return unpack_rows(packed)


def test_parts_are_combined_and_divided_once() -> None:
    """As OpenRLHF PR 1336 shows it: batches of two pairs and one, with two and none right, give 2/3, not 1/2."""
    table = ScoreTable(ANSWERS)
    assert table.rows == ("loss", "good", "bad", "least", "most")
    none = table.empty()
    first = part(table, (3.0, 2.0), (2.0, 2.0), (0.0, 0.0), (-1.0, 2.0), (4.0, 2.0))
    second = part(table, (1.0, 1.0), (0.0, 1.0), (5.0, 1.0), (-3.0, 1.0), (2.0, 1.0))
    rows = table.combine(table.combine(none, first), table.combine(second, none))
    expected = {"loss": 4 / 3, "good": 2 / 3, "bad": 5.0, "margin": 2 / 3 - 5.0, "least": -3.0, "most": 4.0}
    assert table.finish(rows.tolist()) == pytest.approx(expected)
    assert list(table.finish(rows.tolist())) == list(ANSWERS.names)


def test_what_was_not_counted_has_no_number() -> None:
    table = ScoreTable(ANSWERS)
    assert table.finish(table.empty().tolist()) == dict.fromkeys(ANSWERS.names)
    only_good = part(table, (3.0, 2.0), (2.0, 2.0), (0.0, 0.0), (-1.0, 2.0), (4.0, 2.0))
    found = table.finish(table.combine(table.empty(), only_good).tolist())
    assert found["good"] == 1.0
    assert found["bad"] is None
    assert found["margin"] is None


@pytest.mark.parametrize("normalization", ["tokens", "micro_batch"])
def test_an_evaluation_is_a_mean_over_its_labels(normalization: str) -> None:
    """As torchtitan PR 4167 shows it: losses of 2 of one label, and of 90 of nine, give 9.2, not (2 + 10) / 2."""
    table = ScoreTable(CausalLM())
    weights = LabelWeights(LOSS_NORMALIZATIONS[normalization], "loss_mask", ParallelGrid.single())
    masks = (torch.tensor([[1.0] + [0.0] * 8]), torch.ones(1, 9))
    rows = table.empty()
    batches = iter([{"loss_mask": mask} for mask in masks])
    for batch, loss in zip(weights.of_evaluation(batches, 2), (2.0, 10.0), strict=True):
        mask = batch["loss_mask"]
        rows = table.combine(rows, unpack_rows(pack_scores((mask * loss).sum(), [((mask * loss).sum(), mask.sum())])))
    assert table.finish(rows.tolist()) == pytest.approx({"lm_loss": 9.2})
