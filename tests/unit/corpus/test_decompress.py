"""Shards decompressed: verified, in place only when whole, continued after an interruption."""

import os
import random
from pathlib import Path

import pytest
import zstandard

from neox.corpus.decompress import compressed_files, decompress_files
from neox.errors import DataError
from tests.errors import raises_naming


def shard(path: Path, seed: int, size: int = 700_000) -> bytes:
    chance = random.Random(seed)
    data = b"".join(chance.choice([b"alpha ", b"beta\n", b"%d " % chance.randrange(10**6)]) for _ in range(size // 6))
    path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(data))
    return data


def test_shards_in_parallel_and_again(tmp_path: Path) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    expected = {f"{i:02}.jsonl": shard(source / f"{i:02}.jsonl.zst", i) for i in range(5)}
    seen: list[int] = []
    done = decompress_files(compressed_files([source]), output, workers=3, consumed=seen.append)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == expected
    assert all(each.fresh for each in done)
    assert sum(seen) == sum(path.stat().st_size for path in source.iterdir())
    (output / "03.jsonl").unlink()
    os.utime(output / "01.jsonl", (0, 0))  # older than its source: made from another file
    again = decompress_files(compressed_files([source]), output)
    assert [each.target.name for each in again if each.fresh and each.target] == ["01.jsonl", "03.jsonl"]
    assert {path.name: path.read_bytes() for path in output.iterdir()} == expected


@pytest.mark.parametrize("damage", ["cut", "flip", "behind", "empty", "garbage"])
def test_damage_is_named_and_nothing_half_is_left(tmp_path: Path, damage: str) -> None:
    shard(tmp_path / "00.jsonl.zst", 0, 20_000)
    path = tmp_path / "01.jsonl.zst"
    shard(path, 1)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "flip":
        data[len(data) // 2] ^= 4
    elif damage == "behind":
        data += b"more"
    else:
        data = bytearray() if damage == "empty" else bytearray(b"x" * 100)
    path.write_bytes(data)
    with raises_naming(DataError, path):
        decompress_files(compressed_files([tmp_path]), tmp_path / "out", workers=1)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["00.jsonl"]
    with pytest.raises(DataError):
        decompress_files([path], None)


def test_verifying_writes_nothing(tmp_path: Path) -> None:
    data = shard(tmp_path / "a.zst", 1)
    (done,) = decompress_files(compressed_files([tmp_path / "a.zst"]), None)
    assert (done.size, done.target) == (len(data), None)
    assert [p.name for p in tmp_path.iterdir()] == ["a.zst"]


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    for path in (tmp_path, tmp_path / "a.txt", tmp_path / "b.zst"):
        with raises_naming(DataError, path):
            compressed_files([path])
