"""Samples of masked language modelling: runs of sentences, pairs, and masked tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from neox.config.sections.data import DataConfig
from neox.data import BlendedDataset, IndexedDataset, IndexedDatasetBuilder, merge_datasets
from neox.data.batches import MaskedBatchIterator
from neox.data.masked.masked_batch import MaskedLMBatch
from neox.data.masked.masking import MaskingVocabulary, mask_tokens
from neox.data.masked.sentence_pairs import SentencePairDataset, SentencePairSettings, shorten
from neox.data.run_datasets import DatasetFactory, Masking, SampleCounts
from neox.errors import DataError
from tests.errors import raises_naming

PAD, CLS, SEP, MASK, SIZE = 0, 2, 3, 4, 1000
FIRST = 10  # of the ids of text; those from 500 on continue a word
VOCABULARY = MaskingVocabulary(CLS, SEP, MASK, PAD, SIZE, np.arange(SIZE) >= 500)
SETTINGS = SentencePairSettings(64, 10, "nsp", 0.15, 0.1, whole_words=False)


def corpus(prefix: Path, documents: int = 60, seed: int = 0) -> IndexedDataset:
    """Write documents of 0 to 12 sentences of 1 to 40 ids."""
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16, sentences=True) as builder:
        for _ in range(documents):
            sizes = random.integers(1, 40, size=random.integers(0, 12))
            builder.add_documents(random.integers(FIRST, SIZE, size=int(sizes.sum())), sizes, [len(sizes)])
    return IndexedDataset(prefix)


def dataset(indexed: IndexedDataset, samples: int = 200, seed: int = 1, **changes: object) -> SentencePairDataset:
    settings = replace(SETTINGS, **changes)
    return SentencePairDataset(indexed, range(indexed.num_documents), samples, settings, VOCABULARY, seed)


def restored(fields: dict[str, np.ndarray]) -> np.ndarray:
    """Return tokens [n, S] with the masked ones put back."""
    tokens = fields["tokens"].copy()
    for row, positions, ids, weights in zip(
        tokens, fields["masked_positions"], fields["masked_ids"], fields["masked_weights"], strict=True
    ):
        row[positions[weights > 0]] = ids[weights > 0]
    return tokens


@pytest.mark.parametrize("pairs", ["nsp", "sop", None])
@pytest.mark.parametrize("seed", [0, 1])
def test_samples_are_sentences_of_the_corpus(tmp_path: Path, pairs: str | None, seed: int) -> None:
    indexed = corpus(tmp_path / "data", seed=seed)
    made = dataset(indexed, pairs=pairs, seed=seed)
    fields = made.split_rows(made.read(np.arange(made.num_samples)))
    text, tokens = indexed.tokens.astype(">i2").tobytes(), restored(fields)
    labels = fields["next_sentence"]
    for row, types, length in zip(tokens, fields["token_types"], fields["lengths"], strict=True):
        assert row[0] == CLS
        assert row[length - 1] == SEP
        assert not row[length:].any()
        assert not types[length:].any()
        inner = row[1 : length - 1]
        parts = [inner] if pairs is None else np.split(inner, [int(np.argmax(inner == SEP))])
        assert (types[:length] == 1).sum() == (0 if pairs is None else len(parts[1]))
        for part in parts:
            ids = part[part != SEP]
            assert len(ids)
            assert ids.astype(">i2").tobytes() in text
    if pairs is None:
        assert not labels.any()
    else:
        assert 0.35 < labels.mean() < 0.65


def test_every_sentence_is_read_once_a_pass(tmp_path: Path) -> None:
    indexed = corpus(tmp_path / "data")
    made = dataset(indexed, pairs=None, short_share=0.3)
    sentences = np.concatenate([np.arange(first, stop) for first, stop, _ in made.runs])
    assert np.array_equal(np.sort(sentences), np.arange(len(indexed)))
    pairs = dataset(indexed)
    assert all(stop - first >= 2 for first, stop, _ in pairs.runs)
    documents = np.repeat(np.arange(indexed.num_documents), np.diff(indexed.document_index))
    assert all(documents[first] == documents[stop - 1] == document for first, stop, document in pairs.runs)


def test_samples_follow_from_seed_and_number(tmp_path: Path) -> None:
    indexed = corpus(tmp_path / "data")
    one, other = dataset(indexed), dataset(indexed, samples=1000)
    count = len(one.runs)
    rows = one.read(np.arange(count))
    assert np.array_equal(rows[[5]], one.read([5]))  # alone, and among others
    assert np.array_equal(rows, other.read(np.arange(count)))  # a longer run begins alike
    assert not np.array_equal(rows, dataset(indexed, seed=2).read(np.arange(count)))
    cached = [
        SentencePairDataset(indexed, range(60), 200, SETTINGS, VOCABULARY, 1, tmp_path / "maps") for _ in range(2)
    ]
    for made in cached:
        assert np.array_equal(rows, made.read(np.arange(count)))
    second = other.read(np.arange(count, 2 * count))
    assert not np.array_equal(rows, second)  # the next pass has another order, and masks other tokens


@pytest.mark.parametrize("whole_words", [False, True])
def test_masked_tokens(whole_words: bool) -> None:
    random, kept, replaced, shares = np.random.default_rng(3), [], [], []
    for _ in range(300):
        tokens = random.integers(FIRST, SIZE, size=100)
        tokens[[0, 60, 99]] = CLS, SEP, SEP
        masked = mask_tokens(tokens, VOCABULARY, random, share=0.15, most=20, whole_words=whole_words)
        positions = masked.positions
        assert (np.diff(positions) > 0).all()
        assert not {0, 60, 99} & set(positions.tolist())
        assert np.array_equal(masked.ids, tokens[positions])
        rest = np.setdiff1d(np.arange(100), positions)
        assert np.array_equal(masked.tokens[rest], tokens[rest])
        changed = masked.tokens[positions]
        replaced.append((changed == MASK).mean())
        kept.append((changed == masked.ids).mean())
        shares.append(len(positions))
        if whole_words:
            words = np.cumsum(~(VOCABULARY.continues[tokens] & ~np.isin(np.arange(100), [0, 60, 61, 99, 1])))
            chosen = np.isin(np.arange(100), positions)
            assert all(len(set(chosen[words == word])) == 1 for word in np.unique(words[chosen]))
    assert np.mean(replaced) == pytest.approx(0.8, abs=0.02)
    assert np.mean(kept) == pytest.approx(0.1, abs=0.02)
    assert max(shares) == 15
    assert np.mean(shares) > 14


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_shortened_to_the_room(seed: int) -> None:
    random = np.random.default_rng(seed)
    parts = [np.arange(size) for size in random.integers(1, 80, size=random.integers(1, 3))]
    before, room = [part.copy() for part in parts], int(random.integers(2, 100))
    shorten(parts, room, random)
    assert sum(map(len, parts)) == min(room, sum(map(len, before)))
    for part, whole in zip(parts, before, strict=True):
        assert len(part)
        assert np.array_equal(part, np.arange(part[0], part[0] + len(part)))
        assert part[-1] <= whole[-1]


def test_batches_of_ranks_and_blends(tmp_path: Path) -> None:
    first, second = (dataset(corpus(tmp_path / name, seed=seed)) for seed, name in enumerate("ab"))
    blend = BlendedDataset([first, second], [0.7, 0.3])
    alone = MaskedBatchIterator(first.split_rows, blend, 4, num_workers=0, vocab_size=SIZE)
    ranks = [
        MaskedBatchIterator(first.split_rows, blend, 2, dp_rank=rank, dp_size=2, num_workers=0) for rank in range(2)
    ]
    for _ in range(5):
        whole, parts = next(alone), [next(rank) for rank in ranks]
        assert tuple(whole) == MaskedLMBatch._fields
        assert whole["masked_weights"].dtype.is_floating_point
        for name, field in whole.items():
            assert (np.concatenate([part[name] for part in parts]) == field.numpy()).all()


def test_merged_corpora_are_their_documents(tmp_path: Path) -> None:
    parts = [corpus(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    merge_datasets([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    merged = IndexedDataset(tmp_path / "c")
    assert merged.num_documents == sum(part.num_documents for part in parts)
    assert np.array_equal(merged.tokens, np.concatenate([part.tokens for part in parts]))
    counts = [np.diff(part.document_index) for part in parts]
    assert np.array_equal(np.diff(merged.document_index), np.concatenate(counts))


def test_documents_without_pairs_are_refused(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        builder.add_documents(np.arange(20), [10, 10])
    with raises_naming(DataError, tmp_path / "data", "--split-sentences"):
        dataset(IndexedDataset(tmp_path / "data"))


def test_validation_sets_with_names(tmp_path: Path) -> None:
    corpus(tmp_path / "data")
    prefix = str(tmp_path / "data")
    data = DataConfig(train_data_paths=(prefix,), valid_data_paths={"first": prefix, "second": {"path": prefix}})
    masking = Masking(SETTINGS, VOCABULARY)
    sets = DatasetFactory(data, seq_length=64, seed=1, vocab_size=SIZE, masking=masking).datasets(
        SampleCounts(10, 10, 0)
    )
    assert list(sets.validation_sets) == ["first", "second"]
    for found in sets.validation_sets.values():
        assert isinstance(found, SentencePairDataset)
        assert MaskedBatchIterator(found.split_rows, found, 2, num_workers=0).read(0)["tokens"].shape == (2, 64)


def test_another_document_is_never_the_same_one(tmp_path: Path) -> None:
    """One document holds nearly all runs, so ten draws often find no other one; then one of the others is taken."""
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16, sentences=True) as builder:
        for document, sentences in enumerate((2, 300, 2)):
            ids = np.full(10 * sentences, FIRST + document)
            builder.add_documents(ids, np.full(sentences, 10), [sentences])
    made = dataset(IndexedDataset(tmp_path / "data"), samples=400)
    fields = made.split_rows(made.read(np.arange(made.num_samples)))
    tokens = restored(fields)
    labels = fields["next_sentence"]
    for row, types, length, label in zip(tokens, fields["token_types"], fields["lengths"], labels, strict=True):
        second = types[:length] == 1
        ids_of_first = {*row[:length][~second].tolist()} - {CLS, SEP}
        ids_of_second = {*row[:length][second].tolist()} - {SEP}
        assert (ids_of_first != ids_of_second) == bool(label)
    assert 0.35 < labels.mean() < 0.65


def test_next_sentence_prediction_needs_two_documents(tmp_path: Path) -> None:
    """With one document, half of the pairs would have the label of another document, whatever they hold."""
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16, sentences=True) as builder:
        builder.add_documents(np.full(400, FIRST), np.full(40, 10), [40])
    indexed = IndexedDataset(tmp_path / "data")
    with raises_naming(DataError, "sentence_pairs", "one document"):
        dataset(indexed)
    assert len(dataset(indexed, pairs="sop")) > 0
    assert len(dataset(indexed, pairs=None)) > 0
