"""Imported recurrent networks train as transformers' slow paths do: the losses of 20 steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from neox.checkpoint import CheckpointReader, find_checkpoint
from neox.convert import from_hf
from neox.model import GPT
from neox.parallel import ParallelGrid
from neox.plan import config_from_files, resolve
from tests.losses import causal_lm_loss
from tests.parity.family_configs import COMMON
from tests.parity.test_hf_families import CASES, FURTHER_CASES, transformers_model

STEPS = 20


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "bamba", "qwen3_next", "olmo_hybrid"])
def test_twenty_steps_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    theirs = transformers_model(model_type, **{**CASES, **FURTHER_CASES}[model_type]).train()
    theirs.save_pretrained(tmp_path / "hf")
    imported = from_hf(tmp_path / "hf", tmp_path / "neox")
    config = config_from_files([imported.config_file]).updated({"train_micro_batch_size_per_gpu": 2})
    plan = resolve(config, 1, COMMON["vocab_size"])
    ours = GPT(plan, ParallelGrid.single())
    reader = CheckpointReader(find_checkpoint(tmp_path / "neox"), plan.layers)
    with torch.no_grad():
        for layer in plan.layers.weight_layers:
            for name, tensor in reader.layer_shard(layer.index, 0, 1).items():
                ours.sequential[layer.index].get_parameter(name).copy_(tensor)
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(0, COMMON["vocab_size"], (2, 25), generator=generator) for _ in range(4)]

    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5) for model in (ours, theirs)]
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(STEPS):
        tokens = batches[step % len(batches)]
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        of_ours = causal_lm_loss(ours, inputs, labels, torch.ones(labels.shape))
        logits = theirs(inputs, use_cache=False).logits
        of_theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        for optimizer, loss, found in zip(optimizers, (of_ours, of_theirs), losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    assert losses[0][-1] < losses[0][0] - 0.1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
