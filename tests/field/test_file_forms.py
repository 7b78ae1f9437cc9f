"""Files that hold something else than their names say: read, or named with a way out in one line."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from neox.corpus import BadInput, LineBlock, Position, convert_lines, read_blocks, read_documents
from neox.corpus.contents import whole_text
from neox.corpus.document import CorruptInput
from neox.errors import DataError

BOM = b"\xef\xbb\xbf"
TEXTS = ["one dog", "zwei Größen", "日本 😀"]
LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)
RAW = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS)
RECORDS = [{"text": text} for text in TEXTS]
CSV = "text,lang\n" + "".join(f"{text},x\n" for text in TEXTS)
SKIPPED = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"  # a frame of zstd that readers skip


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def texts(path: Path, data: bytes) -> list[str]:
    path.write_bytes(data)
    return [document.text for document in read_documents(path)]


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        list(read_documents(path))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "zstd": zstd,
    "pzstd": lambda data: SKIPPED + zstd(data),
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}
JSON = {
    "lines": LINES,
    "mark": BOM + LINES,
    "CRLF": LINES.replace(b"\n", b"\r\n"),
    "no end": LINES[:-1],
    "array": json.dumps(RECORDS).encode(),
    "indented": BOM + json.dumps(RECORDS, indent=2).encode(),
    "values": b"\n ".join(json.dumps(record, indent=4).encode() for record in RECORDS),
    "UTF-16": RAW.encode("utf-16"),
    "UTF-16 BE": b"\xfe\xff" + RAW.encode("utf-16-be"),
    "UTF-32": RAW.encode("utf-32"),
    "array in UTF-16": json.dumps(RECORDS, ensure_ascii=False).encode("utf-16"),
}


@pytest.mark.parametrize("form", JSON)
def test_json_of_any_compression_and_encoding(tmp_path: Path, form: str) -> None:
    """datasets#8241: what a file holds is told by its bytes."""
    for name in ("x.jsonl", "x.ndjson", "x.jsonl.zst", "x.json.gz", "x.json.zst"):
        for packing, pack in PACKINGS.items():
            assert texts(tmp_path / name, pack(JSON[form])) == TEXTS, (name, packing)


def test_a_mark_between_joined_files(tmp_path: Path) -> None:
    """`cat a.jsonl b.jsonl` leaves the mark of the second file in the middle."""
    assert texts(tmp_path / "x.jsonl", LINES + BOM + LINES) == TEXTS * 2


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_tables(tmp_path: Path, encoding: str) -> None:
    """Excel writes UTF-16 with tabs as its Unicode text, and a mark before UTF-8."""
    for name in ("x.csv", "x.csv.gz", "x.tsv", "x.tsv.zst"):
        table = CSV.replace(",", "\t") if ".tsv" in name else CSV
        for packing, pack in PACKINGS.items():
            assert texts(tmp_path / name, pack(table.encode(encoding))) == TEXTS, (name, packing)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_one_text(tmp_path: Path, encoding: str) -> None:
    for packing, pack in PACKINGS.items():
        assert texts(tmp_path / "x.txt", pack("one\r\n日本".encode(encoding))) == ["one\n日本"], packing


def test_members_of_archives_may_have_a_mark(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", BOM + b"one dog")
    assert texts(tmp_path / "x.zip", buffer.getvalue()) == ["one dog"]


def in_tar(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("a.jsonl")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
HTML = b"\n<!DOCTYPE html>\n<html><body>404</body></html>"


UNREADABLE = [
    *((name, LFS, "git lfs pull") for name in ("x.jsonl", "x.jsonl.zst", "x.parquet", "x.csv", "x.txt", "x.arrow")),
    *((name, HTML, "HTML") for name in ("x.jsonl", "x.jsonl.gz", "x.json.zst", "x.parquet", "x.csv.gz")),
    ("x.jsonl", b"/annex/objects/SHA256E-s1--0.jsonl\n", "git annex get"),
    ("x.jsonl", b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "XML"),
    ("x.jsonl", b"PAR1....PAR1", ".parquet"),
    ("x.json", b"ARROW1\0\0", ".arrow"),
    ("x.csv", b"PK\x03\x04....", ".zip"),
    ("x.jsonl", in_tar(LINES), ".tar"),
    ("x.jsonl", b"\x04\x22\x4d\x18....", "lz4"),
    ("x.txt", b"%PDF-1.7\n", "PDF"),
    ("x.jsonl", RAW.encode("utf-16-le"), "UTF-16LE"),
    ("x.txt", "one dog".encode("utf-16-be"), "UTF-16BE"),
    ("x.csv", CSV.encode("utf-16-le"), "UTF-16LE"),
    ("x.jsonl", b'{"text": "caf\xe9"}\n', "iconv"),
    ("x.jsonl", b'[{"text": "caf\xe9"}]', "iconv"),
    ("x.txt", b"caf\xe9 au lait", "iconv"),
    ("x.csv", b"text\r\ncaf\xe9 \x93quoted\x94\r\n", "iconv"),
    ("x.tsv", b"text;lang\none;x\n", "semicolons"),
    ("x.csv", b"text\tlang\none\tx\n", ".tsv"),
    ("x.tsv", b"text,lang\none,x\n", ".csv"),
    ("x.txt", LINES, ".jsonl"),
    ("x.txt", BOM + LINES, ".jsonl"),
    ("x.txt", CSV.encode(), ".csv"),
    ("x.txt", CSV.replace(",", "\t").encode(), ".tsv"),
    ("x.txt", b"one\0dog", "NUL"),
    ("x.txt", b"\0" * 4096, "NUL"),
    ("x.jsonl", b"\0" * 64 + b"\n", "NUL"),
    ("x.jsonl", LINES.replace(b"\n", b"\r"), "CR"),
    ("x.jsonl", b"", "empty"),
    ("x.txt", gzip.compress(b""), "empty"),
    ("x.jsonl", zstd(LINES * 500)[:-7], "damaged"),
    ("x.jsonl", gzip.compress(LINES)[:-9], "truncated"),
    ("x.json", b'[{"text": "one"},\n {"text": "tw', "not valid"),
    ("x.json", b'{"data": [{"text": "one"}]}', "'data'"),
]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """datasets#8241 and its like: the message says what the file holds, and what to do."""
    for name, data, way in UNREADABLE:
        assert way in refusal(tmp_path / name, data), (name, data[:80])


def test_text_that_looks_like_other_forms(tmp_path: Path) -> None:
    """HTML, braces and commas are text in a text file."""
    for text in ("<!DOCTYPE html>\n<p>x</p>", "{ braces }", "{}\nx", "Hello, text\nx", "[1]", "text", "a,b\nc,d"):
        assert texts(tmp_path / "x.txt", text.encode()) == [text]


def test_positions_in_an_array(tmp_path: Path) -> None:
    """An element of an array has the position of the line that is made of it."""
    (tmp_path / "x.json").write_bytes(json.dumps([{"text": "a"}, {"no": 1}, {"text": "b"}]).encode("utf-16"))
    with pytest.raises(DataError, match=r"x\.json:2 "):
        list(read_documents(tmp_path / "x.json"))
    assert [document.text for document in read_documents(tmp_path / "x.json", skip_bad=1)] == ["a", "b"]
    (second,) = read_blocks(str(tmp_path / "x.json"), block_bytes=1 << 20, start=Position(3, 22))
    assert not isinstance(second, BadInput)
    assert (second.data, second.start.line) == (b'{"text":"b"}\n', 3)


def test_arrays_of_other_values(tmp_path: Path) -> None:
    """datasets#6695, LongCite#11: an array of strings holds texts; lines that are lists are named."""
    assert texts(tmp_path / "x.json", json.dumps(TEXTS, indent=1).encode()) == TEXTS
    assert "x.jsonl:1 " in refusal(tmp_path / "x.jsonl", b'[{"text": "a"}]\n[{"text": "b"}]\n')


def test_texts_of_evaluations() -> None:
    assert whole_text("\ufeffé".encode()) == "é"
    assert whole_text("é".encode("utf-16")) == "é"
    for data, way in ((b"\xe9", "iconv"), (gzip.compress(b"x"), "unpack"), (LFS, "git lfs")):
        with pytest.raises(CorruptInput, match=way):
            whole_text(data)


def test_separators_inside_of_lines(tmp_path: Path) -> None:
    """jsonlines#53, datalad#3523, birdclaw#61: a line ends at LF, and not at Unicode's other separators."""
    kept = "a\u2028b\u2029c\x85d"
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in (kept, "e"))
    assert texts(tmp_path / "x.jsonl", lines.encode()) == [kept, "e"]


@pytest.mark.parametrize(
    "content",
    [
        b"text;lang\r\none, two;x\r\n\r\nthree;\r\n",
        b'\xef\xbb\xbf"text";"lang"\n"one, two";x\nthree;""\n',
    ],
)
def test_semicolons_separate_columns(tmp_path: Path, content: bytes) -> None:
    """pandas and Excel of many languages write them; commas inside are text."""
    (tmp_path / "x.csv").write_bytes(content)
    assert [document.text for document in read_documents(tmp_path / "x.csv")] == ["one, two", "three"]
    (tmp_path / "x.csv").write_bytes(b'"text;lang"\none;x\n')
    (block,) = read_blocks(str(tmp_path / "x.csv"), block_bytes=1000)
    assert isinstance(block, LineBlock)
    assert json.loads(block.data) == {"text;lang": "one;x"}


def test_maps_of_a_table_are_objects(tmp_path: Path) -> None:
    """Arrow's maps come as lists of pairs from pyarrow; arguments of calls are often written as maps."""
    arguments = pa.map_(pa.string(), pa.string())
    call = pa.struct([("name", pa.string()), ("arguments", arguments)])
    rows = [[{"name": "f", "arguments": [("town", "Paris")]}], [{"name": "g", "arguments": [("a", "1"), ("a", "2")]}]]
    pq.write_table(pa.table({"calls": pa.array(rows, pa.list_(call))}), tmp_path / "x.parquet")
    (block,) = read_blocks(str(tmp_path / "x.parquet"), block_bytes=1000)
    assert isinstance(block, LineBlock)
    first, second = convert_lines(block, lambda record, strict: record)
    assert first == {"calls": [{"name": "f", "arguments": {"town": "Paris"}}]}
    assert isinstance(second, BadInput)


APPLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        \x00\x02\x00\x00\x00\x09"


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def tarred(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "d/a.txt"
        archive.addfile(link)
    return buffer.getvalue()


ARCHIVES: dict[str, Callable[[dict[str, bytes]], bytes]] = {
    "x.zip": zipped,
    "x.tar": tarred,
    "x.tar.gz": lambda members: gzip.compress(tarred(members)),
    "x.tgz": lambda members: gzip.compress(tarred(members)),
    "x.gz": lambda members: gzip.compress(tarred(members)),
    "x.tar.zst": lambda members: zstd(tarred(members)),
    "x.tar.xz": lambda members: lzma.compress(tarred(members)),
    "y.tar.gz": tarred,  # the name says gzip, the bytes do not
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_what_is_no_document_of_an_archive(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """SynthTabNet#15, CSI#31, OpenNeuro#2520: macOS puts files of its own into archives."""
    members = {
        "d/._a.txt": APPLE,
        "d/a.txt": b"one",
        "__MACOSX/d/._b.txt": APPLE,
        "d/.DS_Store": b"\0\0\0\1Bud1\0",
        "d/.b.txt.swp": b"b0VIM 9.0",
        "d/empty.txt": b"",
        "d/b.txt": b"two",
    }
    caplog.set_level("WARNING")
    assert texts(tmp_path / name, ARCHIVES[name](members)) == ["one", "two"]
    assert "4 files of the operating system or an editor" in caplog.text
    assert "1 empty file" in caplog.text
    assert ("1 links or devices" in caplog.text) == (name != "x.zip")


@pytest.mark.parametrize("name", ARCHIVES)
def test_members_are_told_by_their_bytes(tmp_path: Path, name: str) -> None:
    """common-pile's and datasets' archives of JSON lines: each line is a document, whatever the member's name."""
    for member in ("a.jsonl", "part-0", "a.json"):
        assert texts(tmp_path / name, ARCHIVES[name]({member: LINES})) == TEXTS
    packed = {"a.jsonl.gz": gzip.compress(LINES), "b.txt.zst": zstd(b"[1] a text\n"), "c.json": JSON["array"]}
    assert texts(tmp_path / name, ARCHIVES[name](packed)) == [*TEXTS, "[1] a text\n", *TEXTS]


@pytest.mark.parametrize(
    ("member", "data", "way"),
    [
        ("a.html", HTML, "HTML"),
        ("a.pdf", b"%PDF-1.7\n", "PDF"),
        ("a.xlsx", zipped({"xl/workbook.xml": b"<x/>"}), "zip"),
        ("a.csv", CSV.encode(), "table"),
        ("a.txt", LFS, "git lfs"),
        ("a.bin", b"ab\0\0", "NUL"),
        ("a.warc", b"WARC/1.0\r\n", "web_text"),
        ("a.txt", b"caf\xe9", "iconv"),
    ],
)
def test_other_members_are_named(tmp_path: Path, member: str, data: bytes, way: str) -> None:
    for name in ("x.zip", "x.tar"):
        message = refusal(tmp_path / name, ARCHIVES[name]({member: data}))
        assert way in message
        assert member in message


@pytest.mark.parametrize("name", ["part-0.gz", "part-0.zst", "part-0.bz2", "part-0.xz"])
def test_compressed_files_without_another_suffix(tmp_path: Path, name: str) -> None:
    """tritonparse PR 207, datasets#5088, GlobalMLBuildingFootprints#61: `.gz` says nothing of the content."""
    for packing, pack in PACKINGS.items():
        for form in ("lines", "mark", "CRLF", "indented", "UTF-16"):
            assert texts(tmp_path / name, pack(JSON[form])) == TEXTS, (packing, form)
        assert texts(tmp_path / name, pack(b"one\n\n[1] two\n{three}\n")) == ["one\n", "\n", "[1] two\n", "{three}\n"]
        for data, way in ((HTML, "HTML"), (b"WARC/1.0\r\n", "web_text"), (LFS, "git lfs"), (CSV.encode(), ".csv")):
            assert way in refusal(tmp_path / name, pack(data))


def test_texts_under_a_compression(tmp_path: Path) -> None:
    """`book.txt.gz` is one text, as `book.txt`; one that begins with HTML is a text too."""
    for data in (b"Chapter one.\n\nThe end.\n", HTML):
        for suffix, pack in (("gz", gzip.compress), ("zst", zstd), ("xz", lzma.compress), ("bz2", bz2.compress)):
            assert texts(tmp_path / f"x.txt.{suffix}", pack(data)) == [data.decode()]
        assert texts(tmp_path / "x.txt", data) == [data.decode()]


def test_what_is_no_document_of_a_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """macOS writes `._NAME` beside each file of another file system; other files are counted."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "._a.jsonl").write_bytes(APPLE)
    (tmp_path / "a.jsonl~").write_bytes(LINES)
    (tmp_path / "README.md").write_text("# card")
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "more").mkdir()
    caplog.set_level("WARNING")
    assert [document.text for document in read_documents(tmp_path)] == TEXTS
    assert "3 files of the operating system or an editor" in caplog.text
    assert "README.md" in caplog.text
    assert "more" in caplog.text
    with pytest.raises(DataError, match="operating system"):
        list(read_documents(tmp_path / "._a.jsonl"))
