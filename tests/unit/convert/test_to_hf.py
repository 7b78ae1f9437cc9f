"""What an export refuses, writes and leaves behind; without comparing logits (tests/parity does)."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from neox.checkpoint import CheckpointReader, averaged_file, save_file
from neox.config import NeoXConfig
from neox.convert import from_hf, to_hf
from neox.convert.hf_directory import new_directory
from neox.convert.verification import single_rank_plan
from neox.errors import CheckpointError, ConfigError, ConversionError
from neox.ops import DTYPES
from neox.parallel import shard
from neox.plan import config_from_files
from neox.plan.network.export_form import export_note
from tests.errors import raises_naming
from tests.unit.checkpoint.synthetic import seeded_weights, write_checkpoint

GOLDEN = Path(__file__).parents[2] / "golden"
SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 32,
    "pos_emb": "rotary",
    "output_layer_parallelism": "column",
    "no_weight_tying": True,
}
GLM4_MOE = {
    "num_kv_heads": 2,
    "mlp_width": 72,
    "activation": "swiglu",
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-5,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "qk_norm": "head",
    "gpt_j_residual": False,
    "rotary_pct": 0.5,
    "moe_num_experts": 6,
    "moe_layer_freq": [0, 1],
    "moe_top_k": 2,
    "moe_ffn_hidden_size": 20,
    "moe_shared_expert_intermediate_size": 20,
    "moe_router_type": "sigmoid",
    "moe_norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    "hf_architecture": "glm4_moe",
}


def checkpoint(tmp_path, *, rows=96, tp_size=2, dtype=torch.float32, state=None, **changes):
    config = NeoXConfig.from_flat({**SIZES, **changes})
    layers = single_rank_plan(config, rows).layers
    weights = seeded_weights(layers, dtype=dtype)
    directory = write_checkpoint(tmp_path / "global_step3", layers, weights, tp_size=tp_size, client_state=state)
    return directory, config, weights


def tensors(directory):
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(str(path), "pt") as opened:
            found.update({key: opened.get_tensor(key) for key in opened.keys()})  # noqa: SIM118
    return found


def test_every_reason_is_named_before_files_are_looked_for(tmp_path):
    config = NeoXConfig.from_flat({**SIZES, "te_mha": True, "te_layernorm_mlp": True})
    with pytest.raises(ConfigError) as refused:
        to_hf(tmp_path / "nowhere", config, tmp_path / "out")
    for key in ("te_mha: true", "te_layernorm_mlp: true"):
        assert key in str(refused.value)
    for keys, named in (({"pos_emb": "none"}, "pos_emb: none"), ({"use_mup": True, "mup_base_hidden_size": 16}, "mup")):
        with pytest.raises(ConfigError) as refused:
            to_hf(tmp_path / "nowhere", NeoXConfig.from_flat({**SIZES, **keys}), tmp_path / "out")
        assert named in str(refused.value)


def test_keys_that_do_not_describe_the_network_are_not_looked_at(tmp_path):
    """A configuration of gpt-neox converts, whatever else it asks for."""
    directory, config, _ = checkpoint(tmp_path, hostfile="/nowhere", data_path="none", model_parallel_size=7)
    to_hf(directory, config, tmp_path / "hf", verify=False)


def test_shards_and_index(tmp_path):
    directory, config, weights = checkpoint(tmp_path)
    whole = to_hf(directory, config, tmp_path / "whole", verify=False)
    shards = to_hf(directory, config, tmp_path / "shards", verify=False, max_shard_bytes=20_000)
    assert whole.export.files == 1
    assert shards.export.files > 2
    assert whole.export.total_bytes == 4 * sum(w.numel() for w in weights.values())
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == whole.export.total_bytes
    one, many = tensors(tmp_path / "whole"), tensors(tmp_path / "shards")
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all(torch.equal(one[key], many[key]) for key in one)
    qkv = "attention.query_key_value.weight"
    assert torch.equal(one[f"gpt_neox.layers.1.{qkv}"], weights[3, qkv])


def test_precision(tmp_path):
    directory, config, weights = checkpoint(tmp_path)
    to_hf(directory, config, tmp_path / "bf16", precision="bf16", verify=False)
    found = tensors(tmp_path / "bf16")
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    assert torch.equal(found["embed_out.weight"], weights[6, "final_linear.weight"].bfloat16())
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_biases_of_the_choice_of_experts_stay_fp32(tmp_path):
    directory, config, weights = checkpoint(tmp_path, **GLM4_MOE)
    name = "mlp.router.selection_bias"
    expected = weights[3, name]
    assert not torch.equal(expected.bfloat16().float(), expected)
    to_hf(directory, config, tmp_path / "bf16", precision="bf16", verify=False)
    found = tensors(tmp_path / "bf16")
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(found.pop(key), expected)
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    from_hf(tmp_path / "bf16", tmp_path / "again", precision="bf16")
    reader = CheckpointReader(tmp_path / "again" / "global_step0", single_rank_plan(config, 96).layers)
    assert torch.equal(reader.full(3, name), expected)


_HEADS = {"num_heads": 4, "head_dim": 16, "n_groups": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "keys", "decays"),
    [("mamba", {}, {"A_log", "D"}), ("mamba2", _HEADS, {"A_log", "D", "dt_bias"})],
)
def test_decays_stay_fp32_in_16_bits_and_are_verified(tmp_path, model_type, keys, decays):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 6, "pad_token_id": None}
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **keys))
    theirs.save_pretrained(tmp_path / "theirs")
    imported = from_hf(tmp_path / "theirs", tmp_path / "neox")
    config = config_from_files([imported.config_file])
    result = to_hf(imported.checkpoint, config, tmp_path / "bf16", precision="bf16")  # compares logits
    assert result.check is not None
    found = tensors(tmp_path / "bf16")
    fp32 = {key: tensor for key, tensor in found.items() if tensor.dtype == torch.float32}
    assert {key.rpartition(".")[2] for key in fp32} == decays
    before = tensors(tmp_path / "theirs")
    assert all(torch.equal(tensor, before[key]) for key, tensor in fp32.items())


@pytest.mark.parametrize(("precision", "kept"), [(None, "bf16"), ("bf16", "bf16"), ("fp16", "fp32"), ("fp32", "fp32")])
def test_what_stays_fp32_and_is_stored_in_16_bits_is_never_rounded(tmp_path, precision, kept):
    directory, config, weights = checkpoint(tmp_path, dtype=torch.bfloat16, **GLM4_MOE)
    name, key = "mlp.router.selection_bias", "model.layers.1.mlp.gate.e_score_correction_bias"
    to_hf(directory, config, tmp_path / "hf", precision=precision, verify=False)
    exported = tensors(tmp_path / "hf")[key]
    from_hf(tmp_path / "hf", tmp_path / "again")
    to_hf(directory, config, tmp_path / "own", verify=False)
    from_hf(tmp_path / "own", tmp_path / "imported", precision=precision)
    layers = single_rank_plan(config, 96).layers
    read = [
        CheckpointReader(tmp_path / folder / "global_step0", layers).full(3, name) for folder in ("again", "imported")
    ]
    for found in (exported, *read):
        assert found.dtype == DTYPES[kept]
        assert torch.equal(found.float(), weights[3, name].float())


def test_values_too_large_for_fp16_are_refused_and_nothing_is_left(tmp_path):
    directory, config, weights = checkpoint(tmp_path, tp_size=1)
    weights[2, "attention.dense.weight"][0, 0] = 70000.0
    write_checkpoint(directory, single_rank_plan(config, 96).layers, weights)
    with raises_naming(ConversionError, "layer 2 attention.dense.weight", "--precision"):
        to_hf(directory, config, tmp_path / "fp16", precision="fp16", verify=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step3"]


def test_trimming_the_vocabulary(tmp_path):
    directory, config, weights = checkpoint(tmp_path, rows=1024)
    result = to_hf(
        directory,
        config,
        tmp_path / "hf",
        trim_vocab=True,
        tokenizer_file=GOLDEN / "data" / "tokenizer.json",
        verify=False,
    )
    found = tensors(tmp_path / "hf")
    assert found["gpt_neox.embed_in.weight"].shape == (1000, 32)
    assert torch.equal(found["embed_out.weight"], weights[6, "final_linear.weight"][:1000])
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 1000
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    assert result.check is None


def test_vocabularies_that_do_not_fit(tmp_path):
    directory, config, _ = checkpoint(tmp_path)
    with raises_naming(ConversionError, 1000, 96):
        to_hf(directory, config, tmp_path / "hf", tokenizer_file=GOLDEN / "data" / "tokenizer.json")
    with raises_naming(ConfigError, "--trim-vocab", "--tokenizer"):
        to_hf(directory, config, tmp_path / "hf", trim_vocab=True)
    with raises_naming(ConfigError, "--tokenizer", tmp_path / "none.json"):
        to_hf(directory, config, tmp_path / "hf", tokenizer_file=tmp_path / "none.json")


def test_an_output_that_holds_something_is_not_touched(tmp_path):
    directory, config, _ = checkpoint(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").write_text("x")
    with raises_naming(ConfigError, tmp_path / "hf", "--overwrite"):
        to_hf(directory, config, tmp_path / "hf", verify=False)
    assert (tmp_path / "hf" / "mine").read_text() == "x"
    to_hf(directory, config, tmp_path / "hf", verify=False, overwrite=True)
    assert [path.name for path in (tmp_path / "hf.old").iterdir()] == ["mine"]
    to_hf(directory, config, tmp_path / "hf", verify=False, overwrite=True)  # an earlier export is replaced
    assert not (tmp_path / "hf" / "mine").exists()
    assert not (tmp_path / "hf.old.1").exists()


def test_checkpoints_stay_if_an_export_takes_their_directory(tmp_path):
    directory, config, _ = checkpoint(tmp_path)
    before = sorted(path.relative_to(directory) for path in directory.rglob("*"))
    to_hf(directory, config, directory, verify=False, overwrite=True)
    kept = directory.with_name(f"{directory.name}.old")
    assert sorted(path.relative_to(kept) for path in kept.rglob("*")) == before
    assert (directory / "config.json").is_file()


def test_an_output_that_cannot_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    directory, config, _ = checkpoint(tmp_path)
    (tmp_path / "file").touch()
    with raises_naming(ConversionError, tmp_path / "file" / "hf"):
        to_hf(directory, config, tmp_path / "file" / "hf", verify=False)
    for name in ("posix_fallocate", "pwrite"):
        refused = raises_naming(ConversionError, "model.safetensors", os.strerror(errno.ENOSPC))
        with monkeypatch.context() as patch, refused:
            patch.setattr(os, name, full)
            to_hf(directory, config, tmp_path / "hf", verify=False)
    assert not (tmp_path / "hf").exists()


def test_other_errors_are_not_the_outputs(tmp_path):
    error = OSError(errno.EIO, "the checkpoint's disk")
    with pytest.raises(OSError) as refused, new_directory(tmp_path / "hf"):
        raise error
    assert refused.value is error


def test_the_wrong_config_is_named(tmp_path):
    directory, _, _ = checkpoint(tmp_path)
    with raises_naming(ConversionError, "word_embeddings.weight", [96, 32], [96, 64]):
        to_hf(directory, NeoXConfig.from_flat({**SIZES, "hidden_size": 64}), tmp_path / "hf", verify=False)


def test_a_directory_of_20b_layout(tmp_path):
    """GPT-NeoX-20B's files (44 layers, pipe 4, model 2, its client state) with a small hidden size."""
    changes = {"num_layers": 44, "gpt_j_residual": True, "rotary_pct": 0.25}
    args = {"num_layers": 44, "hidden_size": 32, "padded_vocab_size": 96, "model_parallel_size": 2}
    config = NeoXConfig.from_flat({**SIZES, **changes})
    layers = single_rank_plan(config, 96).layers
    weights = seeded_weights(layers, dtype=torch.float16)
    directory = write_checkpoint(
        tmp_path / "global_step150000",
        layers,
        weights,
        tp_size=2,
        pp_size=4,
        client_state={"args": args, "iteration": 150000},
    )
    assert (directory / "layer_47-model_01-model_states.pt").exists()
    assert (directory / "mp_rank_07_model_states.pt").exists()
    reader = CheckpointReader(directory, layers)
    assert (reader.iteration, reader.pp_size, reader.tp_size) == (150000, 4, 2)
    result = to_hf(directory, config, tmp_path / "hf", verify=False)
    found = tensors(tmp_path / "hf")
    assert result.export.tensors == len(found) == len(weights)
    assert torch.equal(found["gpt_neox.layers.43.mlp.dense_4h_to_h.weight"], weights[45, "mlp.dense_4h_to_h.weight"])
    assert torch.equal(found["gpt_neox.final_layer_norm.weight"], weights[47, "norm.weight"])
    assert "150,000 training steps" in (tmp_path / "hf" / "README.md").read_text()


def test_damaged_weights_are_not_exported(tmp_path):
    directory, config, _ = checkpoint(tmp_path)
    file = directory / "layer_02-model_01-model_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with raises_naming(ConversionError, directory, file.name):
        to_hf(directory, config, tmp_path / "out", verify=False)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step3"]
    unchecked = NeoXConfig.from_flat({**SIZES, "checkpoint_verify": False})
    assert to_hf(directory, unchecked, tmp_path / "out", verify=False).check is None


def test_a_config_of_another_model_is_refused(tmp_path):
    directory, config, _ = checkpoint(tmp_path, state={"args": {"num_attention_heads": 8, "hidden_size": 32}})
    with pytest.raises(CheckpointError) as refused:
        to_hf(directory, config, tmp_path / "out", verify=False)
    assert ["num_attention_heads", "8", "4"] in [line.split() for line in str(refused.value).splitlines()]


def test_the_average_of_the_weights_is_exported_in_their_precision(tmp_path):
    directory, config, weights = checkpoint(tmp_path, tp_size=2, dtype=torch.bfloat16)
    layers = single_rank_plan(config, 96).layers
    spec = next(spec for spec in layers[2].parameters if spec.name == "mlp.dense_h_to_4h.weight")
    average = torch.randn(spec.shape)
    for tp_rank in range(2):  # two data ranks divide each part
        part = shard(average, spec, tp_rank, 2).reshape(-1)
        half = part.numel() // 2
        for dp_rank, first in enumerate((0, half)):
            values = part[first : first + half].clone()
            save_file(directory / averaged_file(dp_rank, tp_rank), {2: {spec.name: (first, values)}})
    reader = CheckpointReader(directory, layers, weights="ema")
    assert torch.equal(reader.full(2, spec.name), average)
    assert torch.equal(reader.full(3, spec.name), weights[3, spec.name])
    to_hf(directory, config, tmp_path / "out", verify=False, weights="ema")
    (exported,) = [value for name, value in tensors(tmp_path / "out").items() if "0.mlp.dense_h_to_4h.weight" in name]
    assert torch.equal(exported, average.bfloat16())

    (directory / averaged_file(1, 1)).unlink()
    with raises_naming(CheckpointError, spec.name, directory):
        CheckpointReader(directory, layers, weights="ema").full(2, spec.name)
    for file in directory.glob("averaged_*"):
        file.unlink()
    with raises_naming(CheckpointError, "ema_decay"):
        to_hf(directory, config, tmp_path / "none", verify=False, weights="ema")


def test_norms_with_their_epsilon_outside_are_exported_as_gpt_neox_does(tmp_path, caplog):
    """gpt-neox's RMS norm until May 2025; its converter writes such models, and no Hugging Face norm is like it."""
    keys = {**GLM4_MOE, "norm": "rmsnorm_v2.0"}
    directory, config, _ = checkpoint(tmp_path, **keys)
    assert export_note(config, single_rank_plan(config, 96).architecture) is None
    result = to_hf(directory, config, tmp_path / "hf")
    assert result.check is not None
    assert "rmsnorm_v2.0" in caplog.text
