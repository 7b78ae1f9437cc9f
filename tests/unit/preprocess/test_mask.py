"""Labels of what follows a delimiter, as gpt-neox's tool makes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from neox.data import IndexedDataset, read_sidecar
from neox.errors import DataError
from neox.preprocess import PreprocessSettings, TokenizerSpec, preprocess
from neox.preprocess.encode import EncodedKey, labels_after
from tests.errors import raises_naming


def expected(ids: list[int], pattern: list[int]) -> list[int]:
    """The labels of one document: -100 up to and including the first occurrence."""
    for start in range(len(ids) - len(pattern) + 1):
        if ids[start : start + len(pattern)] == pattern:
            end = start + len(pattern)
            return [-100] * end + ids[end:]
    return ids


@pytest.mark.parametrize("pattern", [[1], [1, 2], [1, 1], [0, 1, 0], [2, 2, 2, 2]])
def test_labels_of_random_documents(pattern: list[int]) -> None:
    random = np.random.default_rng(len(pattern))
    lengths = random.integers(0, 9, 200).astype(np.int32)
    ids = random.integers(0, 3, lengths.sum()).astype(np.int32)
    found = labels_after(EncodedKey(ids, lengths), pattern).tolist()
    documents = np.split(ids, np.cumsum(lengths)[:-1])
    assert found == [label for document in documents for label in expected(document.tolist(), pattern)]
    assert labels_after(EncodedKey(ids[:0], lengths[:0]), pattern).tolist() == []


def test_a_dataset_and_its_labels(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("Q: 1? A: 2. A: 3", "no delimiter")))
    run = PreprocessSettings(
        inputs=(str(source),),
        output_prefix=str(tmp_path / "out"),
        tokenizer=TokenizerSpec("CharLevelTokenizer"),
        keys=("text", "label"),
        workers=1,
        mask_before=tuple(b"A: "),
    )
    assert preprocess(run).documents == {"text": 2, "label": 2}
    texts, labels = (IndexedDataset(tmp_path / f"out_{key}_document") for key in ("text", "label"))
    assert texts.sizes.tolist() == labels.sizes.tolist()
    assert bytes(labels[0][labels[0] >= 0].tolist()) == b"2. A: 3"
    assert labels[1].tolist() == texts[1].tolist() == list(b"no delimiter")
    sidecar = read_sidecar(labels.prefix)
    assert sidecar is not None
    assert sidecar.settings["labels"] is True
    assert preprocess(replace(run, mask_before=(65,))).fresh
    with raises_naming(DataError, "--mask-before-token", "--jsonl-keys"):
        preprocess(replace(run, keys=("text", "body", "label")))
