"""Tokens that only the files next to a `tokenizer.json` name: imports give the ids of transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from neox.convert.hf_tokenizer import import_tokenizer
from neox.errors import ConversionError
from neox.tokenizer import build_tokenizer
from tests.errors import raises_naming
from tests.field.hf_models import write_json, write_tokenizer

_FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
_END, _NEW = {"content": "<|end|>", **_FLAGS}, {"content": "<|new|>", **_FLAGS}
TEXT = "a<|new|>b[PAD] c <|end|>"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "decoder": ({"added_tokens_decoder": {"256": _END, "257": _NEW}}, {}),
    "decoder that strips": ({"added_tokens_decoder": {"256": {**_END, "lstrip": True}}}, {}),
    "decoder that keeps the map out": (
        {"added_tokens_decoder": {"256": _END}},
        {"special_tokens_map.json": {"eos_token": "<|new|>"}, "added_tokens.json": {"<|new|>": 257}},
    ),
    "added_tokens.json": ({}, {"added_tokens.json": {"<|new|>": 257}}),
    "two in added_tokens.json": ({"pad_token": "[PAD]"}, {"added_tokens.json": {"[PAD]": 258, "<|new|>": 257}}),
    "pad_token": ({"pad_token": "[PAD]"}, {}),
    "bos_token of the vocabulary": ({"bos_token": "a"}, {}),
    "additional_special_tokens": ({"additional_special_tokens": ["<|new|>", "[PAD]"]}, {}),
    "extra_special_tokens": ({"extra_special_tokens": {"image_token": "<|new|>"}}, {}),
    "eos_token of the map": ({"eos_token": None}, {"special_tokens_map.json": {"eos_token": "<|end|>"}}),
    "another eos_token in the map": ({}, {"special_tokens_map.json": {"eos_token": _NEW}}),
    "pad_token of the map": ({}, {"special_tokens_map.json": {"pad_token": "[PAD]"}}),
}


def write_files(directory, config, files):
    write_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    merged = {**json.loads(path.read_text()), **config}
    write_json(path, {key: value for key, value in merged.items() if value is not None})
    for name, content in files.items():
        write_json(directory / name, content)
    write_json(directory / "config.json", {"model_type": "llama"})


@pytest.mark.parametrize("case", CASES)
def test_imports_give_the_ids_of_transformers(tmp_path, case):
    write_files(tmp_path / "hf", *CASES[case])
    (tmp_path / "ck").mkdir()
    theirs = AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
    imported = import_tokenizer(tmp_path / "hf", tmp_path / "ck")
    ours = build_tokenizer("HFTokenizer", imported)
    assert ours.encode(TEXT) == theirs(TEXT)["input_ids"]
    assert (ours.vocab_size, ours.eod) == (len(theirs), theirs.eos_token_id)
    write_json(tmp_path / "ck" / "config.json", {"model_type": "llama"})
    assert AutoTokenizer.from_pretrained(str(tmp_path / "ck"))(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]


@pytest.mark.parametrize(
    ("config", "files", "place"),
    [
        ({"added_tokens_decoder": {"259": _NEW}}, {}, "tokenizer_config.json"),
        ({"added_tokens_decoder": {"256": _NEW}}, {}, "tokenizer_config.json"),
        ({}, {"added_tokens.json": {"<|new|>": 270}}, "added_tokens.json"),
    ],
)
def test_ids_that_contradict_each_other(tmp_path, config, files, place):
    write_files(tmp_path / "hf", config, files)
    (tmp_path / "ck").mkdir()
    with raises_naming(ConversionError, tmp_path / "hf" / place, "<|new|>", "257"):
        import_tokenizer(tmp_path / "hf", tmp_path / "ck")


def test_a_decoder_that_is_null_is_absent(tmp_path):
    write_files(tmp_path, {}, {})
    path = tmp_path / "tokenizer_config.json"
    write_json(path, {**json.loads(path.read_text()), "added_tokens_decoder": None})
    (tmp_path / "ck").mkdir()
    assert build_tokenizer("HFTokenizer", import_tokenizer(tmp_path, tmp_path / "ck")).vocab_size == 257
