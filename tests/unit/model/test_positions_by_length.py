"""Rotary frequencies that depend on lengths go by each document, and in generation by the most tokens of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neox.data.batches import document_starts
from neox.evaluation.scoring import Span, score_spans
from neox.generation.load import runner_of_stage
from neox.model import GPT, Context
from neox.parallel import ParallelGrid
from tests.plans import problem_keys, small_plan

EOD = 0
LENGTHS = (5, 1, 7, 3)
SCALINGS: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 4},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 8.0, 20.0],
        "original_max_position_embeddings": 4,
    },
}


def network_of(kind: str) -> dict[str, Any]:
    return {"pos_emb": "rotary", "rotary_pct": 1.0, "head_dim": 8, "rope_scaling": SCALINGS[kind]}


def model_of(kind: str, **keys: Any) -> GPT:
    model = GPT(small_plan(**network_of(kind), **keys), ParallelGrid.single()).eval()
    with torch.no_grad():
        for block in model.stage.blocks:
            block.attention.query_key_value.weight.mul_(8.0)  # so that scores depend on positions
    return model


def tokens_of_a_row() -> torch.Tensor:
    row = torch.randint(1, 100, (1, 16), generator=torch.Generator().manual_seed(0))
    row[0, torch.tensor(LENGTHS[:-1]).cumsum(0) - 1] = EOD
    return row


@pytest.mark.parametrize("kind", SCALINGS)
@torch.no_grad()
def test_documents_in_a_row_have_the_frequencies_of_their_own_lengths(kind: str):
    model = model_of(kind)
    row = tokens_of_a_row()
    packed = model(row, Context(document_starts=document_starts(row, EOD)))
    alone = torch.cat([model(document) for document in row.split(LENGTHS, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-6, rtol=1e-5)
    unscaled = GPT(small_plan(pos_emb="rotary", rotary_pct=1.0, head_dim=8), ParallelGrid.single()).eval()
    unscaled.load_state_dict(model.state_dict())
    wanted = unscaled(row, Context(document_starts=document_starts(row, EOD)))
    short = torch.tensor([False] * 5 + [True] + [False] * 7 + [True] * 3)
    assert not torch.allclose(packed[:, ~short], wanted[:, ~short], atol=1e-4)
    if kind == "dynamic":  # LongRoPE also has a factor of cosines and sines
        torch.testing.assert_close(packed[:, short], wanted[:, short], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", SCALINGS)
@torch.no_grad()
def test_a_cache_has_the_frequencies_of_the_most_tokens_that_are_meant(kind: str):
    model = model_of(kind)
    row = tokens_of_a_row()[:, :6]
    cache = model.new_cache(1, 16)
    cache.longest = 6
    context = Context(cache=cache)
    steps = [model(row[:, :3], context), *(model(row[:, i : i + 1], context) for i in range(3, 6))]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(row), atol=1e-6, rtol=1e-5)


def test_factors_that_do_not_match_the_rotated_dimensions_are_refused():
    keys = small_plan(pos_emb="rotary", head_dim=8).config.to_flat()
    (found,) = problem_keys(**{**keys, "rotary_pct": 0.5, "rope_scaling": SCALINGS["longrope"]})
    assert "rope_scaling" in found


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_score_does_not_depend_on_other_texts_of_its_batch(kind):
    """unsloth PR 10681, mlx-lm PR 1855: padding would make short texts long ones."""
    model = model_of(kind)
    runner = runner_of_stage(small_plan(**network_of(kind)), model.stage, ParallelGrid.single(), torch.device("cpu"))
    spans = [Span(tuple(range(1, 1 + length)), 1) for length in (16, 3, 4, 9)]
    alone = score_spans(runner, spans, batch_size=1)
    together = score_spans(runner, spans, batch_size=4)
    assert [score.log_probability for score in together] == pytest.approx([score.log_probability for score in alone])
