"""End ids of an instruction model, which its checkpoints carry when the tokenizer is read from another directory."""

from __future__ import annotations

import json
import shutil

import pytest

from neox.checkpoint import find_generation_settings, open_checkpoint, reshard, saved_generation_settings
from neox.convert import from_hf, to_hf
from neox.errors import CheckpointError
from neox.generation.startup import choose_checkpoint, one_process, use_end_ids
from neox.plan import config_from_files, resolve, with_trained_model
from neox.tokenizer import tokenizer_of
from tests.errors import raises_naming
from tests.field.hf_models import write_json, write_llama, write_tokenizer

GIVEN = {"eos_token_id": [258, 257], "pad_token_id": 257, "bos_token_id": 7, "temperature": 0.6}


@pytest.fixture
def moved(tmp_path):
    """The configuration of an import whose tokenizer was copied without its settings of generation."""
    write_tokenizer(tmp_path / "hf", ("<|end|>", "<|eot|>", "<|eom|>"))
    write_json(tmp_path / "hf" / "generation_config.json", GIVEN)
    result = from_hf(write_llama(tmp_path / "hf", 259), tmp_path / "ck")
    (tmp_path / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tmp_path / "ck" / name, tmp_path / "tokenizer" / name)
    vocab_file = str(tmp_path / "tokenizer" / "tokenizer.json")
    return config_from_files([result.config_file]).updated({"vocab_file": vocab_file})


def ends_in_generation(config):
    """Return the end ids of a generation with a checkpoint, as the tools start it."""
    config = one_process(with_trained_model(config))
    tokenizer = tokenizer_of(config)
    plan = resolve(config, 1, tokenizer.vocab_size)
    use_end_ids(plan, choose_checkpoint(plan, tokenizer), tokenizer)
    return tokenizer.end_ids


def exported(config, output, checkpoint):
    """Return the settings of generation of an export."""
    return json.loads((to_hf(checkpoint, config, output, verify=False).output / "generation_config.json").read_text())


def test_end_ids_travel_with_a_checkpoint(moved, tmp_path):
    """litgpt#812, vllm#4180: texts end at each id, and exports get back what the import brought."""
    assert tokenizer_of(moved).end_ids == (256,)
    assert ends_in_generation(moved) == (256, 258, 257)
    assert exported(moved, tmp_path / "back", tmp_path / "ck") == {**GIVEN, "eos_token_id": [258, 257, 256]}
    reader = open_checkpoint(tmp_path / "ck" / "global_step0", config=moved)
    assert saved_generation_settings(reshard(reader, tmp_path / "two", tp_size=1, pp_size=2)) == GIVEN


def test_settings_next_to_the_tokenizer_count_first(moved, tmp_path):
    """A user's temperature there is exported; end ids of both directories end texts."""
    write_json(tmp_path / "tokenizer" / "generation_config.json", {"eos_token_id": 256, "temperature": 0.1})
    assert ends_in_generation(moved) == (256, 258, 257)
    expected = {**GIVEN, "temperature": 0.1, "eos_token_id": [256, 258, 257]}
    assert exported(moved, tmp_path / "back", tmp_path / "ck") == expected


def test_end_ids_of_another_tokenizer(moved, tmp_path):
    """Ids of the checkpoint that stand for other tokens of the run's tokenizer end nothing."""
    write_tokenizer(tmp_path / "tokenizer", ("<|end|>", "<|im_start|>", "<|im_end|>"))
    config = moved.updated({"allow_other_tokenizer": True})
    checkpoint = tmp_path / "ck" / "global_step0"
    vocab_file = config.tokenizer.vocab_file
    assert find_generation_settings(config, checkpoint, vocab_file, tokenizer_of(config)) == {}


def test_damaged_settings(moved, tmp_path):
    """A checkpoint's damaged file is named."""
    file = tmp_path / "ck" / "global_step0" / "generation_config.json"
    file.write_text("[1]")
    with raises_naming(CheckpointError, file):
        saved_generation_settings(file.parent)
