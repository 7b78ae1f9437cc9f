"""Tokenizer files of an export, and its upload."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest

from neox.config import NeoXConfig
from neox.convert import upload
from neox.convert.hf_directory import check_new_directory
from neox.convert.hf_tokenizer import find_tokenizer, write_tokenizer
from neox.errors import ConfigError, ConversionError
from neox.families import FAMILIES
from tests.errors import raises_naming


def test_gpt2_files(tmp_path):
    characters = [*"abcdefgh", "Ġ", "<|endoftext|>", "ab"]
    (tmp_path / "v.json").write_text(json.dumps({c: i for i, c in enumerate(characters)}))
    (tmp_path / "m.txt").write_text("#version: 0.2\na b\n")
    config = NeoXConfig.from_flat(
        {
            "tokenizer_type": "GPT2BPETokenizer",
            "vocab_file": str(tmp_path / "v.json"),
            "merge_file": str(tmp_path / "m.txt"),
        }
    )
    source = find_tokenizer(config)
    assert source is not None
    (tmp_path / "hf").mkdir()
    write_tokenizer(source, tmp_path / "hf", FAMILIES["gpt_neox"], max_length=32)
    from transformers import AutoTokenizer

    (tmp_path / "hf" / "config.json").write_text('{"model_type": "gpt_neox"}')
    loaded = AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
    assert loaded("abc").input_ids == source.tokenizer.encode("abc") == [10, 2]
    assert loaded.eos_token_id == source.tokenizer.eod == 9


class Hub:
    """A hub that remembers, or refuses."""

    calls: list = []  # noqa: RUF012
    failure: Exception

    def create_repo(self, repository, **kwargs):
        if repository == "nobody/no":
            raise self.failure
        self.calls.append((repository, kwargs["private"]))
        return f"https://huggingface.co/{repository}"

    def create_branch(self, repository, branch, exist_ok):
        self.calls.append((repository, branch, exist_ok))

    def upload_folder(self, folder_path, repo_id, revision):
        self.calls.append((folder_path, repo_id, revision))


def test_upload(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert upload(tmp_path, "me/model") == "https://huggingface.co/me/model"
    assert Hub.calls == [("me/model", True), (str(tmp_path), "me/model", None)]
    upload(tmp_path, "me/model", "step4")
    assert Hub.calls[-2:] == [("me/model", "step4", True), (str(tmp_path), "me/model", "step4")]
    for failure in (OSError("no network"), type("ConnectError", (Exception,), {})("no network")):
        Hub.failure = failure
        with raises_naming(ConversionError, tmp_path, "nobody/no", "no network"):
            upload(tmp_path, "nobody/no")


def test_directories_that_cannot_be_written_end_as_wrong_flags(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConversionError) as caught:
        check_new_directory(tmp_path / "file" / "hf", overwrite=False)
    assert caught.value.exit_code == ConfigError.exit_code
    check_new_directory(tmp_path / "new" / "hf", overwrite=False)
    assert not (tmp_path / "new" / "hf").exists()
