"""Windows and batches: every token scored once, with the context it should have."""

import numpy as np
import pytest

from neox.errors import EvaluationError
from neox.evaluation.scoring import Span, rolling_windows, score_spans, windows
from tests.errors import raises_naming
from tests.unit.evaluation.table_model import TableModel


@pytest.mark.parametrize("size", [2, 3, 9, 10, 11, 12, 25, 31])
@pytest.mark.parametrize("stride", [1, 3, 9, 10])
def test_every_token_but_the_first_is_scored_once_in_order(size, stride):
    tokens = list(range(100, 100 + size))
    spans = list(windows(tokens, 10, stride))
    scored = [token for span in spans for token in span.tokens[span.first :]]
    assert scored == tokens[1:]
    assert all(len(span.tokens) <= 11 for span in spans)
    for span in spans[1:]:
        assert span.first >= 10 - stride + 1, "context of the window minus the stride"


@pytest.mark.parametrize("stride", [1, 3, 4])
def test_a_text_of_any_length_is_scored_once_after_a_context_of_several_tokens(stride):
    """Such as `[gMASK]<sop>`, which GLM's tokenizer writes before a text."""
    for size in range(2, 15):
        spans = list(rolling_windows(Span(range(size), 2), 4, stride))
        assert [token for span in spans for token in span.tokens[span.first :]] == list(range(2, size))
        assert all(len(span.tokens) <= 5 for span in spans)
        assert all(len(span.tokens) == 5 for span in spans[1:])


def test_without_overlap_windows_share_only_the_token_between_them():
    assert [tuple(span.tokens) for span in windows(range(8), 3, 3)] == [(0, 1, 2, 3), (3, 4, 5, 6), (6, 7)]


def test_windows_of_an_array_are_views_and_score_as_those_of_a_list():
    model, ids = TableModel(), np.arange(100, 140, dtype=np.uint16)
    spans = list(windows(ids, 10, 3))
    assert all(np.shares_memory(span.tokens, ids) for span in spans)
    assert score_spans(model, spans) == score_spans(model, list(windows(ids.tolist(), 10, 3)))


@pytest.mark.parametrize("stride", [0, 11])
def test_a_stride_that_would_skip_or_stand_still_is_refused(stride):
    with raises_naming(EvaluationError, "eval_stride"):
        list(windows(range(30), 10, stride))
    with raises_naming(EvaluationError, "eval_stride"):
        list(rolling_windows(Span(range(30), 1), 10, stride))


def test_scores_come_in_the_order_of_the_spans_whatever_the_batches():
    model = TableModel()
    spans = [
        Span(tuple(range(n, n + size)), first) for n, (size, first) in enumerate([(5, 1), (12, 4), (3, 2), (9, 1)])
    ]
    for batch_size in (1, 3, 8):
        scores = score_spans(model, spans, batch_size=batch_size)
        for span, score in zip(spans, scores, strict=True):
            assert score.log_probability == pytest.approx(model.total(list(span.tokens), span.first), abs=1e-4)
            assert score.count == len(span.tokens) - span.first


def test_greedy_means_every_scored_token_is_the_top_one():
    model = TableModel()
    best = model.log_probabilities.argmax(-1).tolist()
    a, b, c = 5, best[5], best[best[5]]
    wrong = (b + 1) % 300
    (all_right, last_right, none_right) = score_spans(
        model, [Span((9, a, b, c), 2), Span((a, wrong, best[wrong]), 1), Span((a, b, (c + 1) % 300), 2)]
    )
    assert all_right.greedy
    assert not last_right.greedy
    assert not none_right.greedy


def test_what_cannot_be_read_at_once_is_refused():
    with raises_naming(EvaluationError, "seq_length", 65, "max_position_embeddings", 64):
        score_spans(TableModel(), [Span(tuple(range(66)), 1)])


def test_nan_is_refused():
    model = TableModel()
    model.log_probabilities[7] = float("nan")
    with raises_naming(EvaluationError, "NaN"):
        score_spans(model, [Span((1, 7, 8), 1)])
