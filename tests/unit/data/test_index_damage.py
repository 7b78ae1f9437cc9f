"""Damaged `.idx` and `.bin`: one clear DataError each, never a crash or silent acceptance of wrong structure."""

import struct
from pathlib import Path

import numpy as np
import pytest

from neox.data import IndexedDataset, IndexedDatasetBuilder
from neox.errors import DataError
from tests.errors import raises_naming


@pytest.fixture(params=["mmap", "cached"])
def prefix(request, tmp_path) -> Path:
    """A small dataset of one layout: 40 documents, among them empty ones."""
    sizes = np.random.default_rng(0).integers(0, 9, 40)
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16, impl=request.param) as builder:
        builder.add_documents(np.arange(sizes.sum()), sizes)
    return tmp_path / "x"


def read_everything(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [data[i].tolist() for i in range(len(data))]


def fuzz(prefix: Path, cases: int, seed: int) -> int:
    """Damage the index `cases` times; every case is refused in one line that names a file, or changes nothing read."""
    random = np.random.default_rng(seed)
    index, original = Path(f"{prefix}.idx"), Path(f"{prefix}.idx").read_bytes()
    expected, refused = read_everything(prefix), 0
    for _ in range(cases):
        damaged = bytearray(original)
        kind = random.integers(6)
        at = int(random.integers(len(damaged)))
        if kind == 0:
            damaged[at] ^= 1 << int(random.integers(8))
        elif kind == 1:
            del damaged[at:]
        elif kind == 2:
            damaged[at:at] = random.bytes(int(random.integers(1, 40)))
        elif kind == 3:
            damaged[at : at + 8] = random.bytes(len(damaged[at : at + 8]))
        elif kind == 4:
            at = int(random.integers(min(60, len(damaged) - 8)))
            extreme = (0, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1)[random.integers(7)]
            damaged[at : at + 8] = struct.pack("<Q", extreme)
        else:
            damaged = bytearray(random.bytes(int(random.integers(len(damaged) * 2))))
        index.write_bytes(damaged)
        try:
            found = read_everything(prefix)
        except DataError as error:
            refused += 1
            message = str(error)
        else:  # the document index only groups sequences, so an inner boundary of it may move unseen
            assert found == expected
            continue
        assert str(prefix) in message
        assert "\n" not in message
    index.write_bytes(original)
    return refused


def test_damaged_indexes_are_refused(prefix):
    assert fuzz(prefix, 60, seed=1) > 50


@pytest.mark.slow
def test_many_damaged_indexes_are_refused(prefix):
    assert fuzz(prefix, 1000, seed=2) > 800


@pytest.mark.parametrize("change", [-40, -1, 1, 40])
def test_a_bin_of_the_wrong_length_is_refused(prefix, change):
    data = Path(f"{prefix}.bin")
    raw = data.read_bytes()
    data.write_bytes(raw[:change] if change < 0 else raw + b"\0" * change)
    with raises_naming(DataError, data, f"{prefix}.idx"):
        IndexedDataset(prefix)


def test_an_empty_bin_or_idx_is_refused(prefix):
    index = Path(f"{prefix}.idx")
    raw = index.read_bytes()
    index.write_bytes(b"")
    with raises_naming(DataError, index):
        IndexedDataset(prefix)
    index.write_bytes(raw)
    Path(f"{prefix}.bin").write_bytes(b"")
    with raises_naming(DataError, f"{prefix}.bin"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("at", "replacement", "name"),
    [
        (0, b"PK\x03\x04", "PK"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x06", "code 6"),
        (17, b"\x63", "code 99"),
        (18, struct.pack("<Q", 2**62), 842),  # bytes of the file
        (34, struct.pack("<i", -5), "sequence 0"),
        (34 + 4 * 40 + 8 * 3, struct.pack("<q", 1), "sequence 3"),
        (34 + 12 * 40, struct.pack("<q", 1), "document index"),
        (34 + 12 * 40 + 8 * 5, struct.pack("<q", 39), "document index"),
    ],
)
def test_each_part_of_an_mmap_index_is_checked(tmp_path, at, replacement, name):
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_documents(np.arange(200), [5] * 40)
    index = tmp_path / "x.idx"
    raw = bytearray(index.read_bytes())
    raw[at : at + len(replacement)] = replacement
    index.write_bytes(raw)
    with raises_naming(DataError, index, name):
        IndexedDataset(tmp_path / "x")
