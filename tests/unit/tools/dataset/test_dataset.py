"""tools/dataset.py: what it says of golden data, and what it makes of it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from neox.corpus import Document, read_documents, write_documents
from neox.data import IndexedDataset, IndexedDatasetBuilder, Sidecar, read_sidecar, write_sidecar
from neox.errors import DataError, TokenizerError
from tests.errors import raises_naming
from tools.dataset.command import parser

ROOT = Path(__file__).parents[4]
GOLDEN = ROOT / "tests" / "golden" / "data"
DATA = str(GOLDEN / "small_text_document")
VOCAB = ["--vocab-file", str(GOLDEN / "tokenizer.json")]


@pytest.fixture
def tool(capsys):
    """Run the tool in this process: exit code and what it printed."""

    def run(*arguments):
        args = parser().parse_args([str(argument) for argument in arguments])
        capsys.readouterr()
        code = args.run(args)
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def described(tmp_path):
    """A dataset of 40 documents ending with id 0, with a sidecar."""
    sizes = np.arange(40) % 7 + 1
    ids = np.arange(sizes.sum()) % 49 + 1
    ids[np.cumsum(sizes) - 1] = 0
    prefix = tmp_path / "described"
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(ids, sizes)
    sidecar = Sidecar("HFTokenizer", "abc", 50, 0, True, **builder.progress, inputs=("a.jsonl",))
    write_sidecar(prefix, sidecar)
    return prefix


def test_info_counts(tool, described):
    code, text = tool("info", DATA, described)
    assert code == 0
    for figure in ("1,648 documents", "205,143 tokens", "410,286 bytes", "uint16", "2 to 6,183", "median 48"):
        assert figure in text
    for figure in ("HFTokenizer", "50 ids", "largest here 49"):
        assert figure in text
    facts = json.loads(tool("info", DATA, "--json")[1])
    assert sum(row["documents"] for row in facts["histogram"]) == 1648
    assert sum(row["tokens"] for row in facts["histogram"]) == 205143
    assert all(
        row["low"] * row["documents"] <= row["tokens"] <= row["high"] * row["documents"] for row in facts["histogram"]
    )


def test_info_of_nothing(tool, tmp_path):
    with IndexedDatasetBuilder(tmp_path / "x", np.int32):
        pass
    assert "0 documents, 0 tokens" in tool("info", tmp_path / "x")[1]


def test_show_documents_and_samples(tool):
    assert "cpan -u<|endoftext|>" in tool("show", DATA, "--documents", "3", *VOCAB)[1]
    text = tool("show", DATA, "--documents", "1,3-4", "--ids", *VOCAB)[1]
    assert [line.split(":")[0] for line in text.splitlines()[::2]] == [f"--- document {n}" for n in (1, 3, 4)]
    text = tool("show", DATA, "--samples", "0", "--seq-length", 128, "--num-samples", 240)[1]
    assert len(text.splitlines()[1].split()) == 129
    for bad in ("1648", "x", "5-4", ""):
        with raises_naming(DataError, repr(bad or ",")):
            tool("show", DATA, "--documents", bad or ",")


def test_verify_good_data(tool, described):
    code, text = tool("verify", DATA, "--eod", 0, *VOCAB)
    assert code == 0
    assert ": good" in text
    assert "6 end-of-document ids" in text
    code, text = tool("verify", described)
    assert code == 0
    assert {f"{described}: good", "40 documents", "155 tokens"} == {*text.strip().split(", ")}


def test_verify_says_all_that_is_wrong(tool, described):
    code, text = tool("verify", described, "--vocab-size", 40, "--eod", 7)
    assert code == 1
    assert len(text.splitlines()) == 4  # the state; ids, ends, and a smaller id at an end inside
    assert "outside 0 to 39, the first, 40," in text
    assert "end-of-document id 7" in text
    raw = bytearray(Path(f"{described}.bin").read_bytes())
    raw[0:2] = (60000).to_bytes(2, "little")
    Path(f"{described}.bin").write_bytes(raw)
    code, text = tool("verify", described, *VOCAB)
    assert code == 1
    assert "49 as its largest id" in text
    assert "outside 0 to 999, the first, 60000," in text
    assert "made with another tokenizer" in text
    Path(f"{described}.bin").write_bytes(raw[:-2])
    code, text = tool("verify", described, DATA)
    assert code == 1
    assert "truncated or from another run" in text
    assert f"{DATA}: good" in text


@pytest.mark.parametrize("cases", [30, pytest.param(600, marks=pytest.mark.slow)])
def test_verify_sees_every_flipped_bit(tool, described, cases):
    path, random = Path(f"{described}.bin"), np.random.default_rng(0)
    original = path.read_bytes()
    for _ in range(cases):
        raw = bytearray(original)
        raw[random.integers(len(raw))] ^= 1 << int(random.integers(8))
        path.write_bytes(raw)
        code, text = tool("verify", described)
        assert code == 1
        assert "checksum" in text


def test_split_and_merge_give_back_every_document(tool, described, tmp_path):
    out = tmp_path / "parts" / "x"
    code, text = tool("split", described, "--output-prefix", out, "--split", "6,3,1", "--seed", 5)
    assert code == 0
    assert [int(line.split()[1]) for line in text.splitlines()] == [24, 12, 4]
    data, seen = IndexedDataset(described), []
    for name in ("train", "valid", "test"):
        part = IndexedDataset(f"{out}_{name}")
        origins = [line.split("\t") for line in Path(f"{out}_{name}.tsv").read_text().splitlines()]
        assert [part[i].tolist() for i in range(len(part))] == [data[int(number)].tolist() for _, number in origins]
        assert {prefix for prefix, _ in origins} == {str(described)}
        seen += [int(number) for _, number in origins]
        sidecar = read_sidecar(f"{out}_{name}")
        assert (sidecar.documents, sidecar.tokens) == (part.num_documents, part.num_tokens)
        assert tool("verify", f"{out}_{name}")[0] == 0
    assert sorted(seen) == list(range(40))
    assert seen[:24] == sorted(seen[:24])
    with raises_naming(DataError, f"{out}_train.idx", "--output-prefix"):
        tool("split", described, "--output-prefix", out)
    tool("split", described, "--output-prefix", f"{out}2", "--split", "6,3,1", "--seed", 5)
    assert Path(f"{out}2_valid.bin").read_bytes() == Path(f"{out}_valid.bin").read_bytes()
    tool("merge", f"{out}_train", f"{out}_valid", f"{out}_test", "--output-prefix", tmp_path / "all")
    assert tool("verify", tmp_path / "all")[0] == 0
    merged = IndexedDataset(tmp_path / "all")
    assert (merged.num_documents, merged.num_tokens) == (40, 155)
    tool("merge", described, DATA, "--output-prefix", tmp_path / "mixed")
    assert read_sidecar(tmp_path / "mixed") is None


@pytest.mark.parametrize(
    ("split", "written"), [("95,5", ["train", "valid"]), ("9/0/1", ["test", "train"]), ("1", ["train"])]
)
def test_a_part_without_a_share_is_not_written(tool, described, tmp_path, split, written):
    """An empty `_test` is a dataset that no run can open."""
    for source in (described, GOLDEN / "small.jsonl.zst"):
        out = tmp_path / Path(source).name
        code, text = tool("split", source, "--output-prefix", out, "--split", split)
        assert code == 0
        assert sorted(line.split(":")[0].rpartition("_")[2] for line in text.splitlines()) == written
        named = {path.name.removeprefix(f"{out.name}_").split(".")[0] for path in tmp_path.glob(f"{out.name}_*")}
        assert sorted(named) == written
        assert sum(int(line.split()[1].replace(",", "")) for line in text.splitlines()) > 30


def test_merging_data_of_two_tokenizers_is_refused(tool, described, tmp_path):
    with IndexedDatasetBuilder(tmp_path / "other", np.uint16) as builder:
        builder.add_document([1])
    write_sidecar(tmp_path / "other", Sidecar("HFTokenizer", "def", 50, 0, True, 1, 1, 1))
    with raises_naming(DataError, "HFTokenizer abc", "HFTokenizer def"):
        tool("merge", described, tmp_path / "other", "--output-prefix", tmp_path / "out")
    assert not (tmp_path / "out.idx").exists()


def test_documents_are_divided_before_tokenizing(tool, tmp_path):
    source, out = GOLDEN / "small.jsonl.zst", tmp_path / "x"
    assert tool("split", source, "--output-prefix", out, "--split", "8,1,1", "--seed", 3)[0] == 0
    texts = sorted(document.text for document in read_documents(source))
    found, counts = [], []
    for name in ("train", "valid", "test"):
        part = [document.text for document in read_documents(f"{out}_{name}.jsonl.zst")]
        places = [line.split("\t") for line in Path(f"{out}_{name}.tsv").read_text().splitlines()]
        assert {file for file, _ in places} == {str(source)}
        numbers = [int(number) for _, number in places]
        assert numbers == sorted(numbers)
        counts.append(len(numbers))
        found += part
    assert sorted(found) == texts
    assert counts[0] > 6 * counts[1] > 0
    with raises_naming(DataError, f"{out}_train.jsonl.zst", "--output-prefix"):
        tool("split", source, "--output-prefix", out)
    (tmp_path / "bad.jsonl.zst").write_bytes(source.read_bytes()[:5000])
    with raises_naming(DataError, "bad.jsonl.zst"):
        tool("split", tmp_path / "bad.jsonl.zst", "--output-prefix", tmp_path / "y")
    assert not list(tmp_path.glob("y_*"))


def test_an_output_that_cannot_be_written_is_said(tool, tmp_path):
    (tmp_path / "file").write_text("x")
    out = tmp_path / "file" / "out"
    for command in (["split", GOLDEN / "small.jsonl.zst"], ["split", DATA], ["merge", DATA]):
        with raises_naming(DataError, out):
            tool(*command, "--output-prefix", out)


def test_count_names_sources(tool, tmp_path):
    documents = [Document("ab", {"pile_set_name": "Books"}), Document("é"), Document("c", {"pile_set_name": "Books"})]
    write_documents(tmp_path / "x.jsonl.zst", documents)
    code, text = tool("count", tmp_path / "x.jsonl.zst", DATA)
    assert code == 0
    assert [line.split() for line in text.splitlines()] == [
        ["1,648", "documents", "205,143", "tokens", DATA],
        ["2", "documents", "3", "bytes", "of", "text", "Books"],
        ["1", "documents", "2", "bytes", "of", "text", "(unnamed)"],
    ]
    assert json.loads(tool("count", tmp_path / "x.jsonl.zst", "--json")[1])["Books"]["documents"] == 2
    with raises_naming(DataError, tmp_path / "missing"):
        tool("count", tmp_path / "missing")


def test_a_missing_tokenizer_file_is_said(tool, tmp_path):
    with pytest.raises(TokenizerError):
        tool("show", DATA, "--vocab-file", tmp_path / "none.json")


def test_labels_are_shown_verified_and_split_as_their_tokens_are(tool, described, tmp_path):
    data, prefix = IndexedDataset(described), tmp_path / "labels"
    targets = np.where(np.arange(data.num_tokens) % 3 == 2, data.tokens.astype(np.int32), -100)
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        builder.add_documents(targets, data.sizes)
    sidecar = Sidecar("HFTokenizer", "abc", 50, 0, True, **builder.progress, settings={"labels": True})
    write_sidecar(prefix, sidecar)
    assert tool("verify", prefix)[0] == 0
    write_sidecar(prefix, dataclasses.replace(sidecar, settings={}))
    code, text = tool("verify", prefix)
    assert code == 1
    assert "-100, in document 0" in text
    text = tool("show", described, "--labels", prefix, "--documents", "1,2")[1]
    assert text.splitlines()[:3] == ["--- document 1: 2 tokens, 1 in the loss", f"- {data[1][0]}", f"+ {data[1][1]}"]
    for name in (described, prefix):
        assert tool("split", name, "--output-prefix", f"{name}_part", "--split", "50,50", "--seed", 3)[0] == 0
    for part in ("train", "valid"):
        tokens, labels = (IndexedDataset(f"{name}_part_{part}") for name in (described, prefix))
        assert tokens.sizes.tolist() == labels.sizes.tolist()
        counted = labels.tokens >= 0
        assert (tokens.tokens[counted] == labels.tokens[counted]).all()
    with raises_naming(DataError, DATA, prefix):
        tool("show", DATA, "--labels", prefix)


def test_sentences_are_shown_as_those_of_their_documents(tool, tmp_path):
    prefix = tmp_path / "sentences"
    with IndexedDatasetBuilder(prefix, np.uint16, sentences=True) as builder:
        builder.add_documents(np.arange(10, 21), [2, 3, 1, 5], [3, 0, 1])
    out = tool("info", prefix)[1]
    for figure in ("3 documents", "4 sentences", "11 tokens", "1 to 5"):
        assert figure in out
    found = tool("show", prefix, "--documents", "0-2")[1].splitlines()
    assert found[::2] == [
        *(f"--- document 0, sentence {n}: {size} tokens" for n, size in enumerate([2, 3, 1])),
        "--- document 2, sentence 0: 5 tokens",
    ]
    assert found[-1] == "16 17 18 19 20"
    with raises_naming(DataError, "'3'"):
        tool("show", prefix, "--documents", "3")
    with raises_naming(DataError, prefix, "--samples"):
        tool("show", prefix, "--samples", "0")
    assert tool("verify", prefix)[0] == 0
