"""The table of pairs is what the rules say today, and its features are turned on by their keys."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from neox.plan.combinations import FEATURES, IMPOSSIBLE, PAGE, Verdict, all_pairs, page, plan_of
from neox.plan.rules import notes_without_effect

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_each_feature_works_alone_and_has_an_effect(feature):
    plan = plan_of([feature])
    for note in notes_without_effect(plan.config):
        assert note.keys[0] not in feature.keys, note


def test_the_page_is_current_and_its_verdicts_hold():
    """`python -m neox.plan.combinations` writes the page again."""
    pairs = all_pairs()
    assert (ROOT / PAGE).read_text() == page(pairs)
    verdicts = {frozenset(feature.name for feature in pair.features): pair.verdict for pair in pairs}
    for _, some, others in IMPOSSIBLE:
        for names in product(some, others):
            assert verdicts[frozenset(names)] is Verdict.IMPOSSIBLE, names
    assert verdicts[frozenset(("ZeRO 1", "ZeRO 2"))] is Verdict.ALTERNATIVES
    assert verdicts[frozenset(("ZeRO 3", "pipeline stages"))] is Verdict.REFUSED
    assert verdicts[frozenset(("windows", "latent attention"))] is Verdict.WORKS
