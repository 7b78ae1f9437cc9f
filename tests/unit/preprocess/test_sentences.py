"""Datasets of sentences, as BERT's data have them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sentencex", reason="sentencex (requirements/requirements-corpus.txt) is not installed")

from neox.data import BuilderState, IndexedDataset, IndexedDatasetBuilder
from neox.data.masked.masking import MaskingVocabulary
from neox.errors import DataError
from neox.preprocess import PreprocessSettings, TokenizerSpec, preprocess
from neox.preprocess.rank_parts import RankInfo, preprocess_on_rank
from neox.preprocess.sentences import LINES, sentence_splitter
from neox.tokenizer import build_tokenizer
from tests.errors import raises_naming

ROOT = Path(__file__).parents[3]
VOCAB = str(ROOT / "tests" / "golden" / "data" / "tokenizer.json")
SPEC = TokenizerSpec("HFTokenizer", VOCAB)


def write(path: Path, documents: int, seed: int = 0) -> list[list[str]]:
    """Write documents; return the sentences of those that have any."""
    chance = random.Random(seed)
    texts = []
    for _ in range(documents):
        sentences = [chance.choices(["cat", "Dr. Who", "ran", "3.5"], k=5) for _ in range(chance.randint(0, 5))]
        texts.append(" ".join("The " + " ".join(words) + "." for words in sentences))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    split = sentence_splitter("en")
    return [parts for text in texts if (parts := split(text))]


def settings(tmp_path: Path, *inputs: Path, workers: int = 1) -> PreprocessSettings:
    return PreprocessSettings(tuple(map(str, inputs)), str(tmp_path / "out"), SPEC, sentences="en", workers=workers)


def test_a_sequence_is_a_sentence(tmp_path: Path) -> None:
    expected = write(tmp_path / "a.jsonl", 40)
    report = preprocess(settings(tmp_path, tmp_path / "a.jsonl"))
    tokenizer, made = build_tokenizer("HFTokenizer", VOCAB), IndexedDataset(tmp_path / "out_text_sentence")
    assert np.diff(made.document_index).tolist() == [len(parts) for parts in expected]
    assert max(map(len, expected)) > 1
    sentences = [sentence for parts in expected for sentence in parts]
    assert [made[i].tolist() for i in range(len(made))] == [tokenizer.encode(sentence) for sentence in sentences]
    assert report.documents == {"text": len(expected)}
    assert preprocess(settings(tmp_path, tmp_path / "a.jsonl")).fresh is False


def test_ranks_make_the_same_bytes(tmp_path: Path) -> None:
    inputs = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for seed, path in enumerate(inputs):
        write(path, 30, seed)
    whole = settings(tmp_path, *inputs)
    preprocess(whole)
    files = [tmp_path / f"out_text_sentence.{end}" for end in ("bin", "idx")]
    alone = [file.read_bytes() for file in files]
    for file in (*files, tmp_path / "out_text_sentence.json"):
        file.unlink()
    for rank in (1, 0):
        preprocess_on_rank(whole, RankInfo(rank, 2, 1))
    assert [file.read_bytes() for file in files] == alone


@pytest.mark.parametrize("impl", ["mmap", "cached"])
def test_a_builder_of_sentences_resumes(tmp_path: Path, impl: str) -> None:
    counts, sizes = [2, 0, 3], [4, 1, 2, 5, 3]
    ids = np.arange(sum(sizes))
    whole = IndexedDatasetBuilder(tmp_path / "whole", np.uint16, impl=impl, sentences=True)
    whole.add_documents(ids, sizes, counts)
    whole.finalize()
    first = IndexedDatasetBuilder(tmp_path / "part", np.uint16, impl=impl, sentences=True)
    first.add_documents(ids[:5], sizes[:2], counts[:2])
    state = BuilderState(**json.loads(json.dumps(first.state())))
    first.add_documents(ids[5:7], sizes[2:3], [1])  # lost
    second = IndexedDatasetBuilder(tmp_path / "part", np.uint16, impl=impl, sentences=True, resume=state)
    second.add_documents(ids[5:], sizes[2:], counts[2:])
    second.finalize()
    for end in ("bin", "idx"):
        assert (tmp_path / f"part.{end}").read_bytes() == (tmp_path / f"whole.{end}").read_bytes()
    assert not list(tmp_path.glob("*.partial"))
    assert IndexedDataset(tmp_path / "part").document_index.tolist() == [0, 2, 2, 5]
    with raises_naming(DataError, tmp_path / "bad"):
        IndexedDatasetBuilder(tmp_path / "bad", np.uint16, sentences=True).add_documents(ids, sizes, [1, 1])


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 3)
    with raises_naming(DataError, "--language English"):
        preprocess(PreprocessSettings((str(tmp_path / "a.jsonl"),), str(tmp_path / "o"), SPEC, sentences="English"))
    with raises_naming(DataError, "--append-eod"):
        preprocess(
            PreprocessSettings((str(tmp_path / "a.jsonl"),), str(tmp_path / "o"), SPEC, sentences="en", append_eod=True)
        )


def test_presplit_documents_give_the_same_data(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 20)
    tools = [sys.executable, str(ROOT / "tools" / "presplit_sentences.py")]
    paths = ["--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "lines.jsonl.zst")]
    subprocess.run([*tools, *paths], check=True, capture_output=True)
    preprocess(settings(tmp_path, tmp_path / "a.jsonl"))
    lines = PreprocessSettings((str(tmp_path / "lines.jsonl.zst"),), str(tmp_path / "l"), SPEC, sentences=LINES)
    preprocess(lines)
    for end in ("bin", "idx"):
        made = [(tmp_path / f"{name}_text_sentence.{end}").read_bytes() for name in ("l", "out")]
        assert made[0] == made[1]


def test_a_missing_sentencepiece_model_is_trained(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="sentencepiece (requirements/requirements-corpus.txt) is not installed")
    write(tmp_path / "a.jsonl", 60)
    tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(tmp_path / "a.jsonl")]
    model = ["--tokenizer-type", "SPMTokenizer", "--vocab-file", str(tmp_path / "spm.model")]
    flags = ["--output-prefix", str(tmp_path / "out"), "--split-sentences", "--train-vocab-size", "300"]
    subprocess.run([*tool, *model, *flags], check=True, capture_output=True)
    vocabulary = MaskingVocabulary.of(build_tokenizer("SPMTokenizer", tmp_path / "spm.model"))
    assert len({vocabulary.cls, vocabulary.sep, vocabulary.mask, vocabulary.pad}) == 4
    assert vocabulary.continues.any()
    assert IndexedDataset(tmp_path / "out_text_sentence").has_sentences
    wrong = subprocess.run(
        [*tool, "--tokenizer-type", "HFTokenizer", *flags], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert "--train-vocab-size" in wrong.stderr
