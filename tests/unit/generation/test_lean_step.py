"""One token through the lean step equals one through the modules, for every kind of block, batch and dtype."""

import itertools

import pytest
import torch

from neox.generation.packed import can_pack, pack_layers
from tests.unit.generation.random_model import CPU, logits, runner


@pytest.mark.parametrize(
    ("parallel_residual", "rotary", "tanh"),
    [c for c in itertools.product((True, False), repeat=3) if c[0] != c[2] or c[1]],
)
@pytest.mark.parametrize("lengths", [[5], [5, 5], [3, 7, 5]])
def test_equal_logits(parallel_residual, rotary, tanh, lengths):
    model, _ = runner(parallel_residual=parallel_residual, rotary=rotary, tanh=tanh)
    lean = logits(model, lengths, 4)
    model.stage.blocks.step = None
    by_modules = logits(model, lengths, 4)
    assert by_modules.std() > 0.5
    assert torch.allclose(lean, by_modules, atol=1e-5, rtol=1e-5)


def test_close_logits_in_bf16():
    model, _ = runner(dtype="bf16")
    lean = logits(model, [3, 6], 4)
    model.stage.blocks.step = None
    assert torch.allclose(lean.float(), logits(model, [3, 6], 4).float(), atol=0.15, rtol=0.05)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_packed_weights_multiply_alike(dtype):
    if not can_pack(CPU, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]):
        pytest.skip(f"this CPU has no packed {dtype} weights")
    model, layers = runner(dtype=dtype)
    before = logits(model, [3, 6], 4).float()
    pack_layers(layers.values())
    assert torch.allclose(logits(model, [3, 6], 4).float(), before, atol={"fp32": 1e-5, "bf16": 0.15}[dtype])


def test_rows_at_the_end_of_the_context_do_not_disturb_others():
    model, _ = runner()
    together = logits(model, [32, 20], 5)
    assert torch.isfinite(together).all()
