"""One token through the lean step equals one through the modules, for every kind of block, batch and dtype."""

import itertools

import pytest
import torch

from neox.config import NeoXConfig, resolve
from neox.generation.load import runner_of_layers
from neox.generation.packed import can_pack, pack_layers
from neox.model import build_layer
from neox.parallel import ParallelGrid

CPU = torch.device("cpu")


def runner(*, parallel_residual=True, rotary=True, tanh=False, dtype="fp32"):
    flat = {
        "num_layers": 3,
        "hidden_size": 48,
        "num_attention_heads": 3,
        "seq_length": 32,
        "pos_emb": "rotary" if rotary else "none",
        "rotary_pct": 0.5,
        "gpt_j_residual": parallel_residual,
        "bias_gelu_fusion": tanh,
        "no_weight_tying": True,
        "init_method": "normal",
        "init_method_std": 0.2,
        "precision": dtype,
        "train_micro_batch_size_per_gpu": 1,
    }
    plan = resolve(NeoXConfig.from_flat(flat), 1, 100)
    grid = ParallelGrid.single()
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    layers = {
        entry.index: build_layer(plan, entry.index, grid, dtype=kinds[dtype]).eval()
        for entry in plan.layers
        if entry.kind != "identity"
    }
    with torch.no_grad():  # biases and norms that say something
        for layer in layers.values():
            for parameter in layer.parameters():
                if parameter.dim() == 1:
                    parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3
    return runner_of_layers(plan, layers, grid, CPU), layers


def logits(model, lengths, steps):
    """Read random prompts of these lengths and then `steps` tokens one by one; return the logits after each."""
    generator = torch.Generator().manual_seed(5)
    decoding = model.begin(lengths, max(lengths) + steps)
    tokens = [torch.randint(0, 100, (len(lengths), max(lengths)), generator=generator)]
    tokens += [torch.randint(0, 100, (len(lengths), 1), generator=generator) for _ in range(steps)]
    with torch.inference_mode():
        return torch.stack([decoding.feed(part) for part in tokens])


@pytest.mark.parametrize(
    ("parallel_residual", "rotary", "tanh"),
    [c for c in itertools.product((True, False), repeat=3) if c[0] != c[2] or c[1]],
)
@pytest.mark.parametrize("lengths", [[5], [5, 5], [3, 7, 5]])
def test_equal_logits(parallel_residual, rotary, tanh, lengths):
    model, _ = runner(parallel_residual=parallel_residual, rotary=rotary, tanh=tanh)
    lean = logits(model, lengths, 4)
    model.step = None
    by_modules = logits(model, lengths, 4)
    assert by_modules.std() > 0.5
    assert torch.allclose(lean, by_modules, atol=1e-5, rtol=1e-5)


def test_close_logits_in_bf16():
    model, _ = runner(dtype="bf16")
    lean = logits(model, [3, 6], 4)
    model.step = None
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
