"""Families: our network computes what transformers does with random weights, whose files come back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from neox.checkpoint import CheckpointReader
from neox.config import load_config
from neox.convert import from_hf, to_hf
from neox.convert.verification import hf_logits, load_reference_model, single_rank_plan

TOKENS = torch.randint(0, 90, (2, 24), generator=torch.Generator().manual_seed(1))
COMMON = {"vocab_size": 90, "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **COMMON,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 72,
    "max_position_embeddings": 32,
}
GPT2 = {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
}


def transformers_model(model_type: str, **config: Any) -> Any:
    """A model of transformers with random weights, biases and scales."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found.update(load_file(path))
    return found


def check_both_ways(directory: Path, model_type: str, tp_size: int = 1, **config: Any) -> None:
    """Save a model, import it, compare logits, export it again, and compare logits and tensors."""
    theirs = transformers_model(model_type, **config)
    theirs.save_pretrained(directory / "hf", max_shard_size="20KB")
    with torch.inference_mode():
        wanted = theirs(TOKENS).logits
    imported = from_hf(directory / "hf", directory / "neox", model_parallel_size=tp_size)
    loaded = load_config([imported.config_file])
    reader = CheckpointReader(imported.checkpoint, single_rank_plan(loaded, COMMON["vocab_size"]).layers)
    assert imported.parameters == sum(parameter.numel() for parameter in theirs.parameters())
    with torch.inference_mode():
        ours = load_reference_model(reader, loaded)(TOKENS)
    bound = 1e-5 * max(1.0, wanted.abs().max().item())
    assert (ours - wanted).abs().max() < bound
    assert wanted.std() > 0.05  # logits that say something
    to_hf(imported.checkpoint, loaded, directory / "out", verify=False, hf_architecture=model_type)
    assert (hf_logits(directory / "out", TOKENS) - wanted).abs().max() < bound
    before, after = weights_of(directory / "hf"), weights_of(directory / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_transformers_comes_in_and_goes_out(tmp_path, name):
    check_both_ways(tmp_path, name.partition("-")[0], tp_size=2, **CASES[name])
