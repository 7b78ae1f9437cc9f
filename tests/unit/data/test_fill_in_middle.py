"""Fill in the middle: the parts of a rearranged document, the choice of documents, and batches that can be repeated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from neox.config.sections.data import DataConfig
from neox.data import GPTDataset, IndexedDataset, IndexedDatasetBuilder
from neox.data.batches import BatchIterator
from neox.data.run_datasets import DatasetFactory, SampleCounts
from neox.data.samples.fill_in_middle import FillInMiddle, FimTokens
from neox.errors import DataError
from neox.tokenizer import Tokenizer, build_tokenizer, train_tokenizer
from tests.errors import raises_naming

GOLDEN = Path(__file__).parents[2] / "golden" / "data"
NAMES = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
TOKENS = FimTokens(1001, 1002, 1003, 0)
SEQ = 64


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The golden data's tokenizer with tokens for fill in the middle."""
    state = json.loads((GOLDEN / "tokenizer.json").read_text())
    for number, name in enumerate(NAMES, start=1000):
        state["added_tokens"].append({**state["added_tokens"][0], "id": number, "content": name})
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(state))
    return build_tokenizer("HFTokenizer", path)


def rearrangement(**changes: object) -> FillInMiddle:
    values = {"tokens": TOKENS, "rate": 1.0, "spm_rate": 0.5, "level": "document", "seed": 1, **changes}
    return FillInMiddle(**values)  # type: ignore[arg-type]


def parts_of(ids: list[int], tokens: FimTokens = TOKENS) -> tuple[list[int], list[int], list[int], bool]:
    """Return prefix, middle and suffix of a rearranged document, and whether its order is SPM, by hand."""
    assert ids[0] == tokens.prefix
    suffix = ids.index(tokens.suffix)
    middle = ids.index(tokens.middle)
    if suffix == 1:
        return [], ids[middle + 1 :], ids[2:middle], True
    return ids[1:suffix], ids[middle + 1 :], ids[suffix + 1 : middle], False


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_a_document_keeps_its_length_and_its_end(spm_rate: float) -> None:
    ids = np.arange(100, 140)
    shapes = set()
    for entry in range(200):
        *content, end = rearrangement(spm_rate=spm_rate).document(np.append(ids, 0), entry).tolist()
        assert end == 0
        if content == ids.tolist():  # nearly all of it would be the middle
            continue
        prefix, middle, suffix, is_spm = parts_of(content)
        text = prefix + middle + suffix
        assert text == list(range(text[0], text[0] + 37))
        assert text[0] == 100 or not suffix  # room for special tokens: first the suffix, then the prefix
        assert is_spm == bool(spm_rate) or not prefix
        shapes.add((len(prefix), len(middle)))
    assert len(shapes) > 30


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_texts_are_divided_between_characters(tokenizer: Tokenizer, spm_rate: float) -> None:
    text = "def naïve(日本):\n    return 'something else entirely' + 日本 * 12345\n" * 3
    ids = np.asarray(tokenizer.encode(text), dtype=np.uint16)
    tokens = FimTokens.of(tokenizer, None)
    assert tokens == (1000, 1001, 1002, 0)
    inside_words = 0
    for entry in range(100):
        made = rearrangement(tokens=tokens, spm_rate=spm_rate, tokenizer=tokenizer).document(ids, entry)
        assert len(made) == len(ids)
        parts = parts_of(made.tolist(), tokens)
        prefix, middle, suffix = (tokenizer.decode(part) for part in parts[:3])
        if suffix:
            assert text.startswith(prefix + middle + suffix.rstrip("\ufffd"))  # the end may be cut inside a character
            assert len(text) - len(prefix + middle + suffix) < 40
        inside_words += (prefix + middle)[-1:].isalpha() and suffix[:1].isalpha()
    assert inside_words > 20


def test_rates() -> None:
    ids = np.arange(100, 150)
    made = [rearrangement(rate=0.3, spm_rate=0.25).document(ids, entry) for entry in range(2000)]
    changed = [row for row in made if row[0] == TOKENS.prefix]
    assert len(changed) / 2000 == pytest.approx(0.3, abs=0.04)
    assert np.mean([row[1] == TOKENS.suffix for row in changed]) == pytest.approx(0.25 + 0.75 / 51, abs=0.06)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5])
def test_short_documents_stay_or_are_only_special_tokens(size: int) -> None:
    ids = np.arange(100, 100 + size)
    for entry in range(50):
        made = rearrangement().document(ids, entry).tolist()
        if made != ids.tolist():
            prefix, middle, suffix, _ = parts_of(made)
            assert len(prefix) + len(middle) + len(suffix) == size - 3


@pytest.fixture
def data(tmp_path: Path) -> IndexedDataset:
    """Documents of 5 to 120 tokens, which end with 0."""
    random = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        for size in random.integers(5, 120, size=60).tolist():
            builder.add_document([*random.integers(10, 1000, size=size - 1).tolist(), 0])
    return IndexedDataset(tmp_path / "x")


def test_documents_that_fit_into_a_sample_are_rearranged_as_a_whole(data: IndexedDataset) -> None:
    plain = GPTDataset(data, range(60), 40, SEQ, seed=1)
    fim = rearrangement(rate=0.7)
    dataset = GPTDataset(data, range(60), 40, SEQ, seed=1, fill_in_middle=fim)
    numbers = np.arange(dataset.num_samples)
    np.testing.assert_array_equal(dataset.maps.shuffle_map, plain.maps.shuffle_map)
    stream = []
    for entry, document in enumerate(dataset.maps.document_map.tolist()):
        ids = data[document]
        stream.append(fim.document(ids, entry) if len(ids) <= SEQ + 1 else ids)
    whole = np.concatenate(stream)
    rows = dataset.read(numbers)
    starts = dataset.maps.shuffle_map * SEQ
    np.testing.assert_array_equal(rows, np.stack([whole[start : start + SEQ + 1] for start in starts.tolist()]))
    np.testing.assert_array_equal(dataset.read_labels(numbers), rows)
    np.testing.assert_array_equal(rows == 0, plain.read(numbers) == 0)


def test_parts_of_documents_in_a_sample_are_rearranged(data: IndexedDataset) -> None:
    plain = GPTDataset(data, range(60), 40, SEQ, seed=1)
    dataset = GPTDataset(data, range(60), 40, SEQ, seed=1, fill_in_middle=rearrangement(level="sample"))
    numbers = np.arange(dataset.num_samples)
    rows = dataset.read(numbers)
    before = plain.read(numbers)
    np.testing.assert_array_equal(rows == 0, before == 0)
    for row, old in zip(rows, before, strict=True):
        ends = np.flatnonzero(old == 0) + 1
        for part, old_part in zip(np.split(row, ends), np.split(old, ends), strict=True):
            content = part[part != 0].tolist()
            if content != old_part[old_part != 0].tolist():
                prefix, middle, suffix, _ = parts_of(content)
                assert len(prefix) + len(middle) + len(suffix) == len(content) - 3
            else:
                assert len(content) < 40
    assert (rows == TOKENS.middle).sum() > dataset.num_samples
    np.testing.assert_array_equal(dataset.read(numbers[::-3]), rows[::-3])  # a function of the sample


def test_batches_resume_and_depend_on_the_seed(data: IndexedDataset) -> None:
    def batches(seed: int, **options: int) -> BatchIterator:
        fim = rearrangement(level="sample", seed=seed)
        return BatchIterator(GPTDataset(data, range(60), 40, SEQ, seed=1, fill_in_middle=fim), 2, **options)

    whole = batches(1, num_workers=0)
    first, *_, fifth = [next(whole) for _ in range(5)]
    assert (first["tokens"][:, 1:] == first["labels"][:, :-1]).all()
    resumed = batches(1, num_workers=2, start=4)
    assert (next(resumed)["tokens"] == fifth["tokens"]).all()
    resumed.close()
    assert (next(batches(2, num_workers=0))["tokens"] != first["tokens"]).any()


def test_only_training_is_rearranged_at_the_rate_of_each_dataset(data: IndexedDataset) -> None:
    prefixes = (data.prefix, data.prefix)
    config = DataConfig(train_data_paths=prefixes, valid_data_paths=prefixes, fim_rate=(1.0, 0.0))
    assert config.fim_rates == (1.0, 0.0)
    factory = DatasetFactory(
        config, seq_length=SEQ, seed=1, vocab_size=1004, fill_in_middle=[rearrangement(level="sample"), None]
    )
    sets = factory.datasets(SampleCounts(40, 20, 0))
    assert sets.train is not None
    assert sets.valid is not None
    rows = sets.train.read(np.arange(40))
    chosen = sets.train.dataset_index[:40]  # type: ignore[union-attr]
    assert (rows[chosen == 0] == TOKENS.middle).any()
    assert not (rows[chosen == 1] >= TOKENS.prefix).any()
    assert not (sets.valid.read(np.arange(20)) >= TOKENS.prefix).any()


def test_ids_that_the_file_cannot_hold_are_read(data: IndexedDataset) -> None:
    tokens = FimTokens(70_000, 70_001, 70_002, 0)
    for level in ("document", "sample"):
        dataset = GPTDataset(data, range(60), 40, SEQ, seed=1, fill_in_middle=rearrangement(tokens=tokens, level=level))
        assert dataset.read(np.arange(20)).max() == 70_002


def test_tokenizers_that_do_not_serve_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    plain = build_tokenizer("HFTokenizer", GOLDEN / "tokenizer.json")
    with raises_naming(DataError, "fim_tokens", "<fim_prefix>"):
        FillInMiddle.of(DataConfig(fim_rate=0.5), 0.5, plain, 1)
    with raises_naming(DataError, "<a>"):
        FillInMiddle.of(DataConfig(fim_rate=0.5, fim_tokens=("<a>", "<b>", "<c>")), 0.5, tokenizer, 1)
    assert FillInMiddle.of(DataConfig(), 0.0, plain, 1) is None
    (path,) = train_tokenizer(["the cat sat"] * 20, 60, tmp_path / "vocab.txt", "wordpiece")
    words = build_tokenizer("BertWordPieceCase", path)
    names = ("[CLS]", "[SEP]", "[MASK]")
    with raises_naming(DataError, "fim_split: tokens"):
        FillInMiddle.of(DataConfig(fim_rate=0.5, fim_tokens=names), 0.5, words, 1)
    data = DataConfig(fim_rate=0.5, fim_tokens=names, fim_split="tokens")
    assert FillInMiddle.of(data, 0.5, words, 1) is not None
