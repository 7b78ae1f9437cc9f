"""gpt-neox's own configuration files: a plan with the published number of parameters, or a refusal by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from neox.config import NeoXConfig
from neox.errors import ConfigError
from neox.model import GPT
from neox.parallel import ParallelGrid
from neox.plan import config_from_files, resolve
from tests.losses import causal_lm_loss

CONFIGS = Path(__file__).parents[2] / "configs"
FILES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("gpt_neox_files.yml").read_text())
WORKING = [name for name, file in FILES.items() if "refused" not in file]
GPT2 = {
    "117M": 124_439_808,
    "345M": 354_823_168,
    "774M": 774_030_080,
    "1-5B": 1_557_611_200,
    "1-2B": 1_212_031_488,
    "2-5B": 2_488_598_400,
    "4-2B": 4_196_936_448,
    "8-3B": 8_314_143_744,
}
"""OpenAI's models as in `transformers`; Megatron-LM's round to their names."""


def keys_of(name: str, **changes: Any) -> NeoXConfig:
    return NeoXConfig.from_flat({**FILES[name]["keys"], "train_micro_batch_size_per_gpu": 1, **changes})


@pytest.mark.parametrize("name", FILES)
def test_a_plan_with_the_published_parameters_or_a_refusal_by_name(name: str) -> None:
    file = FILES[name]
    world = file["keys"].get("model_parallel_size", 1)
    if "refused" in file:
        with pytest.raises(ConfigError) as caught:
            resolve(keys_of(name), world, file["ids"])
        assert file["refused"] in str(caught.value)
        return
    plan = resolve(keys_of(name, **file.get("with", {})), world, file["ids"])
    assert plan.layers.numel == file.get("parameters", plan.layers.numel)


@pytest.mark.parametrize(
    "name", [name if name == "llama2/70B" else pytest.param(name, marks=pytest.mark.slow) for name in WORKING]
)
def test_each_trains_with_two_small_layers(name: str) -> None:
    small: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "model_parallel_size": 1,
    }
    plan = resolve(keys_of(name, **small), 1, 100)
    torch.manual_seed(0)
    model, tokens = GPT(plan, ParallelGrid.single()), torch.randint(0, 100, (2, 33))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(6):
        loss = causal_lm_loss(model, tokens[:, :-1], tokens[:, 1:], torch.ones(2, 32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("name", GPT2)
def test_gpt2_has_the_published_parameters_apart_from_padding(name: str) -> None:
    config = config_from_files([f"gpt2/{name}"], conf_dir=CONFIGS)
    plan = resolve(config, config.parallelism.model_parallel_size, 50257)
    padding = (plan.padded_vocab_size - 50257) * plan.architecture.hidden_size
    assert plan.layers.numel - padding == GPT2[name]
