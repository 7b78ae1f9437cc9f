"""Documents in and out, and every kind of damage placed."""

import gzip
import io
import json
import random
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import lm_dataformat
import pytest
import zstandard

from neox.corpus import (
    BadInput,
    Document,
    SkipBudget,
    expand_inputs,
    read_blocks,
    read_documents,
    write_archive,
    write_documents,
)
from neox.errors import DataError
from tests.errors import raises_naming

TEXTS = ["first\nline", "zweite Größe", "日本語 😀\r\n", " ", "\x00 escaped NUL", '"quotes" and \\ slashes'] * 7


def lines(texts: list[str] = TEXTS) -> bytes:
    return b"".join(json.dumps({"text": text, "meta": {"n": i}}).encode() + b"\n" for i, text in enumerate(texts))


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def tar(members: dict[str, bytes], mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def read(path: Path, **options: object) -> list[str]:
    return [document.text for document in read_documents(path, **options)]


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl.zst"
    documents = [Document(text, {"n": i}) for i, text in enumerate(TEXTS)]
    assert write_documents(path, iter(documents)) == len(TEXTS)
    assert list(read_documents(path)) == documents
    assert zstandard.get_frame_parameters(path.read_bytes()).has_checksum
    assert [p.name for p in path.parent.iterdir()] == ["a.jsonl.zst"]


def test_archives_are_lm_dataformats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neox.corpus.records._ARCHIVE_CHARS", 100)
    documents = [Document(text, {"n": i}) for i, text in enumerate(TEXTS)]
    assert write_archive(tmp_path / "a", iter(documents)) == len(TEXTS)
    assert len(list((tmp_path / "a").iterdir())) > 1
    by_n = sorted(lm_dataformat.Reader(str(tmp_path / "a")).stream_data(get_meta=True), key=lambda each: each[1]["n"])
    assert by_n == [(document.text, dict(document.meta)) for document in documents]
    assert sorted(read(tmp_path / "a")) == sorted(TEXTS)
    with raises_naming(DataError, tmp_path / "a"):
        write_archive(tmp_path / "a", documents)
    (tmp_path / "bad.jsonl").write_bytes(lines() + b"{}\n")
    with raises_naming(DataError, "bad.jsonl:43", "'text'"):
        write_archive(tmp_path / "b", read_documents(tmp_path / "bad.jsonl"))
    assert list((tmp_path / "b").iterdir()) == []


def test_failed_writing_leaves_nothing(tmp_path: Path) -> None:
    with raises_naming(DataError, "a.jsonl.zst", "document 1"):
        write_documents(tmp_path / "a.jsonl.zst", [Document("x"), Document("half \ud800")])
    assert list(tmp_path.iterdir()) == []
    with raises_naming(DataError, "a.jsonl", ".jsonl.zst"):
        write_documents(tmp_path / "a.jsonl", [])


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson", "a.jsonl.zst", "a.jsonl.gz", "frames.jsonl.zst", "a.jsonl.zst.tar"]
)
def test_line_formats(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    data = lines()
    half = len(data) // 2
    encode: dict[str, Callable[[bytes], bytes]] = {
        "a.jsonl.zst": zstd,
        "a.jsonl.gz": gzip.compress,
        "frames.jsonl.zst": lambda b: zstd(b[:half]) + zstd(b"") + zstd(b[half:]),
        "a.jsonl.zst.tar": lambda _: tar(
            {"0.jsonl.zst": zstd(lines(TEXTS[:21])), "1.jsonl.zst": zstd(lines(TEXTS[21:]))}
        ),
    }
    path.write_bytes(encode.get(name, bytes)(data))
    assert read(path) == TEXTS


def test_formats_of_lm_dataformat(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes('one\r\ntwo é "quoted"\n'.encode() * 40_000)
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("x", "in zip 1")
        archive.writestr("y", "in zip 2\n")
    (tmp_path / "c.gz").write_bytes(gzip.compress(b"line 1\nline 2\n"))
    with tarfile.open(tmp_path / "d.tar.gz", "w:gz", format=tarfile.USTAR_FORMAT) as archive:
        (tmp_path / "member").write_text("in tar")
        archive.add(tmp_path / "member", "member")
    (tmp_path / "e.json.zst").write_bytes(zstd(json.dumps(["p", "q"]).encode()))
    (tmp_path / "f.dat.zst").write_bytes(zstd(b"".join(b"%016d" % len(t) + t for t in (b"dat 1", b"dat 2"))))
    (tmp_path / "g.jsonl").write_bytes(lines(["plain"]) + b'"bare string"\n')
    (tmp_path / "h.json.gz").write_bytes(gzip.compress(b'"json 1"\n"json 2"\n'))
    long = "é" * 300_000  # a piece ends inside a character
    with zipfile.ZipFile(tmp_path / "i.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", long)
    (tmp_path / "j.gz").write_bytes(gzip.compress(long.encode() + b"\nlast"))
    (tmp_path / "k.dat.zst").write_bytes(zstd(b"%016d" % (2 * len(long)) + long.encode() + b"%016d" % 1 + b"x"))
    (tmp_path / "ignored.bin").write_bytes(b"\0")
    (tmp_path / "x_text_document.json").write_bytes(b"{}")  # a dataset's description
    expected = [text for text in lm_dataformat.Reader(str(tmp_path)).stream_data() if text]
    assert read(tmp_path) == expected
    assert len(expected) == 19


def test_archives_of_archives(tmp_path: Path) -> None:
    texts = {str(n): f"text {n}".encode() for n in range(3)}
    cases = {
        "openwebtext.tar.xz": tar({f"{name}.xz": tar({name: text}, "w:xz") for name, text in texts.items()}, "w:xz"),
        "urlsf_subset00_data.xz": tar(texts, "w:xz"),
        "stack.tar": tar(texts),
    }
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        assert read(tmp_path / name) == ["text 0", "text 1", "text 2"], name
        (tmp_path / name).write_bytes(data[: 1300 if name == "stack.tar" else len(data) // 2])
        with raises_naming(DataError, name):
            read(tmp_path / name)


def test_no_member_of_an_archive_is_held_whole(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", b"word " * 6_000_000)
    tracemalloc.start()
    with raises_naming(DataError, "a.zip:1 ", "30,000,002", "1,000,000"):
        read(tmp_path / "a.zip", max_line_bytes=1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000


def test_what_lm_dataformat_accepts_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "after a byte order mark"}\r\n'
        b'{"text": ["two", "paragraphs"]}\n'
        b'{"text": "not a number beside it", "meta": {"x": NaN, "n": 123456789012345678901234567890}}\n'
        b'\n   \n{"text": ""}\n{"body": "other", "text": "last, without a newline"}'
    )
    assert read(path) == [
        "after a byte order mark",
        "two\n\nparagraphs",
        "not a number beside it",
        "last, without a newline",
    ]


BAD_LINES = {
    "object cut": b"{",
    "text cut": b'{"text": "cut',
    "no text": b'{"meta": {}}',
    "number": b'{"text": 7}',
    "null": b'{"text": null}',
    "list with a number": b'{"text": ["a", 1]}',
    "bare list": b"[1]",
    "bare number": b"3",
    "NUL in the text": b'{"text": "a\0b"}',
    "only NUL": b"\0\0\0",
    "not UTF-8": b'{"text": "a\xff"}',
    "lone surrogate": b'{"text": "\\ud800"}',
    "more after the object": b'{"text": "a"} x',
    "deeply nested": b'{"text": "a", "meta": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
def test_bad_lines_are_located(tmp_path: Path, name: str, bad: bytes) -> None:
    good = lines(["one", "two", "three"])
    data = good + bad + b"\n" + good
    (tmp_path / name).write_bytes(zstd(data) if name.endswith("zst") else data)
    with raises_naming(DataError, f"{name}:4 (byte {len(good)})", "--skip-bad 1"):
        read(tmp_path / name)
    assert read(tmp_path / name, skip_bad=1) == ["one", "two", "three"] * 2


def test_damage_to_whole_files(tmp_path: Path) -> None:
    whole = zstd(lines())
    cases = {
        "cut.jsonl.zst": whole[: len(whole) // 2],
        "garbage.jsonl.zst": b"\x93" * 1000,
        "behind.jsonl.zst": whole + b"more",
        "empty.jsonl.zst": b"",
        "empty.jsonl": b"",
        "cut.jsonl.gz": gzip.compress(lines())[:-20],
        "bad.zip": b"PK\x03\x04 nothing",
        "cut.dat.zst": zstd(b"%016d" % 9 + b"short"),
        "bad.dat.zst": zstd(b"not a length at all"),
        "object.json.zst": zstd(b"{}"),
        "cut.gz": gzip.compress(b"line\n" * 99)[:-12],
        "cut.tar.gz": b"\x1f\x8b\x08\x00",
        "cut.jsonl.zst.tar": b"x" * 700,
        "bytes.txt": b"\xff\xfe\x00",
    }
    for name, data in cases.items():
        path = tmp_path / name
        path.write_bytes(data)
        with raises_naming(DataError, name):
            read(path)
        read(path, skip_bad=1)


def test_missing_and_unreadable_inputs(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "none.jsonl", tmp_path / "a.bin", tmp_path / "empty"):
        with raises_naming(DataError, path):
            expand_inputs([path])


def test_directories_inside_a_directory_are_named_and_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "more.jsonl").mkdir()
    with raises_naming(DataError, "more.jsonl"):
        expand_inputs([tmp_path])
    (tmp_path / "a.txt").write_text("a")
    assert expand_inputs([tmp_path]) == (str(tmp_path / "a.txt"),)
    assert "more.jsonl" in caplog.text


def test_a_line_too_long_is_passed_over_without_being_held(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    long = b'{"text": "' + b"x" * 40_000_000 + b'"}\n'
    path.write_bytes(zstd(lines(["one"]) + long + lines(["two"]) + long[:-1]))
    with raises_naming(DataError, "a.jsonl.zst:2 ", "40,000,012", "1,000,000"):
        read(path, max_line_bytes=1_000_000)
    assert read(path, max_line_bytes=1_000_000, skip_bad=2) == ["one", "two"]
    sizes = [
        len(b.data)
        for b in read_blocks(str(path), block_bytes=1000, max_line_bytes=1000)
        if not isinstance(b, BadInput)
    ]
    assert max(sizes) < 1000


@pytest.mark.parametrize("block_bytes", [1, 50, 1 << 20])
def test_blocks_start_where_the_last_one_ended(tmp_path: Path, block_bytes: int) -> None:
    for name, data in (("a.jsonl", lines() + b'{"text": "end"}'), ("a.jsonl.zst", zstd(lines()))):
        path = tmp_path / name
        path.write_bytes(data)
        blocks = [block for block in read_blocks(str(path), block_bytes=block_bytes) if not isinstance(block, BadInput)]
        assert b"".join(block.data for block in blocks) == (lines() if name.endswith("zst") else data)
        middle = blocks[len(blocks) // 2]
        again = list(read_blocks(str(path), block_bytes=block_bytes, start=middle.start))
        rest = b"".join(block.data for block in blocks[len(blocks) // 2 :])
        assert b"".join(block.data for block in again if not isinstance(block, BadInput)) == rest
        assert list(read_blocks(str(path), block_bytes=block_bytes, start=blocks[-1].end)) == []


def test_budget_counts_and_reports() -> None:
    seen: list[BadInput] = []
    budget = SkipBudget(2, seen.append)
    for line in (1, 2):
        budget.add(BadInput("f", line, 0, "why"))
    assert budget.skipped == len(seen) == 2
    with raises_naming(DataError, "f:3 (byte 9): why", "--skip-bad 3"):
        budget.add(BadInput("f", 3, 9, "why"))


def fuzz_once(path: Path, whole: bytes, chance: random.Random) -> None:
    """Damage a file in one way: reading ends in one clear line or in documents; damaged zstd never goes unnoticed."""
    data = bytearray(whole)
    kind = chance.choice(["flip", "cut", "insert", "zero"])
    at = chance.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "insert":
        data[at:at] = chance.randbytes(chance.randint(1, 20))
    else:
        end = min(len(data), at + chance.randint(1, 50))
        data[at:end] = bytes(end - at)
    path.write_bytes(data)
    try:
        texts = read(path)
    except DataError as error:
        message = str(error)
    else:
        message = None
    if message is not None:
        assert "\n" not in message
        assert path.name in message
    elif path.name.endswith("zst"):
        assert texts == TEXTS, f"{kind} at {at} went unnoticed"


def run_fuzz(path: Path, cases: int, seed: int) -> None:
    whole = zstd(lines()) if path.name.endswith("zst") else lines()
    chance = random.Random(seed)
    for _ in range(cases):
        fuzz_once(path, whole, chance)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
def test_fuzz(tmp_path: Path, name: str) -> None:
    run_fuzz(tmp_path / name, 60, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
def test_fuzz_many(tmp_path: Path, name: str) -> None:
    run_fuzz(tmp_path / name, 1000, seed=2)
