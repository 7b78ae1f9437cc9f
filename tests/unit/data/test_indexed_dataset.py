"""`.bin/.idx` pairs: gpt-neox's bytes read and written, in bulk, resumed and merged."""

import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from neox.data import IndexedDataset, IndexedDatasetBuilder, best_dtype, merge_datasets
from neox.errors import DataError
from tests.errors import raises_naming

GOLDEN = Path(__file__).parents[2] / "golden" / "data" / "small_text_document"


def same_bytes(prefix, other=GOLDEN):
    return all(Path(f"{prefix}.{end}").read_bytes() == Path(f"{other}.{end}").read_bytes() for end in ("bin", "idx"))


def documents(dataset):
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_golden_data_is_read():
    data = IndexedDataset(GOLDEN)
    assert (len(data), data.num_documents, data.num_tokens, data.dtype) == (1648, 1648, 205143, np.uint16)
    assert all(data[i][-1] == 0 for i in range(len(data)))  # every document ends with <|endoftext|>
    for bad in (1648, -1):
        with pytest.raises(IndexError):
            data[bad]


def test_golden_bytes_are_written_in_bulk_one_by_one_and_merged(tmp_path):
    data = IndexedDataset(GOLDEN)
    with IndexedDatasetBuilder(tmp_path / "bulk", best_dtype(1000)) as builder:
        builder.add_documents(data.tokens.astype(np.int64), data.sizes)
        assert (builder.num_documents, builder.num_tokens, builder.progress["max_id"]) == (
            1648,
            205143,
            data.tokens.max(),
        )
    with IndexedDatasetBuilder(tmp_path / "single", np.uint16) as builder:
        for i in range(len(data)):
            builder.add_document(data[i])
    for name, part in (("a", range(0, 700)), ("b", range(700, 1648))):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            for i in part:
                builder.add_document(data[i].tolist())
    merge_datasets([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    assert all(same_bytes(tmp_path / name) for name in ("bulk", "single", "merged"))
    assert not list(tmp_path.glob("*.partial"))


def test_an_interrupted_build_continues_where_it_was(tmp_path):
    data = IndexedDataset(GOLDEN)
    builder = IndexedDatasetBuilder(tmp_path / "x", np.uint16)
    half = int(data.sizes[:800].sum())
    builder.add_documents(data.tokens[:half], data.sizes[:800])
    state = builder.state()
    builder.add_documents(data.tokens[half : half + 50], [20, 30])  # not part of the state: dropped when resuming
    with pytest.raises(ZeroDivisionError), builder:
        raise ZeroDivisionError
    assert not (tmp_path / "x.idx").exists()
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16, resume=state) as builder:
        builder.add_documents(data.tokens[half:], data.sizes[800:])
        assert builder.progress["max_id"] == data.tokens.max()
    assert builder.progress["crc32"] == zlib.crc32(Path(f"{GOLDEN}.bin").read_bytes())
    assert same_bytes(tmp_path / "x")
    with raises_naming(DataError, tmp_path / "x.bin.partial"):
        IndexedDatasetBuilder(tmp_path / "x", np.uint16, resume=state)


@pytest.mark.parametrize("impl", ["mmap", "cached"])
def test_files_joined_by_gpt_neox_have_no_documents(tmp_path, impl):
    """gpt-neox PR 855, Megatron-LM#81, NeMo Speech#9821: merge_datasets.py writes the document index [0].

    gpt-neox's datasets count sequences (`indexed_dataset.sizes`), so such files train as others do.
    """
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16, impl=impl) as builder:
        for document in ([1, 2], [3], [4, 5, 6]):
            builder.add_document(document)
    index = (tmp_path / "x.idx").read_bytes()
    place = 26 if impl == "mmap" else 48  # of the number of entries in the header
    assert index[place : place + 8] == (4).to_bytes(8, "little")
    (tmp_path / "x.idx").write_bytes(index[:place] + (1).to_bytes(8, "little") + index[place + 8 : -24])
    data = IndexedDataset(tmp_path / "x")
    assert documents(data) == [[1, 2], [3], [4, 5, 6]]
    assert data.num_documents == 3
    assert not data.has_sentences
    merge_datasets([tmp_path / "x", tmp_path / "x"], tmp_path / "twice")
    assert documents(IndexedDataset(tmp_path / "twice")) == [[1, 2], [3], [4, 5, 6]] * 2


@pytest.mark.parametrize("impl", ["mmap", "cached"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_every_layout_and_dtype_round_trips(tmp_path, impl, dtype):
    texts = [[1, 2, 3], [], [127], [5] * 10, []]
    with IndexedDatasetBuilder(tmp_path / "x", dtype, impl=impl) as builder:
        for text in texts:
            builder.add_document(text)
    data = IndexedDataset(tmp_path / "x", impl)
    assert (data.layout, data.dtype, documents(data)) == (impl, np.dtype(dtype), texts)


def test_an_empty_dataset_is_legal(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16):
        pass
    data = IndexedDataset(tmp_path / "x")
    assert (len(data), data.num_documents, data.num_tokens) == (0, 0, 0)
    merge_datasets([tmp_path / "x", GOLDEN], tmp_path / "y")
    assert same_bytes(tmp_path / "y")


def test_cached_layout_has_fairseqs_bytes(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", np.int32, impl="lazy") as builder:
        builder.add_documents(np.array([7, 8, 9]), [2, 1])
    header = np.array([1, 4, 4, 2, 2, 3], dtype="<u8").tobytes()
    arrays = np.array([0, 1, 2, 0, 2, 3, 2, 1, 0, 1, 2], dtype="<i8").tobytes()  # dimensions, offsets, sizes, documents
    assert (tmp_path / "x.idx").read_bytes() == b"TNTIDX\0\0" + header + arrays
    assert IndexedDataset(tmp_path / "x", "lazy").layout == "cached"
    with raises_naming(DataError, tmp_path / "x.idx", "data_impl"):
        IndexedDataset(tmp_path / "x", "mmap")


@pytest.mark.parametrize(
    ("ids", "lengths", "name"),
    [
        ([70000], [1], "70000"),
        ([-1], [1], "-1"),
        ([1, 2], [1], "1 for 2"),
        ([1, 2], [3, -1], "2 for 2"),
        ([1.5], [1], "float64"),
    ],
)
def test_ids_and_lengths_are_checked(tmp_path, ids, lengths, name):
    builder = IndexedDatasetBuilder(tmp_path / "x", np.uint16)
    with raises_naming(DataError, tmp_path / "x", name):
        builder.add_documents(np.array(ids), lengths)
    builder.discard()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    builder = IndexedDatasetBuilder(tmp_path / "x", np.uint16)
    builder.add_document([1, 2])
    monkeypatch.setattr("os.fsync", full)
    with raises_naming(DataError, tmp_path / "x", "No space left on device"):
        builder.finalize()
    assert not (tmp_path / "x.idx").exists()


def test_merging_refuses_what_does_not_go_together(tmp_path):
    for name, dtype, impl in (("a", np.uint16, "mmap"), ("b", np.int32, "mmap"), ("c", np.uint16, "cached")):
        with IndexedDatasetBuilder(tmp_path / name, dtype, impl=impl) as builder:
            builder.add_document([1])
    for other in ("b", "c"):
        with raises_naming(DataError, tmp_path / "a", tmp_path / other):
            merge_datasets([tmp_path / "a", tmp_path / other], tmp_path / "out")
    with raises_naming(DataError, tmp_path / "a"):
        merge_datasets([tmp_path / "a"], tmp_path / "a")
    with pytest.raises(DataError):
        merge_datasets([], tmp_path / "out")


def test_missing_data_names_the_command_that_makes_it(tmp_path):
    with raises_naming(DataError, tmp_path / "x.idx", tmp_path / "x.bin", "preprocess_data.py"):
        IndexedDataset(tmp_path / "x")
    (tmp_path / "x.bin").write_bytes(b"")
    (tmp_path / "x.idx").mkdir()
    with raises_naming(DataError, tmp_path / "x.idx"):
        IndexedDataset(tmp_path / "x")


def test_datasets_are_read_and_written_without_torch():
    modules = "neox.data, neox.preprocess, tools.dataset.command"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
