"""DeepSeek's `config.json`: what is refused, and the layers that are left out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from neox.architecture import build_layer_plan
from neox.convert import from_hf
from neox.errors import ConversionError
from neox.families import FAMILIES
from tests.errors import raises_naming

SMALL: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_group": 2,
    "topk_group": 1,
}


@pytest.mark.parametrize(
    "entry",
    [
        {"num_key_value_heads": 2},
        {"qk_rope_head_dim": 7},
        {"q_lora_rank": 0},
        {"first_k_dense_replace": 2},
        {"first_k_dense_replace": -1},
        {"n_group": 3},
        {"topk_group": 3},
        {"num_experts_per_tok": 5},
        {"n_shared_experts": 0},
        {"scoring_func": "softmax"},
        {"attention_bias": True},
        {"rope_interleave": False},
        {"quantization_config": {"quant_method": "gptq"}},
    ],
    ids=str,
)
def test_entries_that_cannot_be_read_are_named(entry: dict[str, Any]) -> None:
    with pytest.raises(ConversionError) as refused:
        FAMILIES["deepseek_v3"].read_config({**SMALL, **entry})
    _, reason = str(refused.value).splitlines()
    assert reason.split()[0].rstrip(":") == next(iter(entry))


def test_scaled_positions_scale_scores() -> None:
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
    hf = {**SMALL, "rope_scaling": {**scaling, "mscale_all_dim": 1.0}}
    network, _ = FAMILIES["deepseek_v3"].read_config(hf)
    assert network.attention_scale == pytest.approx(10**-0.5 * 1.3688879454**2)
    assert FAMILIES["deepseek_v3"].read_config({**SMALL, "rope_scaling": scaling})[0].attention_scale == 0.0


OF_FAMILIES = {"deepseek_v3": SMALL, "glm4_moe": {**SMALL, "num_key_value_heads": 4, "n_shared_experts": 1}}


@pytest.fixture(params=OF_FAMILIES)
def files(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A model whose tensors have random values, and two of a layer that predicts further tokens."""
    family = FAMILIES[request.param]
    network, settings = family.read_config({**OF_FAMILIES[request.param], "num_nextn_predict_layers": 0})
    tensors = {}
    for mapping in family.mappings(build_layer_plan(network, 90)):
        # any shapes: the names are what is read first
        tensors.update((key, torch.randn(2)) for key in mapping.keys)
    tensors["model.layers.2.eh_proj.weight"] = torch.randn(2)
    tensors["model.layers.2.enorm.weight"] = torch.randn(2)
    directory = tmp_path / "hf"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    written = {**OF_FAMILIES[request.param], **family.config_json(network, settings)}
    (directory / "config.json").write_text(json.dumps(written))
    return directory


def test_further_layers_are_unknown_unless_the_configuration_has_them(files: Path) -> None:
    names = ("unknown", "model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight")
    with raises_naming(ConversionError, *names, lines=2):
        from_hf(files, files.parent / "out")


def test_further_layers_are_left_out_by_name(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((files / "config.json").read_text())
    (files / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    with caplog.at_level(logging.WARNING), raises_naming(ConversionError, "shape"):  # of the next tensor that is read
        from_hf(files, files.parent / "out")
    assert "model.layers.2.eh_proj.weight" in caplog.text


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_key_heads_are_written(model_type: str) -> None:
    """Without them transformers 4.57 divides the query heads by 128."""
    family = FAMILIES[model_type]
    network, settings = family.read_config(SMALL)
    assert family.config_json(network, settings)["num_key_value_heads"] == 4
