"""Token datasets from TFRecords of BERT's pretraining data."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("google_crc32c", reason="google-crc32c (requirements/requirements-corpus.txt) is not installed")

from neox.data import IndexedDataset
from neox.errors import DataError
from neox.preprocess.settings import TokenizerSpec
from neox.preprocess.tfrecords import convert_tfrecords, masked_crc, parse_example, read_pair, read_records
from tests.errors import raises_naming

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(95))]


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    groups = []
    while True:
        groups.append(value & 0x7F)
        value >>= 7
        if not value:
            return bytes([group | 0x80 for group in groups[:-1]] + [groups[-1]])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(features: dict[str, list[int] | list[float]], *, packed: bool = True) -> bytes:
    """Encode a `tf.train.Example`."""
    entries = b""
    for name, values in features.items():
        if any(isinstance(value, float) for value in values):
            kind, content = 2, field(1, struct.pack(f"<{len(values)}f", *values))
        elif packed:
            kind, content = 3, field(1, b"".join(map(varint, values)))
        else:
            kind, content = 3, b"".join(varint(1 << 3) + varint(value) for value in values)
        entries += field(1, field(1, name.encode()) + field(2, field(kind, content)))
    return field(1, entries)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def bert_example(first: list[int], second: list[int], *, random_next: bool, seed: int, packed: bool) -> bytes:
    """Encode a sample of 32 tokens as Google's script does, three of them masked."""
    tokens = [2, *first, 3, *second, 3]
    positions = sorted(np.random.default_rng(seed).permutation(np.arange(1, len(first) + 1))[:3].tolist())
    ids = [tokens[p] for p in positions]
    for p in positions:
        tokens[p] = 4
    padding = [0] * (32 - len(tokens))
    return example(
        {
            "input_ids": tokens + padding,
            "input_mask": [1] * len(tokens) + padding,
            "segment_ids": [0] * (len(first) + 2) + [1] * (len(second) + 1) + padding,
            "masked_lm_positions": [*positions, 0, 0],
            "masked_lm_ids": [*ids, 0, 0],
            "masked_lm_weights": [1.0, 1.0, 1.0, 0.0, 0.0],
            "next_sentence_labels": [int(random_next)],
        },
        packed=packed,
    )


@pytest.fixture
def spec(tmp_path: Path) -> TokenizerSpec:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return TokenizerSpec("BertWordPieceLowerCase", str(tmp_path / "vocab.txt"))


def samples(seed: int = 0) -> list[tuple[list[int], list[int], bool]]:
    random = np.random.default_rng(seed)
    draw = lambda: random.integers(5, 100, size=random.integers(4, 12)).tolist()  # noqa: E731
    return [(draw(), draw(), bool(random.integers(2))) for _ in range(20)]


@pytest.mark.parametrize("packed", [True, False])
def test_sentences_are_restored(tmp_path: Path, spec: TokenizerSpec, packed: bool) -> None:
    made = samples()
    data = (bert_example(a, b, random_next=other, seed=i, packed=packed) for i, (a, b, other) in enumerate(made))
    (tmp_path / "x.tfrecord").write_bytes(b"".join(map(record, data)))
    documents, tokens = convert_tfrecords([tmp_path / "x.tfrecord"], str(tmp_path / "out"), spec)
    indexed = IndexedDataset(tmp_path / "out")
    assert tokens == indexed.num_tokens == sum(len(a) + len(b) for a, b, _ in made)
    assert [indexed[i].tolist() for i in range(len(indexed))] == [part for a, b, _ in made for part in (a, b)]
    counts = [count for *_, other in made for count in ([1, 1] if other else [2])]
    assert np.diff(indexed.document_index).tolist() == counts
    assert documents == len(counts)


def test_damage_is_named(tmp_path: Path, spec: TokenizerSpec) -> None:
    good = [record(bert_example(a, b, random_next=False, seed=0, packed=True)) for a, b, _ in samples()[:3]]
    path = tmp_path / "x.tfrecord"

    def convert(content: bytes, skip_bad: int = 0) -> int:
        path.write_bytes(content)
        return convert_tfrecords([path], str(tmp_path / "out"), spec, skip_bad=skip_bad)[0]

    flipped = bytearray(good[1])
    flipped[40] ^= 1
    for content in (
        good[0] + bytes(flipped) + good[2],
        good[0] + good[1][:-7],
        good[0] + b"\xff" * 20,
        good[0] + record(example({"input_ids": [1, 2]})),
        good[0] + record(b"\x0a\xff"),
    ):
        with raises_naming(DataError, "x.tfrecord:2"):
            convert(content)
        assert not (tmp_path / "out.idx").exists()
    assert convert(good[0] + bytes(flipped) + good[2], skip_bad=1) == 2
    assert convert(good[0] + b"\xff" * 20, skip_bad=1) == 1  # nothing can be read after a damaged length
    with pytest.raises(DataError):
        convert(b"")


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": [2, -7, 4, 3, 6, 3]},
        {"segment_ids": [1, 1, 0, 0, 1, 1]},
        {"masked_lm_positions": [1.0]},
        {"masked_lm_positions": [6]},
        {"masked_lm_weights": [1.0, 1.0]},
    ],
)
def test_records_that_do_not_fit_are_named(tmp_path: Path, spec: TokenizerSpec, change: dict[str, list[int]]) -> None:
    features: dict[str, list[int] | list[float]] = {
        "input_ids": [2, 5, 4, 3, 6, 3],
        "input_mask": [1] * 6,
        "segment_ids": [0, 0, 0, 0, 1, 1],
        "masked_lm_positions": [2],
        "masked_lm_ids": [7],
        "next_sentence_labels": [],
    }
    path, prefix = tmp_path / "x.tfrecord", str(tmp_path / "out")
    path.write_bytes(record(example(features)))
    assert convert_tfrecords([path], prefix, spec) == (1, 3)  # without a label the sentences are a document
    assert IndexedDataset(prefix).tokens.tolist() == [5, 7, 6]
    path.write_bytes(record(example({**features, "masked_lm_weights": [1.0], **change})))
    with raises_naming(DataError, "x.tfrecord:1"):
        convert_tfrecords([path], prefix, spec)


@pytest.mark.parametrize("seed", range(5))
def test_any_damage_gives_records_or_a_reason(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    content = bytearray(record(bert_example([5] * 9, [6] * 9, random_next=True, seed=0, packed=True)))
    for _ in range(60):
        broken = bytearray(content)
        broken[random.integers(len(broken))] ^= int(random.integers(1, 256))
        (tmp_path / "x").write_bytes(broken[: random.integers(1, len(broken) + 1)])
        assert len(list(read_records(tmp_path / "x"))) == 1
        with suppress(ValueError, OverflowError):
            read_pair(parse_example(bytes(broken[12:-4])))
