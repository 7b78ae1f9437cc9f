"""Rows of pairs of answers: what they hold, how full they are, and the pairs that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neox.config import NeoXConfig
from neox.config.sections.data import PackImpl
from neox.config.sections.preferences import SplitAnswers
from neox.data import IndexedDataset, IndexedDatasetBuilder
from neox.data.answer_pairs.answers import (
    AnswerFiles,
    AnswerPairs,
    JudgedAnswers,
    PreferencePairs,
    PromptAnswer,
    RewardPairs,
    desirable_answers,
    open_pairs,
)
from neox.data.answer_pairs.pair_rows import NO_SLOT, PreferenceDataset, layout_rows, pack_pairs
from neox.data.answer_pairs.reference_file import ReferenceIdentity, hash_of_pairs, read_reference, write_reference
from neox.data.pass_amounts import rows_of_epochs
from neox.data.token_files.indexed_dataset import IGNORED
from neox.errors import DataError
from neox.plan.report.data_lines import notes_on_data, preference_lines
from neox.preflight.data_amounts import read_amounts
from tests.errors import raises_naming
from tests.plans import small_plan


class Lengths(AnswerPairs):
    """Pairs of given numbers of positions, without tokens."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        self.sizes = np.array(sizes)

    def documents(self, number: int) -> tuple[PromptAnswer, PromptAnswer]:
        raise AssertionError(number)

    def name(self, number: int) -> str:
        return f"pair {number}"


def files(directory: Path, name: str, prompts: list[list[int]], answers: list[list[int]]) -> AnswerFiles:
    """Write documents with labels, and open them."""
    tokens = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    labels = [[IGNORED] * len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)]
    for suffix, documents in (("", tokens), ("_label", labels)):
        with IndexedDatasetBuilder(directory / f"{name}{suffix}", np.int32) as builder:
            builder.add_documents(np.concatenate(documents), list(map(len, documents)))
    return AnswerFiles([IndexedDataset(directory / name)], [IndexedDataset(directory / f"{name}_label")])


PROMPTS = [[1, 2], [3], [4, 5, 6]]
CHOSEN = [[11, 12], [13], [14, 15]]
REJECTED = [[21], [22, 23, 24], [25]]


@pytest.fixture
def pairs(tmp_path: Path) -> PreferencePairs:
    return PreferencePairs(files(tmp_path, "pos", PROMPTS, CHOSEN), files(tmp_path, "neg", PROMPTS, REJECTED))


def test_a_row_holds_whole_documents_apart() -> None:
    first = PromptAnswer(np.array([1, 2, 3, 4]), np.array([False, False, True, True]))
    second = PromptAnswer(np.array([1, 5]), np.array([False, True]))
    fields = layout_rows([[first, second], [second, second, second, first]], 8)
    assert fields["tokens"][0].tolist() == [1, 2, 3, 1, 0, 0, 0, 0]
    assert fields["labels"][0].tolist() == [2, 3, 4, 5, 0, 0, 0, 0]
    assert fields["document_starts"][0].tolist() == [0, 0, 0, 3, 4, 4, 4, 4]
    assert fields["slots"][0].tolist() == [0, 0, 0, 1, *[NO_SLOT] * 4]
    assert fields["in_answer"][0].tolist() == [0, 1, 1, 1, 0, 0, 0, 0]
    assert fields["pair_mask"].tolist() == [[1, 0], [1, 1]]
    assert fields["slots"][1].tolist() == [0, 1, 2, 3, 3, 3, NO_SLOT, NO_SLOT]


def test_a_row_of_scored_pairs_holds_the_last_tokens(tmp_path: Path) -> None:
    scored = RewardPairs(files(tmp_path, "pos", PROMPTS, CHOSEN), files(tmp_path, "neg", PROMPTS, REJECTED))
    assert scored.sizes.tolist() == [[4, 3], [2, 4], [5, 4]]
    fields = PreferenceDataset(scored, 3, 12, 1, impl="unpacked").fields([0, 1, 2])
    for tokens, ends in zip(fields["tokens"], fields["ends"], strict=True):
        assert (tokens[ends[0]], tokens[ends[1]]) in {(12, 21), (13, 24), (15, 25)}


def test_the_end_that_gpt_neox_marks_is_scored(tmp_path: Path) -> None:
    marked = []
    for name, answer in (("pos", [7, 0, 0]), ("neg", [8, 8, 0, 0])):
        opened = files(tmp_path, name, [[1, 2, *answer[:-1]]], [answer[-1:]])
        marked.append(opened)
    fields = PreferenceDataset(RewardPairs(*marked), 1, 16, 1).fields([0])
    assert fields["tokens"][0, :9].tolist() == [1, 2, 7, 0, 1, 2, 8, 8, 0]
    assert fields["ends"].tolist() == [[3, 8]]


@settings(max_examples=50)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=60),
    rows=st.integers(1, 40),
    impl=st.sampled_from(["packed", "pack_until_overflow", "unpacked"]),
    seed=st.integers(0, 1000),
)
def test_every_pass_reads_every_pair_once(sizes: list[tuple[int, int]], rows: int, impl: PackImpl, seed: int) -> None:
    pairs = Lengths(sizes)
    packed = pack_pairs(pairs, np.arange(len(pairs)), rows, 40, seed, impl)
    assert len(packed.starts) == rows + 1
    totals = pairs.sizes.sum(axis=1)
    for first, end in zip(packed.starts[:-1], packed.starts[1:], strict=True):
        assert 0 < totals[packed.pairs[first:end]].sum() <= 40
        assert impl != "unpacked" or end - first == 1
    counts = np.bincount(packed.pairs, minlength=len(pairs))
    whole_passes, rest = divmod(len(packed.pairs), len(pairs))
    assert counts.min() >= whole_passes - (rest > 0)
    assert counts.max() <= whole_passes + 1


def test_more_rows_leave_the_first_ones_as_they_are() -> None:
    pairs = Lengths([(number % 7 + 1, 3) for number in range(30)])
    few = pack_pairs(pairs, np.arange(30), 5, 20, 1, "packed")
    many = pack_pairs(pairs, np.arange(30), 50, 20, 1, "packed")
    assert many.pairs[: len(few.pairs)].tolist() == few.pairs.tolist()


def test_mixed_lengths_leave_little_padding() -> None:
    random = np.random.default_rng(2)
    pairs = Lengths([tuple(size) for size in random.integers(10, 200, (500, 2)).tolist()])
    packed = pack_pairs(pairs, np.arange(500), 100, 1024, 1, "packed")
    assert pairs.sizes[packed.pairs].sum() / (100 * 1024) > 0.95


def test_pairs_of_a_batch(pairs: PreferencePairs) -> None:
    reference = np.arange(6, dtype=np.float32).reshape(3, 2)
    dataset = PreferenceDataset(pairs, 2, 24, 1, reference=reference)
    fields = dataset.fields([0])
    order = dataset.numbers(0)
    assert sorted(order) == [0, 1, 2]
    assert fields["reference"][0].tolist() == reference[order].flatten().tolist()
    first = order[0]
    assert fields["labels"][0, : len(PROMPTS[first]) + len(CHOSEN[first]) - 1].tolist() == [
        *PROMPTS[first][1:],
        *CHOSEN[first],
    ]
    assert fields["in_answer"].sum() == sum(map(len, CHOSEN + REJECTED))


def test_bad_pairs_are_refused_by_name_or_left_out(tmp_path: Path) -> None:
    chosen = files(tmp_path, "pos", PROMPTS, [[11, 12], [13], [14] * 30])
    rejected = files(tmp_path, "neg", PROMPTS, [[11, 12], [22], [25]])
    pairs = PreferencePairs(chosen, rejected)
    with raises_naming(DataError, "2 of 3", "pos, document 0", "pos, document 2", "skip_bad_pairs"):
        PreferenceDataset(pairs, 2, 24, 1)
    dataset = PreferenceDataset(pairs, 2, 24, 1, skip_bad=True)
    assert set(dataset.row_pairs.pairs.tolist()) == {1}
    with raises_naming(DataError, "no pair"):
        PreferenceDataset(pairs, 2, 1, 1, skip_bad=True)


def test_pairs_need_as_many_answers_of_both_kinds(tmp_path: Path) -> None:
    with raises_naming(DataError, 3, 2):
        PreferencePairs(files(tmp_path, "pos", PROMPTS, CHOSEN), files(tmp_path, "neg", PROMPTS[:2], REJECTED[:2]))


def test_judged_answers_follow_their_prompt_with_the_answer_before(tmp_path: Path) -> None:
    answers = files(tmp_path, "pos", PROMPTS, CHOSEN)
    judged = JudgedAnswers(answers, np.array([True, False, True]), 24)
    own, mismatched = judged.documents(0)
    assert own.ids.tolist() == [1, 2, 11, 12]
    assert mismatched.ids.tolist() == [1, 2, 14, 15]
    assert mismatched.in_answer.tolist() == [False, False, True, True]
    assert judged.documents(1)[1].ids.tolist() == [3, 11, 12]
    assert judged.sizes.tolist() == [[3, 3], [1, 2], [4, 3]]
    short = JudgedAnswers(answers, np.array([True, False, True]), 5)
    assert short.documents(0)[1].ids.tolist() == [1, 2, 14]
    assert short.problem(2, 5) is not None


def test_rewards_say_which_answers_are_good(tmp_path: Path) -> None:
    for name, rewards in (("rewards", [[1, 1], [-1], [2]]), ("mixed", [[1, -1], [1], [1]])):
        with IndexedDatasetBuilder(tmp_path / name, np.int32) as builder:
            builder.add_documents(np.concatenate(rewards), list(map(len, rewards)))
    assert desirable_answers(AnswerFiles([IndexedDataset(tmp_path / "rewards")], [None])).tolist() == [1, 0, 1]
    with raises_naming(DataError, "mixed, document 0"):
        desirable_answers(AnswerFiles([IndexedDataset(tmp_path / "mixed")], [None]))


def write_floats(prefix: Path, rewards: list[list[float]], width: int) -> IndexedDataset:
    """Write floating-point rewards as gpt-neox does, and open them."""
    with IndexedDatasetBuilder(prefix, np.int32 if width == 4 else np.int64) as builder:
        builder.add_documents(np.zeros(sum(map(len, rewards)), np.int64), list(map(len, rewards)))
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    index[17] = 6  # the code of the dtype, after the magic bytes and the version
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(np.concatenate(rewards).astype(f"<f{width}").tobytes())
    return IndexedDataset(prefix, floats=True)


@pytest.mark.parametrize("width", [4, 8])
def test_rewards_may_be_floats_and_one_for_each_answer(tmp_path: Path, width: int) -> None:
    files(tmp_path, "pos", PROMPTS, CHOSEN)
    write_floats(tmp_path / "rewards", [[0.25], [-0.5], [1.5]], width)
    paths = (str(tmp_path / "pos"),)
    labels = (str(tmp_path / "pos_label"),)
    answers = SplitAnswers("train", paths, labels, None, None, (str(tmp_path / "rewards"),))
    pairs = open_pairs(answers, 24, IndexedDataset, lambda prefix: IndexedDataset(prefix, floats=True))
    assert pairs.desirable is not None
    assert pairs.desirable.tolist() == [True, False, True]
    with raises_naming(DataError, tmp_path / "rewards.idx"):
        open_pairs(answers, 24, IndexedDataset, IndexedDataset)
    unknown = AnswerFiles([write_floats(tmp_path / "unknown", [[1.0], [float("nan")]], width)], [None])
    with raises_naming(DataError, "unknown, document 1"):
        desirable_answers(unknown)


def test_a_reference_belongs_to_its_weights_and_data(tmp_path: Path, pairs: PreferencePairs) -> None:
    path = tmp_path / "pos.base.reference.npz"
    identity = ReferenceIdentity("weights", hash_of_pairs(pairs), "fp32")
    assert read_reference(path, identity) is None
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    write_reference(path, values, identity)
    assert np.array_equal(read_reference(path, identity), values)
    for other in (
        ReferenceIdentity("others", identity.data, "fp32"),
        ReferenceIdentity("weights", "other", "fp32"),
        ReferenceIdentity("weights", identity.data, "bf16"),
    ):
        with raises_naming(DataError, path):
            read_reference(path, other)
    swapped = files(tmp_path, "swapped", PROMPTS, [CHOSEN[1], CHOSEN[0], CHOSEN[2]])
    assert hash_of_pairs(PreferencePairs(swapped, swapped)) != identity.data
    path.write_bytes(b"PK")
    with raises_naming(DataError, path):
        read_reference(path, identity)


def test_rows_of_passes_are_those_that_a_run_reads(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    prompts = [[1] * length for length in random.integers(1, 9, 40)]
    answers = [[number + 2] * length for number, length in enumerate(random.integers(1, 9, 40))]
    others = [[number + 3] * length for number, length in enumerate(random.integers(1, 9, 40))]
    pairs = PreferencePairs(files(tmp_path, "pos", prompts, answers), files(tmp_path, "neg", prompts, others))
    keys = {f"{side}_train_data_paths": [str(tmp_path / side)] for side in ("pos", "neg")}
    keys |= {f"{side}_train_label_data_paths": [str(tmp_path / f"{side}_label")] for side in ("pos", "neg")}
    config = NeoXConfig.from_flat({"train_impl": "dpo", "seed": 3, **keys})
    rows = rows_of_epochs(config, 64, 2)
    dataset = PreferenceDataset(pairs, rows, 64, 3)
    assert np.bincount(dataset.row_pairs.pairs).tolist() == [2] * 40
    assert rows_of_epochs(config, 64, 0.5) in (rows // 4, rows // 4 + 1)


def test_the_plan_says_how_often_pairs_are_read(tmp_path: Path) -> None:
    """Ten pairs, one in a row: 25 steps of two rows read each five times."""
    prompts = [[1, 2]] * 10
    keys: dict[str, Any] = {"train_impl": "dpo", "pack_impl": "unpacked", "train_micro_batch_size_per_gpu": 2}
    for side, token in (("pos", 3), ("neg", 4)):
        files(tmp_path, side, prompts, [[token]] * 10)
        keys[f"{side}_train_data_paths"] = [str(tmp_path / side)]
        keys[f"{side}_train_label_data_paths"] = [str(tmp_path / f"{side}_label")]

    def planned(steps: int) -> tuple[str, list[str]]:
        plan = small_plan(**{**keys, "train_iters": steps})
        plan = replace(plan, amounts=read_amounts(plan.config).amounts)
        return " ".join(preference_lines(plan)), notes_on_data(plan)

    line, (note,) = planned(25)
    assert "50 rows of pairs, 10 in a pass (5 passes)" in line
    assert "read 5 times" in note
    line, notes = planned(15)
    assert "(3 passes)" in line
    assert notes == []
