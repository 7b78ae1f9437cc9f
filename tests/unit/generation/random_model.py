"""A small model with random weights, biases and norms, and the logits that it gives step by step."""

import torch

from neox.config import NeoXConfig
from neox.generation.load import _pack, _pack_tied_head, runner_of_stage
from neox.model import Stage, build_layer
from neox.ops import DTYPES
from neox.parallel import ParallelGrid
from neox.plan import resolve

CPU = torch.device("cpu")


def runner(*, parallel_residual=True, rotary=True, tanh=False, dtype="fp32", packed=False, device=CPU, **keys):
    """Return the model; keys: further settings of the configuration."""
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
        **keys,
    }
    plan = resolve(NeoXConfig.from_flat(flat), 1, 100)
    grid = ParallelGrid.single()
    layers = {
        entry.index: build_layer(plan, entry.index, grid, dtype=DTYPES[dtype]).eval()
        for entry in plan.layers
        if entry.kind != "identity"
    }
    with torch.no_grad():  # biases and norms that say something
        for layer in layers.values():
            for parameter in layer.parameters():
                if parameter.dim() == 1:
                    parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3
    layers = {index: layer.to(device) for index, layer in layers.items()}
    if packed:
        _pack(layers)
        if plan.layers.head.tied_to is not None:
            _pack_tied_head(layers[0])
    stage = Stage(plan, grid, layers, plan.stages[0].ranges)
    return runner_of_stage(plan, stage, grid, device)


def logits(model, lengths, steps):
    """Read random prompts of these lengths and then `steps` tokens one by one; return the logits after each."""
    generator = torch.Generator().manual_seed(5)
    decoding = model.begin(lengths, max(lengths) + steps)
    tokens = [torch.randint(0, 100, (len(lengths), max(lengths)), generator=generator)]
    tokens += [torch.randint(0, 100, (len(lengths), 1), generator=generator) for _ in range(steps)]
    with torch.inference_mode():
        return torch.stack([decoding.feed(part.to(model.device)) for part in tokens])
