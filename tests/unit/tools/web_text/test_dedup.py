"""Duplicates and near-duplicates: what is found, what is kept, resumes, limits."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.web_text import run_step
from tools.web_text.dedup import DEDUP, DedupSettings
from tools.web_text.document_index import IndexChunk
from tools.web_text.near_duplicates import UnionFind
from tools.web_text.signatures import band_hashes, bands_for, similarity

sys.path.append(str(Path(__file__).parent))
real: Any = importlib.import_module("real_texts")


def dedup(source: Path | list[Path], output: Path, **settings: Any) -> dict[str, Any]:
    inputs = tuple(source) if isinstance(source, list) else (source,)
    return run_step(DEDUP, DedupSettings(input=inputs, output=output, **settings))


def similar_pairs(texts: list[str], threshold: float) -> set[tuple[int, int]]:
    """All pairs of at least this similarity, by comparing all pairs."""
    sets = [frozenset(text[i : i + 5] for i in range(len(text) - 4)) for text in texts]
    pairs = set()
    for (i, a), (j, b) in itertools.combinations(enumerate(sets), 2):
        if min(len(a), len(b)) >= threshold * max(len(a), len(b)):
            both = len(a & b)
            if both >= threshold * (len(a) + len(b) - both):
                pairs.add((i, j))
    return pairs


def groups_of(pairs: set[tuple[int, int]], count: int) -> list[int]:
    """The first document of each document's group."""
    roots = list(range(count))
    for i, j in sorted(pairs):
        a, b = sorted((roots[i], roots[j]))
        roots = [a if root == b else root for root in roots]
    return roots


@pytest.mark.parametrize(
    ("threshold", "limit"), [(0.9, 250), *(pytest.param(t, None, marks=pytest.mark.slow) for t in (0.5, 0.7, 0.9))]
)
def test_recall_and_precision_against_all_pairs(tmp_path: Path, threshold: float, limit: int | None) -> None:
    texts = real.with_copies(seed=11, size=700, most_edits=round(60 * (1 - threshold)), limit=limit)
    pairs = similar_pairs(texts, threshold)
    expected = groups_of(pairs, len(texts))
    report = dedup(real.write(tmp_path / "in.jsonl", texts), tmp_path / "out.jsonl", threshold=threshold)
    kept = real.kept_numbers(tmp_path / "out.jsonl")
    gone = {d["document"]: d["kept"] for d in map(json.loads, (tmp_path / "dropped" / "out.jsonl").open())}
    true = {number for number, root in enumerate(expected) if root != number}
    assert len(true) > 80
    assert all(expected[number] == expected[choice] for number, choice in gone.items())
    assert len(true & gone.keys()) >= 0.98 * len(true)
    assert gone.keys() <= true
    assert sorted([*kept, *gone]) == list(range(len(texts)))
    assert report["documents_out"] == len(kept)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_recall_of_pairs_at_the_threshold(seed: int) -> None:
    rng = random.Random(seed)
    pairs = [(text, real.edited(text, rng.randrange(9), rng)) for text in real.passages(900)]
    pairs = [(a, b) for a, b in pairs if 0.9 <= similarity(a, b) < 1]
    bands = bands_for(0.9)
    first, second = (band_hashes(list(side), bands, seed) for side in zip(*pairs, strict=True))
    assert len(pairs) > 150
    assert np.mean((first == second).any(axis=1)) >= 0.98


@pytest.mark.parametrize("settings", [{"workers": 2}, {"memory_mb": 16}])
def test_same_bytes_for_any_workers_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, int]
) -> None:
    source = real.write(tmp_path / "in.jsonl", real.with_copies(seed=2, size=2000, most_edits=12))
    dedup(source, tmp_path / "one.jsonl.zst")
    for name in ("FEW_DOCUMENTS", "FEW_CANDIDATES"):
        monkeypatch.setattr(f"tools.web_text.near_duplicates.{name}", 0)
    if "memory_mb" in settings:
        monkeypatch.setattr("tools.web_text.near_duplicates._BYTES_PER_DOCUMENT", 1 << 17)  # several ranges
    dedup(source, tmp_path / "other.jsonl.zst", **settings)
    assert (tmp_path / "one.jsonl.zst").read_bytes() == (tmp_path / "other.jsonl.zst").read_bytes()
    dropped = tmp_path / "dropped"
    assert (dropped / "one.jsonl.zst").read_bytes() == (dropped / "other.jsonl.zst").read_bytes()


class Stop(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize(
    "place", ["index", "links", *(pytest.param(p, marks=pytest.mark.slow) for p in ("candidates", "texts", "writing"))]
)
def test_an_interrupted_run_continues_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    source = real.write(tmp_path / "in.jsonl", real.with_copies(seed=4, size=2500, most_edits=8) * 2)
    dedup(source, tmp_path / "whole.jsonl")
    monkeypatch.setattr("neox.resume.SECONDS_BETWEEN_STATES", 0)
    read: list[int] = []

    def stopping(function: Any, at: int) -> Any:
        calls = itertools.count()

        def wrapper(*arguments: Any, **named: Any) -> Any:
            if next(calls) == at:
                raise Stop
            return function(*arguments, **named)

        return wrapper

    targets: dict[str, tuple[str, int]] = {
        "index": ("tools.web_text.document_index.IndexChunk.__call__", 1),
        "candidates": ("tools.web_text.near_duplicates.FindCandidates.__call__", 5),
        "texts": ("tools.web_text.near_duplicates.SelectTexts.__call__", 1),
        "links": ("tools.web_text.near_duplicates.UnionFind.join", 40),
        "writing": ("tools.web_text.dedup.WriteChunk.__call__", 1),
    }
    name, at = targets[place]
    module, attribute = name.rsplit(".", 2)[0], name.rsplit(".", 2)[1:]
    owner = getattr(sys.modules[module], attribute[0])
    with monkeypatch.context() as patch:
        patch.setattr(name, stopping(getattr(owner, attribute[1]), at))
        with pytest.raises(Stop):
            dedup(source, tmp_path / "stopped.jsonl")
    assert not (tmp_path / "stopped.jsonl").exists()
    call = IndexChunk.__call__
    monkeypatch.setattr(IndexChunk, "__call__", lambda work, chunk: read.append(1) or call(work, chunk))
    report = dedup(source, tmp_path / "stopped.jsonl")
    assert (tmp_path / "stopped.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(read) == (2 if place == "index" else 0)  # one of two chunks, and the end of the file
    assert report["documents_in"] == source.read_text().count("\n")
    assert not (tmp_path / "stopped.jsonl.work").exists()


def test_longest_exact_and_against(tmp_path: Path) -> None:
    rng = random.Random(1)
    base, other = real.passages(1500, 2)
    longer = base + " and some more words"
    texts = [base, other, longer, base, real.edited(other, 1, rng)]
    source = real.write(tmp_path / "in.jsonl", texts)
    out = tmp_path / "out.jsonl"
    assert dedup(source, out)["dropped"]["exact duplicate"][0] == 1
    assert real.kept_numbers(out) == [0, 1]
    dedup(source, out, keep="longest")
    assert real.kept_numbers(out) == [2, max(1, 4, key=lambda n: len(texts[n]))]
    dedup(source, out, exact=True)
    assert real.kept_numbers(out) == [0, 1, 2, 4]
    held = real.write(tmp_path / "held.jsonl", ["something else entirely, and short", texts[4]])
    for keep in ("first", "longest"):
        report = dedup(source, out, against=(held,), keep=keep)
        assert real.kept_numbers(out) == [0 if keep == "first" else 2]
        assert report["documents_in"] == 5
        assert report["bytes_in"] == sum(len(text.encode()) for text in texts)
    held.write_text(json.dumps({"text": base}) + "\n")
    assert dedup(source, out, against=(held,))["fresh"]
    assert real.kept_numbers(out) == [1]


def test_duplicates_across_files_and_numbers(tmp_path: Path) -> None:
    texts = real.passages(1200, 12)
    files = [real.write(tmp_path / f"{n}.jsonl", texts[4 * n : 4 * n + 8]) for n in range(2)]
    report = dedup(files, tmp_path / "out.jsonl")
    assert report["documents_in"] == 16
    assert [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").open()] == texts


def test_min_accepts_what_union_refuses(tmp_path: Path) -> None:
    text = real.passages(3000, 1)[0]
    source = real.write(tmp_path / "in.jsonl", [text, text[: round(0.88 * len(text))]])
    assert similarity(text, text[: round(0.88 * len(text))]) < 0.9
    counts = [
        dedup(source, tmp_path / f"{kind}.jsonl", similarity=kind, threshold=0.9)["documents_out"]
        for kind in ("union", "max", "min")
    ]
    assert counts == [2, 2, 1]


def test_one_gram_repeated_is_one_large_group(tmp_path: Path) -> None:
    texts = ["a" * n for n in range(5, 605)]
    report = dedup(real.write(tmp_path / "in.jsonl", texts), tmp_path / "out.jsonl")
    assert report["documents_out"] == 1
    assert report["details"]["groups"]["documents_of_the_largest"] == 600


def test_a_large_group_of_unlike_documents_is_compared_with_representatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparisons: list[int] = []
    texts = real.passages(300, 60)
    monkeypatch.setattr(
        IndexChunk, "_hashes", lambda work, texts, bands: np.full((len(texts), bands.count), 7, dtype=np.uint64)
    )
    compare = importlib.import_module("tools.web_text.near_duplicates")._NgramSets.similarity
    monkeypatch.setattr(
        "tools.web_text.near_duplicates._NgramSets.similarity",
        lambda *arguments: comparisons.append(1) or compare(*arguments),
    )
    report = dedup(real.write(tmp_path / "in.jsonl", texts), tmp_path / "out.jsonl")
    bands = report["details"]["bands"]
    assert len(comparisons) <= 16 * len(texts) * bands
    assert report["details"]["unlike_representatives"] == (len(texts) - 16) * bands
    assert report["documents_out"] == len(texts)


def test_long_documents_are_compared_exactly_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("document_index", "near_duplicates"):
        monkeypatch.setattr(f"tools.web_text.{module}.LONGEST", 1000)
    text = "".join(real.passages(1500, 1))
    source = real.write(tmp_path / "in.jsonl", [text, text + "!", text, text[:900], text[:899]])
    report = dedup(source, tmp_path / "out.jsonl")
    assert report["details"]["too_long_to_compare"] == 3
    assert real.kept_numbers(tmp_path / "out.jsonl") == [0, 1, 3]


def test_roots_are_the_first_documents_of_their_clusters(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.arange(500, dtype=np.uint32).tofile(tmp_path / "firsts")
    forest, pairs = UnionFind(tmp_path / "roots", tmp_path / "firsts"), rng.integers(0, 500, (300, 2)).tolist()
    for a, b in pairs:
        forest.join(a, b)
    forest.flatten()
    assert np.fromfile(tmp_path / "roots", np.uint32).tolist() == groups_of({(a, b) for a, b in pairs}, 500)


def test_empty_inputs(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n")
    assert dedup(source, tmp_path / "out.jsonl.zst", skip_bad=1)["documents_out"] == 0
