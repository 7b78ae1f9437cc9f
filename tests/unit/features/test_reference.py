"""The reference model of training on preferences."""

from __future__ import annotations

import pytest
import torch

from neox.features.reference.log_probs import adapters_off
from neox.model import GPT
from neox.parallel import ParallelGrid
from tests.plans import NETWORKS, small_plan

TARGETS = {
    "alibi": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "experts": ["query_key_value", "dense_h_to_4h", "dense_4h_to_h"],
    "shared expert": ["dense_h_to_4h", "dense_4h_to_h"],
}


@pytest.mark.parametrize("name", TARGETS)
def test_no_adapter_of_the_model_is_in_a_reference_without_adapters(name: str) -> None:
    """Of experts, too, whatever the class of the module that multiplies with A and B."""
    plan = small_plan(**NETWORKS[name], lora={"r": 2, "target": TARGETS[name]})
    model = GPT(plan, ParallelGrid.single()).eval()
    tokens = torch.arange(32).view(2, 16)
    before = model(tokens)  # B is 0
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("lora_B"):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    trained = model(tokens)
    assert not torch.equal(trained, before)
    with adapters_off(model):
        assert torch.equal(model(tokens), before)
    assert torch.equal(model(tokens), trained)
