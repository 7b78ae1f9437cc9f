"""Tables give the same documents as lines, damaged ones say so, and a row is found again by its number."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from neox.corpus import BadInput, LineBlock, expand_inputs, parse_texts, read_blocks, read_documents, read_filter
from neox.errors import DataError
from neox.storage import matches
from tests.errors import raises_naming

ROWS: list[dict[str, Any]] = [
    {"text": f"row {i}\n naïve \"x\", 'y'\t日本", "n": i, "meta": {"lang": "en" if i % 2 else "de"}, "none": None}
    for i in range(300)
]
TEXTS = [row["text"] for row in ROWS]


def write_parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=70, write_page_checksum=True)


def write_stream(path: Path, rows: list[dict[str, Any]] = ROWS) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, 70)


def write_arrow_file(path: Path, rows: list[dict[str, Any]] = ROWS) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as stream:
        stream.write_table(table, 70)


def csv_bytes(delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(["text", "n"])
    writer.writerows([row["text"], row["n"]] for row in ROWS)
    return text.getvalue().encode()


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.parquet": write_parquet,
    "stream.arrow": write_stream,
    "file.arrow": write_arrow_file,
    "a.csv": lambda path: path.write_bytes(csv_bytes()),
    "a.tsv": lambda path: path.write_bytes(csv_bytes("\t")),
    "a.csv.gz": lambda path: path.write_bytes(gzip.compress(csv_bytes())),
    "a.csv.bz2": lambda path: path.write_bytes(bz2.compress(csv_bytes())),
    "a.tsv.xz": lambda path: path.write_bytes(lzma.compress(csv_bytes("\t"))),
    "a.csv.zst": lambda path: path.write_bytes(zstandard.compress(csv_bytes())),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_table_gives_its_texts_and_goes_on_at_any_row(tmp_path: Path, monkeypatch: Any, name: str) -> None:
    monkeypatch.setattr("neox.corpus.tables._PIECE_BYTES", 1000)
    path = tmp_path / name
    WRITERS[name](path)
    assert [document.text for document in read_documents(path)] == TEXTS
    blocks = [block for block in read_blocks(str(path), block_bytes=500) if isinstance(block, LineBlock)]
    whole = b"".join(block.data for block in blocks)
    assert blocks[-1].end.line == len(ROWS) + 1
    for block in blocks[::7]:
        rest = list(read_blocks(str(path), block_bytes=500, start=block.start))
        assert b"".join(each.data for each in rest if isinstance(each, LineBlock)) == whole[block.start.offset :]


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow"])
def test_texts_of_one_column_come_as_they_are(tmp_path: Path, monkeypatch: Any, name: str) -> None:
    monkeypatch.setattr("neox.corpus.tables._PIECE_BYTES", 1000)
    monkeypatch.setattr("neox.corpus.blocks._FIRST_BLOCK_BYTES", 50)
    rows = [{**row, "text": None if row["n"] % 50 == 3 else "" if row["n"] % 50 == 4 else row["text"]} for row in ROWS]
    rows[41]["text"] = "long " * 100
    path = tmp_path / name
    WRITERS[name](path, rows)  # type: ignore[call-arg]
    found = list(read_blocks(str(path), block_bytes=500, max_line_bytes=400, columns=("text",)))
    blocks = [block for block in found if isinstance(block, LineBlock)]
    (too_long,) = (block for block in found if isinstance(block, BadInput))
    assert too_long.line == 42
    assert {block.column for block in blocks} == {"text"}
    assert blocks[-1].end.line == len(rows) + 1
    sides = []
    for columns in (("text",), None):
        side: list[Any] = []
        for block in read_blocks(str(path), block_bytes=500, columns=columns):
            assert isinstance(block, LineBlock)
            parsed = parse_texts(block, ["text"])
            side += [*parsed.columns[0], *((bad.line, bad.reason) for bad in parsed.bad)]
        sides.append(sorted(map(str, side)))
    assert sides[0] == sides[1]
    assert len(sides[0]) == len(rows) - 6  # an empty text is no document
    for block in blocks[::7]:
        rest = list(read_blocks(str(path), block_bytes=500, max_line_bytes=400, start=block.start, columns=("text",)))
        assert b"".join(each.data for each in rest if isinstance(each, LineBlock)) == b"".join(
            each.data for each in blocks if each.start.line >= block.start.line
        )


def test_a_text_that_is_not_utf_8_is_one_bad_row(tmp_path: Path) -> None:
    offsets = pa.array([0, 4, 6, 11], pa.int64()).buffers()[1]
    texts = pa.Array.from_buffers(pa.large_utf8(), 3, [None, offsets, pa.py_buffer(b"good\xff\xferight")])
    pq.write_table(pa.table({"text": texts}), tmp_path / "b.parquet")
    documents = list(read_documents(tmp_path / "b.parquet", skip_bad=1, columns=["text"]))
    assert [document.text for document in documents] == ["good", "right"]
    with raises_naming(DataError, "b.parquet:2", "UTF-8"):
        list(read_documents(tmp_path / "b.parquet", columns=["text"]))


@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress, gzip.compress])
def test_packed_lines(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    suffix = {bz2.compress: "bz2", lzma.compress: "xz", gzip.compress: "gz"}[pack]
    path = tmp_path / f"a.jsonl.{suffix}"
    data = pack(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS))
    path.write_bytes(data)
    assert [document.text for document in read_documents(path)] == TEXTS
    path.write_bytes(data[:-20])
    with raises_naming(DataError, path.name, "truncated"):
        list(read_documents(path))


def test_only_wanted_columns_are_read(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    for columns, keys in ((("meta.lang", "n"), ["meta", "n"]), (("absent",), list(ROWS[0])), (None, list(ROWS[0]))):
        block = next(read_blocks(str(tmp_path / "a.parquet"), block_bytes=500, columns=columns))
        assert isinstance(block, LineBlock)
        assert list(json.loads(block.data.split(b"\n")[0])) == keys


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"content": "a b", "path": "x.py", "size": 3}, "--text-key content"),
        ({"body": "a b", "size": 3}, "--text-key body"),
        ({"title": "a", "body": "b"}, None),  # nothing says which of them is the text
    ],
)
def test_a_table_without_text_names_its_columns_and_the_flag(
    tmp_path: Path, row: dict[str, Any], hint: str | None
) -> None:
    write_parquet(tmp_path / "a.parquet", [row] * 3)
    with pytest.raises(DataError) as error:
        list(read_documents(tmp_path / "a.parquet"))
    for name in row:
        assert repr(name) in str(error.value)
    assert ("--text-key" in str(error.value)) == (hint is not None)
    if hint is not None:
        assert hint in str(error.value)
        assert [document.text for document in read_documents(tmp_path / "a.parquet", hint.split()[1])] == ["a b"] * 3


def test_filters_keep_documents_by_value_and_range(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in ("a.parquet", "a.jsonl"):
        filters = [read_filter("meta.lang=en,fr"), read_filter("n=10..19"), read_filter("n!=11")]
        found = [document.text for document in read_documents(tmp_path / name, filters=filters)]
        assert found == [TEXTS[i] for i in (13, 15, 17, 19)]
        assert list(read_documents(tmp_path / name, filters=[read_filter("none=x")])) == []
        with raises_naming(DataError, f"{name}:1", "'language'"):
            list(read_documents(tmp_path / name, filters=[read_filter("language=en")]))
    with raises_naming(DataError, "'meta'"):
        list(read_documents(tmp_path / "a.parquet", filters=[read_filter("meta>3")]))


def test_paths_and_templates_make_texts(tmp_path: Path) -> None:
    lines = [
        {"a": {"b": "deep"}, "title": "T", "n": 3, "text": "x"},
        {"title": None, "text": "x", "n": 1, "a.b": "dot"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [document.text for document in read_documents(tmp_path / "a.jsonl", "a.b")] == ["deep", "dot"]
    found = list(read_documents(tmp_path / "a.jsonl", "{title}\n\n{text} {{{n}}}", skip_bad=1))
    assert [document.text for document in found] == ["T\n\nx {3}"]
    with raises_naming(DataError, "a.jsonl:1", "'other'", "'title'"):
        list(read_documents(tmp_path / "a.jsonl", "{other}"))


def test_values_that_json_lacks_and_rows_that_are_bad(tmp_path: Path) -> None:
    rows = [{"text": "good", "bytes": b"\xff", "day": date(2026, 1, 2), "money": Decimal("1.50"), "f": float("nan")}]
    write_parquet(tmp_path / "a.parquet", rows)
    block = next(read_blocks(str(tmp_path / "a.parquet"), block_bytes=500))
    assert isinstance(block, LineBlock)
    expected = {"text": "good", "bytes": {"base64": "/w=="}, "day": "2026-01-02", "money": "1.50", "f": None}
    assert json.loads(block.data) == expected
    with raises_naming(DataError, "'bytes' is an object"):
        list(read_documents(tmp_path / "a.parquet", "bytes"))
    bad_text = pa.Array.from_buffers(
        pa.utf8(), 2, [None, pa.array([0, 4, 6], pa.int32()).buffers()[1], pa.py_buffer(b"good\xff\xfe")]
    )
    pq.write_table(pa.table({"text": bad_text}), tmp_path / "b.parquet")
    assert [document.text for document in read_documents(tmp_path / "b.parquet", skip_bad=1)] == ["good"]
    (tmp_path / "c.csv").write_text("text,n\ngood,1\nbad\nalso good,2\n")
    assert len(list(read_documents(tmp_path / "c.csv", skip_bad=1))) == 2
    with raises_naming(DataError, "c.csv:2", "1 fields instead of 2"):
        list(read_documents(tmp_path / "c.csv"))
    (tmp_path / "d.csv").write_text("text,text\na,b\n")
    with raises_naming(DataError, "d.csv", "'text'"):
        list(read_documents(tmp_path / "d.csv"))


def test_saved_data_sets_are_read_by_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the optional package datasets is not installed")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    assert [document.text for document in read_documents(tmp_path / "one")] == TEXTS
    picked = whole.select([5, 2])
    datasets.DatasetDict({"train": whole, "test": picked}).save_to_disk(tmp_path / "two")
    files = expand_inputs([tmp_path / "two"], split="test")
    assert [document.text for document in read_documents(files)] == [TEXTS[5], TEXTS[2]]
    for split in (None, "dev"):
        with raises_naming(DataError, "train", "test"):
            expand_inputs([tmp_path / "two"], split=split)
    with raises_naming(DataError, "--split"):
        expand_inputs(files, split="test")
    next((tmp_path / "one").glob("*-of-00003.arrow")).unlink()
    with raises_naming(DataError, "of-00003.arrow"):
        expand_inputs([tmp_path / "one"])


def test_patterns_of_addresses() -> None:
    assert matches("a/b/c.parquet", "a/**/*.parquet")
    assert matches("a/c.parquet", "a/**/*.parquet")
    assert matches("data/train-0.parquet", "data/train-*")
    assert not matches("a/b/c.parquet", "a/*.parquet")


def damaged(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    """Some damage of a file: what was done, and the result."""
    kind = chance.choice(["cut", "flip", "zero", "insert", "swap"])
    place = chance.randrange(len(data))
    if kind == "cut":
        return kind, data[:place]
    if kind == "flip":
        return kind, data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]
    if kind == "zero":
        return kind, data[:place] + bytes(min(16, len(data) - place)) + data[place + 16 :]
    if kind == "insert":
        return kind, data[:place] + chance.randbytes(8) + data[place:]
    middle = len(data) // 2
    return kind, data[middle:] + data[:middle]


def fuzz(folder: Path, cases: int, seed: int) -> None:
    """Damage tables; each must be read without a crash, and lose nothing in silence where checksums or ends show it."""
    chance = random.Random(seed)
    originals = {}
    for name in ("a.parquet", "stream.arrow", "file.arrow", "a.csv"):
        WRITERS[name](folder / name)
        originals[name] = (folder / name).read_bytes()
    for case in range(cases):
        name = chance.choice(list(originals))
        kind, data = damaged(originals[name], chance)
        path = folder / f"case_{name}"
        path.write_bytes(data)
        bad: list[BadInput] = []
        size = 0
        for block in read_blocks(str(path), block_bytes=1 << 16):
            if isinstance(block, BadInput):
                bad.append(block)
            else:
                size += block.data.count(b"\n")
        for columns in (None, ["text"]):
            texts = []
            try:
                texts = [document.text for document in read_documents(path, skip_bad=None, columns=columns)]
            except DataError:
                continue
            if name == "a.parquet" or (name.endswith(".arrow") and kind == "cut"):
                assert texts == TEXTS, (seed, case, kind)


def test_damaged_tables_are_errors(tmp_path: Path) -> None:
    fuzz(tmp_path, 300, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_damaged_tables_are_errors(tmp_path: Path) -> None:
    fuzz(tmp_path, 2000, seed=2)
