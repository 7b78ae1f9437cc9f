"""LoRA adapters and the package peft: the same logits merged, as an adapter, and imported."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from neox.architecture import Lora, add_adapters
from neox.checkpoint import CheckpointReader
from neox.config import NeoXConfig
from neox.convert import from_hf, to_hf, write_peft_adapter
from neox.convert.verification import load_reference_model, single_rank_plan
from neox.errors import ConversionError
from tests.unit.checkpoint.synthetic import seeded_weights, write_checkpoint
from tests.unit.convert.test_to_hf import SIZES

peft = pytest.importorskip("peft", reason="peft (requirements/requirements-dev.txt) is not installed")

ALL = ("dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value")
CONFIG = NeoXConfig.from_flat({**SIZES, "gpt_j_residual": True})
TOKENS = torch.arange(20).view(1, 20) * 3 % 96


@pytest.fixture
def base(tmp_path):
    """The Hugging Face directory of a model without adapters."""
    layers = single_rank_plan(CONFIG, 96).layers
    directory = write_checkpoint(tmp_path / "plain" / "global_step3", layers, seeded_weights(layers))
    to_hf(directory, CONFIG, tmp_path / "base", verify=False)
    return tmp_path / "base"


def logits_of(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def our_logits(checkpoint):
    layers = single_rank_plan(CONFIG, 96).layers
    with torch.no_grad():
        return load_reference_model(CheckpointReader(checkpoint, layers), CONFIG)(TOKENS)


@pytest.mark.parametrize(("targets", "tp_size"), [(ALL, 2), (("query_key_value",), 1)])
def test_a_trained_adapter_loads_in_peft_as_the_merged_export(tmp_path, base, targets, tp_size):
    from transformers import AutoModelForCausalLM

    plain, lora = single_rank_plan(CONFIG, 96).layers, Lora(4, 8.0, targets)
    weights = {**seeded_weights(add_adapters(plain, lora), 1), **seeded_weights(plain)}
    state = {"model_identity": {"lora": asdict(lora)}}
    checkpoint = write_checkpoint(
        tmp_path / "tuned" / "global_step3", add_adapters(plain, lora), weights, tp_size=tp_size, client_state=state
    )
    config = CONFIG.updated({"lora": {"r": 4, "alpha": 8.0, "target": list(targets)}})
    write_peft_adapter(checkpoint, config, tmp_path / "adapter", base=str(base))
    result = to_hf(checkpoint, config, tmp_path / "merged", verify=True)
    assert result.check.difference < 1e-5
    merged = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    alone = AutoModelForCausalLM.from_pretrained(base)
    assert (logits_of(alone) - merged).abs().max() > 0.01
    adapted = logits_of(peft.PeftModel.from_pretrained(alone, tmp_path / "adapter"))
    torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-5)
    torch.testing.assert_close(our_logits(checkpoint), merged, rtol=0, atol=1e-5)

    back = from_hf(base, tmp_path / "back", adapter_dir=tmp_path / "adapter", model_parallel_size=2)
    torch.testing.assert_close(our_logits(back.checkpoint), merged, rtol=0, atol=1e-5)


def test_an_adapter_of_peft_loads_here(tmp_path, base):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=list(ALL), init_lora_weights=False)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    model.save_pretrained(tmp_path / "adapter")
    result = from_hf(base, tmp_path / "imported", adapter_dir=tmp_path / "adapter")
    torch.testing.assert_close(our_logits(result.checkpoint), logits_of(model), rtol=0, atol=1e-5)
    assert "lora:" in result.config_file.read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"target_modules": ["embed_in"]}, "target_modules"),
        ({"r": 5}, "shape"),
        ({"target_modules": ["dense"]}, "is missing"),
    ],
)
def test_other_adapters_are_refused_by_name(tmp_path, base, change, words):
    from transformers import AutoModelForCausalLM

    settings = peft.LoraConfig(r=3, target_modules=["query_key_value"])
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConversionError, match=words):
        from_hf(base, tmp_path / "imported", adapter_dir=tmp_path / "adapter")


def test_a_checkpoint_without_adapters_has_none_to_write(tmp_path, base):
    with pytest.raises(ConversionError, match="holds no adapters"):
        write_peft_adapter(tmp_path / "plain", CONFIG, tmp_path / "adapter", base="x")
