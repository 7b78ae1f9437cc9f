"""From a configuration to iterators: gpt-neox's counts and positions, and data that does not belong to the run."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from neox.config.sections.data import DataConfig
from neox.config.sections.training import TrainingConfig
from neox.data import BlendedDataset, IndexedDataset, IndexedDatasetBuilder, Sidecar, read_sidecar, write_sidecar
from neox.data.batches import BatchIterator
from neox.data.run_data import build_data_iterators, sample_counts
from neox.data.run_datasets import DatasetFactory, SampleCounts
from neox.errors import ConfigError, DataError
from neox.plan import config_from_files, resolve
from neox.tokenizer import build_tokenizer
from tests.errors import raises_naming

GOLDEN = Path(__file__).parents[2] / "golden"
RUN = GOLDEN / "v2_pp1_mp1_dp1_fp32" / "v2_pp1_mp1_dp1_fp32.yml"
SIDECAR = Sidecar("HFTokenizer", "abc", 50, 0, True, 30, 300, 49)
RUN_SIZES = {"seq_length": 8, "seed": 1, "vocab_size": 50}


def golden_plan(*overrides):
    files = [f"data_path={GOLDEN}/data/small_text_document", f"vocab_file={GOLDEN}/data/tokenizer.json"]
    return resolve(config_from_files([RUN], overrides=[*files, *overrides]), 1, 1000)


@pytest.fixture
def prefix(tmp_path):
    """30 documents of 10 tokens, ids below 50."""
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_documents(np.arange(300) % 50, [10] * 30)
    return str(tmp_path / "x")


def test_counts_are_neoxs():
    def counts(train_batch_size, **keys):
        return sample_counts(TrainingConfig(**{"eval_order": "gpt-neox", **keys}), train_batch_size)

    assert counts(8, train_iters=30, eval_interval=1000, eval_iters=2) == SampleCounts(240, 16, 16)
    assert counts(4, train_iters=100, eval_interval=50, eval_iters=10) == SampleCounts(400, 120, 40)
    assert counts(4, train_iters=100, eval_interval=50, eval_iters=10, eval_at_start=True).valid == 160
    assert counts(4, train_iters=100, eval_interval=50, eval_iters=10, eval_order="fixed").valid == 40


@pytest.mark.parametrize("at_start", [False, True])
def test_iterators_resume_where_they_were(tmp_path, at_start):
    keys = ("eval_interval=3", "eval_iters=2", "train_iters=9", "num_workers=0", "eval_order=gpt-neox")
    plan = golden_plan(*keys, f"eval_at_start={at_start}")
    undisturbed = build_data_iterators(plan, cache_dir=tmp_path)
    train = [next(undisturbed.train) for _ in range(18)]  # two micro batches an iteration
    valid = [next(undisturbed.valid[0].batches) for _ in range(16)]  # four an evaluation
    resumed = build_data_iterators(plan, consumed_iterations=7, cache_dir=tmp_path)
    assert (next(resumed.train)["tokens"] == train[14]["tokens"]).all()
    done = 8 + 4 * at_start
    assert (next(resumed.valid[0].batches)["tokens"] == valid[done]["tokens"]).all()
    assert (next(resumed.test[0].batches)["tokens"] == next(undisturbed.test[0].batches)["tokens"]).all()


def test_validation_sets_with_names_are_read_one_by_one(prefix, tmp_path):
    data = DataConfig(
        train_data_paths=(prefix,),
        valid_data_paths={"first": prefix, "second": {"path": prefix, "weight": 3.0, "labels": prefix}},
    )
    sets = DatasetFactory(data, **RUN_SIZES).datasets(SampleCounts(10, 20, 0))
    assert sets.valid is None
    assert list(sets.validation_sets) == ["first", "second"]
    assert all(item.num_samples >= 20 for item in sets.validation_sets.values())
    assert [item.has_labels for item in sets.validation_sets.values()] == [False, True]
    assert not DatasetFactory(data, **RUN_SIZES).datasets(SampleCounts(10, 0, 0)).validation_sets


def test_iterators_of_validation_sets_have_names_and_weights(tmp_path):
    path = f"{GOLDEN}/data/small_text_document"
    named = f"{{a: {path}, b: {{path: {path}, weight: 2}}}}"
    plan = golden_plan(
        "data_path=null", f"train_data_paths=[{path}]", f"valid_data_paths={named}", "eval_iters=2", "train_iters=9"
    )
    first, second = build_data_iterators(plan, cache_dir=tmp_path).valid
    assert [(item.name, item.weight) for item in (first, second)] == [("a", 1.0), ("b", 2.0)]
    assert (next(first.batches)["tokens"] == next(second.batches)["tokens"]).all()


def test_exactly_enough_data_is_read_without_beginning_again(prefix, caplog):
    """299 tokens and one more are 37 samples of 8: the last of them exists too, where gpt-neox stops short of it."""
    sets = DatasetFactory(DataConfig(data_path=prefix, split="1"), **RUN_SIZES).datasets(SampleCounts(37, 0, 0))
    iterator = BatchIterator(sets.train, 1, num_workers=0)
    for _ in range(37):
        next(iterator)
    assert not caplog.records
    assert iterator.position == len(sets.train) + 1 == 37


@pytest.mark.parametrize(("split", "said"), [("95,5,0", False), ("100", False), ("98,1,1", True)])
def test_a_part_without_documents_is_said_if_it_was_asked_for(prefix, caplog, split, said):
    sets = DatasetFactory(DataConfig(data_path=prefix, split=split), **RUN_SIZES).datasets(SampleCounts(8, 0, 8))
    assert sets.test is None
    assert ("leaves none for test" in caplog.text) is said


def test_no_evaluation_reads_no_data(tmp_path):
    iterators = build_data_iterators(golden_plan("eval_iters=0"), cache_dir=tmp_path)
    assert iterators.valid == iterators.test == ()


def test_golden_data_with_its_sidecar_is_accepted_and_with_anothers_refused(tmp_path):
    data, prefix = IndexedDataset(GOLDEN / "data" / "small_text_document"), tmp_path / "x"
    with IndexedDatasetBuilder(prefix, data.dtype) as builder:
        builder.merge(data.prefix)
    tokenizer = build_tokenizer("HFTokenizer", GOLDEN / "data" / "tokenizer.json")
    sidecar = Sidecar(
        "HFTokenizer",
        tokenizer.content_hash,
        tokenizer.vocab_size,
        tokenizer.eod,
        True,
        1648,
        205143,
        builder.progress["max_id"],
    )
    write_sidecar(prefix, sidecar)
    assert read_sidecar(prefix) == sidecar
    plan = golden_plan(f"data_path={prefix}")
    assert build_data_iterators(plan).train is not None
    assert (tmp_path / "index_maps").is_dir()
    write_sidecar(prefix, dataclasses.replace(sidecar, tokenizer_hash="another"))
    with raises_naming(DataError, prefix, "vocab_file"):
        build_data_iterators(plan)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"tokenizer_hash": "other"}, ("other", "vocab_file")),
        ({"documents": 29}, ("x.json", 29, 30)),
        ({"max_id": 50}, ("token id 50", "vocab_file")),
        ({"format": 2}, ("x.json", "format 2")),
    ],
)
def test_data_that_does_not_fit_the_run_is_refused(prefix, change, names):
    write_sidecar(prefix, SIDECAR)
    factory = DatasetFactory(DataConfig(data_path=prefix), **RUN_SIZES, tokenizer_hashes=["abc"])
    factory.datasets(SampleCounts(5, 0, 0))
    write_sidecar(prefix, dataclasses.replace(SIDECAR, **change))
    with raises_naming(DataError, *names):
        DatasetFactory(DataConfig(data_path=prefix), **RUN_SIZES, tokenizer_hashes=["abc"]).datasets(
            SampleCounts(5, 0, 0)
        )


@pytest.mark.parametrize("text", ["", "[]", "{", '{"tokens": 3}', '{"format": 1, "unknown": 2}'])
def test_a_damaged_sidecar_is_refused(prefix, text):
    Path(f"{prefix}.json").write_text(text)
    with raises_naming(DataError, f"{prefix}.json"):
        read_sidecar(prefix)


def test_a_new_dataset_drops_the_old_sidecar(prefix):
    write_sidecar(prefix, SIDECAR)
    assert json.loads(Path(f"{prefix}.json").read_text())["tokens"] == 300
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document([1])
    assert read_sidecar(prefix) is None


def test_blends_by_weight_and_by_documents(prefix, tmp_path):
    with IndexedDatasetBuilder(tmp_path / "y", np.uint16) as builder:
        builder.add_documents(np.arange(900) % 50, [10] * 90)
    paths = (prefix, str(tmp_path / "y"))
    data = DataConfig(
        train_data_paths=paths, valid_data_paths=paths[:1], train_data_weights=(3.0, 1.0), mmap_warmup=True
    )
    sets = DatasetFactory(data, **RUN_SIZES).datasets(SampleCounts(100, 10, 10))
    assert isinstance(sets.train, BlendedDataset)
    assert np.bincount(sets.train.dataset_index[:100]).tolist() == [75, 25]
    assert sets.test is None
    data = data.model_copy(update={"weight_by_num_documents": True, "weighted_sampler_alpha": 1.0})
    by_documents = DatasetFactory(data, **RUN_SIZES).datasets(SampleCounts(100, 10, 10)).train
    assert np.bincount(by_documents.dataset_index[:100]).tolist() == [50, 50]  # 0.25 * 0.75 and 0.75 * 0.25
    data = data.model_copy(update={"weight_by_num_documents": False, "train_data_weights": (1.0,)})
    with raises_naming(DataError, "train_data_weights", "train_data_paths"):
        DatasetFactory(data, **RUN_SIZES).datasets(SampleCounts(100, 10, 10))


def test_no_data_path_and_no_documents_to_train_on(prefix, tmp_path):
    with raises_naming(DataError, "data_path", "preprocess_data.py"):
        DatasetFactory(DataConfig(), **RUN_SIZES).datasets(SampleCounts(5, 0, 0))
    with raises_naming(ConfigError, "split"):
        golden_plan("split=0,1,1")
