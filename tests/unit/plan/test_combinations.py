"""The table of pairs is what the rules say today, and its features are turned on by their keys."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from neox.plan.rules import notes_without_effect
from tests.combinations import (
    FEATURES,
    IMPOSSIBLE,
    PAGE,
    TESTED,
    Verdict,
    all_pairs,
    page,
    plan_of,
    read_tested,
)
from tests.pairs_in_tests import TURNED_ON

ROOT = Path(__file__).parents[3]

found_pairs = functools.cache(all_pairs)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_each_feature_works_alone_and_has_an_effect(feature):
    plan = plan_of([feature])
    for note in notes_without_effect(plan.config):
        assert note.keys[0] not in feature.keys, note
    assert TURNED_ON[feature.name](plan), "the list of tests would not find it"


def test_the_page_is_current_and_its_verdicts_hold():
    """`python -m tests.combinations` writes the page again."""
    pairs = found_pairs()
    assert (ROOT / PAGE).read_text() == page(pairs, read_tested(ROOT / TESTED))
    verdicts = {frozenset(feature.name for feature in pair.features): pair.verdict for pair in pairs}
    for _, some, others in IMPOSSIBLE:
        for names in product(some, others):
            assert verdicts[frozenset(names)] is Verdict.IMPOSSIBLE, names
    assert verdicts[frozenset(("ZeRO 1", "ZeRO 2"))] is Verdict.ALTERNATIVES
    assert verdicts[frozenset(("ZeRO 3", "pipeline stages"))] is Verdict.REFUSED
    assert verdicts[frozenset(("windows", "latent attention"))] is Verdict.WORKS


def test_the_tests_of_pairs_exist_and_their_pairs_work():
    """`python -m tests.pairs_in_tests` finds them again, in the plans that they train."""
    verdicts = {frozenset(feature.name for feature in pair.features): pair.verdict for pair in found_pairs()}
    functions: dict[str, set[str]] = {}
    for names, test in read_tested(ROOT / TESTED).items():
        path, function = test.split("[")[0].split("::")
        if path not in functions:
            tree = ast.parse((ROOT / path).read_text())
            functions[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in functions[path], test
        assert verdicts[names] in (Verdict.WORKS, Verdict.ALTERNATIVES), names


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_tests_of_pairs_still_train_them():
    """In a process of its own, because it takes the place of what starts ranks."""
    command = [sys.executable, "-m", "tests.pairs_in_tests", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]
