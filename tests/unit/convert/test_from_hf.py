"""Imports from Hugging Face directories: bin and safetensors, sharded or not, and what is refused."""

from __future__ import annotations

import json
import logging
import sys

import pytest
import torch
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file as save_safetensors
from tokenizers import Tokenizer, models

from neox.checkpoint import CheckpointReader, write_full_layer
from neox.config import NeoXConfig
from neox.convert import from_hf, to_hf
from neox.convert.verification import single_rank_plan
from neox.errors import ConfigError, ConversionError
from neox.families import FAMILIES
from neox.plan import config_from_files, resolve
from tests.errors import raises_naming
from tests.unit.checkpoint.synthetic import seeded_weights, write_checkpoint
from tests.unit.convert.test_to_hf import SIZES


@pytest.fixture
def exported(tmp_path):
    config = NeoXConfig.from_flat({**SIZES, "gpt_j_residual": True})
    layers = single_rank_plan(config, 96).layers
    weights = seeded_weights(layers, dtype=torch.float16)
    directory = write_checkpoint(tmp_path / "global_step3", layers, weights)
    to_hf(directory, config, tmp_path / "hf", verify=False)
    return tmp_path / "hf", layers, weights


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def as_bin(directory, *, shards, extra=None):
    """Pythia's form: bin files, one or two, with the buffers that old transformers saved."""
    state = load_safetensors(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    state["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool)
    state["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    state["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(4)
    state.update(extra or {})
    if shards == 1:
        torch.save(state, directory / "pytorch_model.bin")
        return
    weight_map = {key: f"pytorch_model-{1 + i % 2:05d}-of-00002.bin" for i, key in enumerate(state)}
    for file in set(weight_map.values()):
        torch.save({k: v for k, v in state.items() if weight_map[k] == file}, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("shards", [1, 2])
def test_bin_files_with_old_buffers(exported, tmp_path, shards):
    directory, layers, weights = exported
    as_bin(directory, shards=shards)
    result = from_hf(directory, tmp_path / "back", model_parallel_size=2)
    reader = CheckpointReader(result.checkpoint, layers)
    assert (reader.tp_size, reader.iteration, result.parameters) == (2, 0, layers.numel)
    assert all(torch.equal(reader.full(*key), value) for key, value in weights.items())
    config = config_from_files([result.config_file])
    assert config.model.gpt_j_residual
    assert config.model.rotary_pct == 1.0
    assert config.checkpoint.finetune
    assert (tmp_path / "back" / "latest").read_text() == "global_step0"


def test_a_config_of_transformers_4(exported, tmp_path):
    directory, _, _ = exported
    config = json.loads((directory / "config.json").read_text())
    del config["rope_parameters"]
    (directory / "config.json").write_text(json.dumps({**config, "rotary_pct": 0.25, "rotary_emb_base": 500000}))
    loaded = config_from_files([from_hf(directory, tmp_path / "back").config_file])
    assert (loaded.model.rotary_pct, loaded.model.rotary_emb_base) == (0.25, 500000)


def test_precision(exported, tmp_path):
    directory, layers, weights = exported
    reader = CheckpointReader(from_hf(directory, tmp_path / "back", precision="fp32").checkpoint, layers)
    assert torch.equal(reader.full(0, "word_embeddings.weight"), weights[0, "word_embeddings.weight"].float())


def test_a_run_keeps_the_rows_of_the_vocabulary(exported, tmp_path):
    """Without the key, 96 rows would be padded to 128."""
    directory, _, _ = exported
    config = config_from_files([from_hf(directory, tmp_path / "back").config_file])
    batch = {"train_micro_batch_size_per_gpu": 1}
    assert resolve(config.updated(batch), 1, vocab_size=90).padded_vocab_size == 96
    without = config.updated(batch, without=("padded_vocab_size",))
    assert resolve(without, 1, vocab_size=90).padded_vocab_size == 128


def test_what_cannot_be_expressed_is_named(exported, tmp_path):
    directory, _, _ = exported
    tied = tmp_path / "tied"
    tied.mkdir()
    (tied / "config.json").write_text('{"model_type": "phi", "tie_word_embeddings": true}')
    with raises_naming(ConversionError, "head_bias", lines=2):
        from_hf(tied, tmp_path / "back")
    edit_config(directory, hidden_act="quick_gelu")
    with raises_naming(ConversionError, "hidden_act", "quick_gelu", lines=2):
        from_hf(directory, tmp_path / "back")
    edit_config(directory, model_type="no_such_model")
    with raises_naming(ConversionError, "model_type", "no_such_model", f"{len(FAMILIES)} families"):
        from_hf(directory, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_missing_and_unknown_weights(exported, tmp_path):
    directory, _, _ = exported
    state = load_safetensors(directory / "model.safetensors")
    state["gpt_neox.layers.0.extra.weight"] = state.pop("gpt_neox.layers.0.mlp.dense_h_to_4h.bias")
    save_safetensors(state, directory / "model.safetensors")
    with pytest.raises(ConversionError) as refused:
        from_hf(directory, tmp_path / "back")
    _, missing, unknown = str(refused.value).splitlines()
    assert missing.endswith("gpt_neox.layers.0.mlp.dense_h_to_4h.bias")
    assert unknown.endswith("gpt_neox.layers.0.extra.weight")


def test_broken_or_missing_files(exported, tmp_path):
    directory, _, _ = exported
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:500])
    with raises_naming(ConversionError, path):
        from_hf(directory, tmp_path / "back")
    path.unlink()
    with raises_naming(ConversionError, directory):
        from_hf(directory, tmp_path / "back")
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "x.bin"}}))
    with raises_naming(ConversionError, directory / "pytorch_model.bin.index.json", directory / "x.bin"):
        from_hf(directory, tmp_path / "back")
    (directory / "config.json").write_text("{")
    with raises_naming(ConversionError, directory / "config.json"):
        from_hf(directory, tmp_path / "back")


def test_a_degree_that_does_not_divide(exported, tmp_path):
    with raises_naming(ConfigError, "--model-parallel-size 5", "num_attention_heads (4)"):
        from_hf(exported[0], tmp_path / "back", model_parallel_size=5)


@pytest.mark.parametrize(
    ("name", "converter"),
    [("consolidated.00.pth", "convert_llama_weights_to_hf"), ("iter_1/mp_rank_00/model_optim_rng.pt", "megatron_gpt2")],
)
def test_formats_of_others_name_their_converter(tmp_path, name, converter):
    (tmp_path / "in" / name).parent.mkdir(parents=True)
    (tmp_path / "in" / name).write_bytes(b"")
    with raises_naming(ConversionError, tmp_path / "in", converter):
        from_hf(tmp_path / "in", tmp_path / "out")


def test_settings_of_generation_come_along(exported, tmp_path, caplog):
    directory, _, _ = exported
    vocabulary = {"a": 0, "b": 1, "<|endoftext|>": 2, "<|end|>": 3}
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    given = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 3], "bos_token_id": 1, "output_attentions": False}
    (directory / "generation_config.json").write_text(json.dumps(given))
    with caplog.at_level(logging.INFO):
        imported = from_hf(directory, tmp_path / "back")
    assert "exports get temperature, top_p back" in caplog.text
    to_hf(imported.checkpoint, config_from_files([imported.config_file]), tmp_path / "out", verify=False)
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {key: written[key] for key in ("temperature", "top_p", "eos_token_id")} == {
        "temperature": 0.6,
        "top_p": 0.9,
        "eos_token_id": [2, 3],
    }


def test_an_interrupted_import_goes_on_after_its_layers(exported, tmp_path, monkeypatch):
    directory, layers, weights = exported
    written: list[int] = []

    def write(path, layer, state, tp_size):
        if len(written) == 2:
            raise KeyboardInterrupt
        write_full_layer(path, layer, state, tp_size)
        written.append(layer.index)

    monkeypatch.setattr(sys.modules["neox.convert.from_hf"], "write_full_layer", write)
    with pytest.raises(KeyboardInterrupt):
        from_hf(directory, tmp_path / "back", model_parallel_size=2)
    assert [path.name.startswith(".import-") for path in (tmp_path / "back").iterdir()] == [True]
    before = list(written)
    written.clear()

    def write_on(path, layer, state, tp_size):
        write_full_layer(path, layer, state, tp_size)
        written.append(layer.index)

    monkeypatch.setattr(sys.modules["neox.convert.from_hf"], "write_full_layer", write_on)
    result = from_hf(directory, tmp_path / "back", model_parallel_size=2)
    assert before + written == [layer.index for layer in layers.weight_layers]
    assert not list((tmp_path / "back").glob(".import-*"))
    reader = CheckpointReader(result.checkpoint, layers)
    assert all(torch.equal(reader.full(*key), value) for key, value in weights.items())
    assert list(result.checkpoint.glob("*.done")) == []


def test_another_import_does_not_take_its_layers(exported, tmp_path):
    directory, layers, _ = exported
    (tmp_path / "back" / ".import-0123").mkdir(parents=True)
    (tmp_path / "back" / ".import-0123" / "0.done").touch()
    result = from_hf(directory, tmp_path / "back")
    assert not (tmp_path / "back" / ".import-0123").exists()
    assert CheckpointReader(result.checkpoint, layers).full(0, "word_embeddings.weight").shape[0] == 96
