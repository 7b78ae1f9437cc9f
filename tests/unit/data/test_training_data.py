"""Training data over stages, interruptions and changes: every sample is read as often as planned, and in one order."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neox.data import IndexedDatasetBuilder
from neox.data.mixtures import passes
from neox.data.mixtures.ledger import DatasetRecord, after_skipping
from neox.data.run_data import DataIterators, build_data_iterators
from neox.plan import RunPlan
from neox.plan.batches.dataset_shares import shares_of_stages
from neox.tokenizer import build_tokenizer
from tests.plans import SIZES, plan_of

TOKENIZER = build_tokenizer("CharLevelTokenizer", None)
NAMES = ("a", "b", "c")
TOKENS = (6000, 3000, 1500)
STEPS = 60


@pytest.fixture(autouse=True)
def small_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_LANE_TOKENS", 700)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three datasets. A token tells its dataset and place: dataset n has ids from n * 10,000 on, each once."""
    path = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for number, (name, tokens) in enumerate(zip(NAMES, TOKENS, strict=True)):
        cuts = np.sort(random.choice(np.arange(1, tokens), size=tokens // 40, replace=False))
        sizes = np.diff(np.concatenate([[0], cuts, [tokens]]))
        with IndexedDatasetBuilder(path / name, np.int32) as builder:
            builder.add_documents(np.arange(tokens) + number * 10_000, sizes)
    return path


def run_of(folder: Path, ranks: int = 1, **keys: Any) -> RunPlan:
    paths = [str(folder / name) for name in NAMES]
    defaults = {"train_data_paths": paths, "train_iters": STEPS, "eval_iters": 0, "num_workers": 0}
    return plan_of(ranks, 40_000, **{**SIZES, **defaults, **keys})


def open_run(plan: RunPlan, steps: int = 0, ledger: Mapping[str, Any] | None = None, **options: Any) -> DataIterators:
    return build_data_iterators(plan, consumed_iterations=steps, tokenizer=TOKENIZER, ledger=ledger, **options)


def saved(data: DataIterators, steps: int) -> dict[str, Any]:
    assert data.ledger_at is not None
    ledger: dict[str, Any] = json.loads(json.dumps(data.ledger_at(steps)))
    return ledger


def batches_of(data: DataIterators, plan: RunPlan, first: int, last: int) -> list[np.ndarray]:
    """Return the tokens of the micro batches of steps."""
    found = []
    for _ in range(first, last):
        for _ in range(plan.batch.gradient_accumulation_steps):
            found.append(next(data.train)["tokens"].numpy())
    return found


def read_counts(batches: list[np.ndarray]) -> np.ndarray:
    """Return how often each token was an input, by dataset [3, 10,000]."""
    counts = np.zeros(40_000, dtype=int)
    for batch in batches:
        np.add.at(counts, batch.ravel(), 1)
    return counts.reshape(4, 10_000)[:3]


def random_stages(random: np.random.Generator) -> list[dict[str, Any]]:
    starts = np.sort(random.choice(np.arange(1, STEPS), size=random.integers(1, 4), replace=False)).tolist()
    stages: list[dict[str, Any]] = []
    for start in (0, *starts):
        stage: dict[str, Any] = {"start_step": start} if start else {}
        stage["seq_length"] = int(random.choice([8, 13, 32]))
        weights = random.integers(0, 4, size=3)
        stage["weights"] = [float(weight) for weight in (weights if weights.any() else [1, 0, 0])]
        stages.append(stage)
    return stages


@pytest.mark.parametrize("seed", range(12))
def test_stages_read_what_is_planned_with_and_without_interruptions(folder: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    plan = run_of(folder, data_stages=random_stages(random), gas=int(random.integers(1, 3)))
    whole = batches_of(open_run(plan), plan, 0, STEPS)
    pieces: list[np.ndarray] = []
    ledger = None
    step = 0
    while step < STEPS:
        stop = min(STEPS, step + int(random.integers(1, 30)))
        data = open_run(plan, step, ledger)
        pieces += batches_of(data, plan, step, stop)
        ledger = saved(data, stop)
        step = stop
    assert all(np.array_equal(one, other) for one, other in zip(whole, pieces, strict=True))
    counts = read_counts(whole)
    planned = shares_of_stages(plan.config, plan.batch_schedule, TOKENS)
    for number, tokens in enumerate(TOKENS):
        wanted = sum(reading.tokens * reading.shares[number] for reading in planned)
        lengths = sum(reading.mixture.seq_length for reading in planned)
        assert abs(counts[number].sum() - wanted) <= lengths  # whole samples
        passes = counts[number].sum() / tokens
        assert counts[number].max() <= np.ceil(passes) + 1
        record = [entry for key, entry in ledger["records"].items() if key == ledger["mixture"]["datasets"][number]]
        assert sum(length * samples for length, samples in record[0]["reads"]) == counts[number].sum()


@pytest.mark.parametrize("seed", range(8))
def test_changed_weights_datasets_and_lengths_repeat_nothing(folder: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    batches: list[np.ndarray] = []
    ledger = None
    step = 0
    while step < 36:
        stop = step + int(random.integers(1, 12))
        chosen = random.permutation(3)[: random.integers(1, 4)]
        keys: dict[str, Any] = {"train_data_paths": [str(folder / NAMES[number]) for number in chosen]}
        weights = [float(weight) for weight in random.integers(1, 5, size=len(chosen))]
        if random.random() < 0.5:
            keys["data_stages"] = [{"weights": weights, "seq_length": int(random.choice([8, 16, 32]))}]
        else:
            keys |= {"train_data_weights": weights, "seq_length": int(random.choice([16, 32]))}
        plan = run_of(folder, **keys, train_iters=STEPS + seed)
        data = open_run(plan, step, ledger)
        batches += batches_of(data, plan, step, stop)
        ledger = saved(data, stop)
        step = stop
    counts = read_counts(batches)
    for number, tokens in enumerate(TOKENS):
        passes = counts[number].sum() / tokens
        # What documents leave over when another length cuts them is read in the next pass only.
        assert counts[number].max() <= np.ceil(passes) + 1


def test_an_ordinary_run_goes_on_in_its_order_and_a_changed_one_after_it(folder: Path) -> None:
    plan = run_of(folder, train_data_weights=[2, 1, 1])
    data = open_run(plan)
    whole = batches_of(data, plan, 0, STEPS)
    ledger = saved(data, 20)
    same = open_run(plan, 20, ledger)
    assert all(np.array_equal(*pair) for pair in zip(batches_of(same, plan, 20, 25), whole[20:25], strict=True))
    changed = run_of(folder, train_data_weights=[1, 1, 6])
    other = open_run(changed, 20, ledger)
    rest = batches_of(other, changed, 20, 50)
    counts = read_counts([*whole[:20], *rest])
    assert counts[2].sum() / (32 * 2 * 50) > 0.5
    assert counts[0].max() == counts[1].max() == 1  # less than one pass of each
    later = open_run(changed, 35, saved(other, 35))
    assert all(np.array_equal(*pair) for pair in zip(batches_of(later, changed, 35, 50), rest[15:], strict=True))
    back = open_run(plan, 50, saved(other, 50))
    counts += read_counts(batches_of(back, plan, 50, 55))
    assert counts[0].max() == 1


def test_a_dataset_that_returns_was_not_forgotten(folder: Path) -> None:
    alone = [run_of(folder, train_data_paths=[str(folder / name)]) for name in ("a", "b", "a")]
    ledger = None
    batches: list[np.ndarray] = []
    for number, plan in enumerate(alone):
        data = open_run(plan, 20 * number, ledger)
        batches += batches_of(data, plan, 20 * number, 20 * number + 20)
        ledger = saved(data, 20 * number + 20)
    assert read_counts(batches).max() == 1


def test_a_changed_batch_skips_and_repeats_nothing(folder: Path) -> None:
    small = run_of(folder, train_data_paths=[str(folder / "a")])
    data = open_run(small)
    batches = batches_of(data, small, 0, 20)
    large = run_of(folder, train_data_paths=[str(folder / "a")], gas=2)
    batches += batches_of(open_run(large, 20, saved(data, 20)), large, 20, 40)
    counts = read_counts(batches)[0]
    assert counts.sum() == 20 * 2 * 32 + 20 * 4 * 32
    assert counts.max() == 1


def test_ranks_read_one_stream(folder: Path, tmp_path: Path) -> None:
    stages = [{"weights": [1, 1, 0], "seq_length": 16}, {"start_step": 4, "weights": [0, 1, 3]}]
    plan = run_of(folder, data_stages=stages, train_iters=8)
    alone = batches_of(open_run(plan, cache_dir=tmp_path), plan, 0, 8)
    two = plan_of(
        2, 40_000, **{**plan.config.to_flat(), "train_micro_batch_size_per_gpu": 1, "train_batch_size": None, "gas": 1}
    )
    ranks = [open_run(two, cache_dir=tmp_path, dp_rank=rank) for rank in range(2)]
    for batch in alone:
        parts = [next(data.train)["tokens"].numpy() for data in ranks]
        np.testing.assert_array_equal(np.concatenate(parts), batch)
    assert {batch.shape[1] for batch in alone} == {16, 32}


def steps_of_ranks(
    folder: Path, cache: Path, ranks: int, first: int, last: int, ledger: Mapping[str, Any] | None
) -> tuple[list[np.ndarray], DataIterators]:
    """Return the samples of each step, sorted, that some data ranks read of batches of 4, and the first rank's data."""
    keys = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "train_data_weights": [4, 2, 1]}
    plan = run_of(folder, ranks, **keys)
    data = [open_run(plan, first, ledger, cache_dir=cache, dp_rank=rank) for rank in range(ranks)]
    found = []
    for step in range(first, last):
        tokens = np.concatenate([batch for each in data for batch in batches_of(each, plan, step, step + 1)])
        found.append(tokens[np.argsort(tokens[:, 0])])
    return found, data[0]


def test_each_sample_is_read_once_or_skipped_over_shrinking_rollback_and_growing(folder: Path, tmp_path: Path) -> None:
    undisturbed, _ = steps_of_ranks(folder, tmp_path, 2, 0, 24, None)
    # Two ranks are killed in step 8, after the checkpoint of step 6. One rank goes on.
    killed, data = steps_of_ranks(folder, tmp_path, 2, 0, 8, None)
    shrunk, data = steps_of_ranks(folder, tmp_path, 1, 6, 14, saved(data, 6))
    # Step 14 is a spike: back to the checkpoint of step 12. Then four ranks go on from the checkpoint of step 16.
    ledger = after_skipping(saved(data, 12), saved(data, 14))
    after, data = steps_of_ranks(folder, tmp_path, 1, 12, 17, ledger)
    grown, data = steps_of_ranks(folder, tmp_path, 4, 16, 24, saved(data, 16))
    np.testing.assert_array_equal(killed[6:], shrunk[:2])  # what is trained again
    np.testing.assert_array_equal(after[4:], grown[:1])
    trained = [*killed[:6], *shrunk[:6], *after[:4], *grown]
    skipped = shrunk[6:]
    np.testing.assert_array_equal(np.concatenate([*trained[:12], *skipped]), np.concatenate(undisturbed[:14]))
    counts = read_counts([*trained, *skipped])
    assert counts.max() == 1
    assert counts.sum() == (24 + 2) * 4 * 32
    read = [DatasetRecord.from_json(record).tokens for record in saved(data, 24)["records"].values()]
    assert sorted(read) == sorted(counts.sum(axis=1))


def test_what_has_changed_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = run_of(folder)
    data = open_run(plan)
    ledger = saved(data, 20)
    ledgers = {
        "skipped": (plan, after_skipping(saved(data, 18), ledger), 18),
        "mixture": (run_of(folder, train_data_weights=[1, 1, 6]), ledger, 20),
        "batch": (run_of(folder, gas=2, train_iters=STEPS // 2), ledger, 20),
    }
    caplog.set_level("INFO", "neox.data.mixtures.training_order")
    for word, (changed, found, steps) in ledgers.items():
        caplog.clear()
        open_run(changed, steps, found)
        (line,) = [
            record.getMessage() for record in caplog.records if record.name == "neox.data.mixtures.training_order"
        ]
        assert [each for each in ledgers if each in line] == [word]


def test_labels_and_fill_in_middle_follow_their_tokens(folder: Path, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("x", "x_label")]
    ids = np.arange(2000) % 300 + 5
    for path, values in zip(paths, (ids, np.where(ids % 3, -100, ids)), strict=True):
        with IndexedDatasetBuilder(path, np.int32) as builder:
            builder.add_documents(values, [100] * 20)
    keys = {"train_data_paths": paths[:1], "train_label_data_paths": paths[1:], "data_stages": [{}], "train_iters": 10}
    plan = run_of(folder, **keys)
    batch = next(open_run(plan).train)
    counted = batch["loss_mask"] > 0
    assert 0.2 < counted.float().mean() < 0.5
    assert (batch["labels"][:, :-1][counted[:, :-1]] == batch["tokens"][:, 1:][counted[:, :-1]]).all()


def test_datasets_by_size_and_with_limits(folder: Path) -> None:
    by_size = run_of(folder, train_data_temperature=1)
    counts = read_counts(batches_of(open_run(by_size), by_size, 0, STEPS)).sum(axis=1)
    np.testing.assert_allclose(counts / counts.sum(), np.array(TOKENS) / sum(TOKENS), atol=0.02)
    limited = run_of(folder, data_stages=[{}], train_data_max_passes=[9, 9, 0.5])
    counts = read_counts(batches_of(open_run(limited), limited, 0, STEPS)).sum(axis=1)
    assert abs(counts[2] - 750) <= 32
    assert abs(int(counts[0]) - int(counts[1])) <= 32


def test_a_ledger_does_not_depend_on_where_files_are(folder: Path, tmp_path: Path) -> None:
    plan = run_of(folder, train_data_paths=[str(folder / "a")])
    data = open_run(plan)
    batches = batches_of(data, plan, 0, 20)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"moved{suffix}").write_bytes((folder / f"a{suffix}").read_bytes())
    moved = run_of(folder, train_data_paths=[str(tmp_path / "moved"), str(folder / "b")])
    batches += batches_of(open_run(moved, 20, saved(data, 20)), moved, 20, 60)
    assert read_counts(batches)[0].max() == 1


def test_a_stage_without_a_ledger_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = run_of(folder, data_stages=[{}])
    open_run(plan, 10)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    ledger = saved(open_run(plan), 10)
    newer = copy.deepcopy(ledger) | {"version": 99}
    open_run(plan, 10, newer)
    assert [record.levelname for record in caplog.records].count("WARNING") == 2
