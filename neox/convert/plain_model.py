"""The model of a checkpoint on one rank, apart from how it was trained: its layer plan, and the network itself."""

from __future__ import annotations

import torch

from neox.checkpoint import CheckpointReader
from neox.config import NeoXConfig, RunPlan, resolve
from neox.model import GPT
from neox.parallel import ParallelGrid

# Settings that choose between kernels of the same function.
_KERNELS = frozenset({"scaled_upper_triang_masked_softmax_fusion", "attention_config", "precision"})


def plain_plan(config: NeoXConfig, padded_vocab_size: int) -> RunPlan:
    """The plan of a config's model alone, in fp32 on one rank: degrees, batches, data and precision left out."""
    kept = set(type(config.model).model_fields) - _KERNELS
    flat = {key: value for key, value in config.to_flat().items() if key in kept}
    flat |= {"padded_vocab_size": padded_vocab_size, "train_micro_batch_size_per_gpu": 1}
    flat |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "pipe_parallel_size": 1, "model_parallel_size": 1}
    return resolve(NeoXConfig.from_flat(flat), 1, padded_vocab_size)


def load_plain_model(reader: CheckpointReader, config: NeoXConfig) -> GPT:
    """Our network with a checkpoint's weights, fp32 on CPU, in evaluation mode. reader: has a layer plan."""
    assert reader.layers is not None
    model = GPT(plain_plan(config, reader.layers.padded_vocab_size), ParallelGrid.single(), dtype=torch.float32)
    state = {
        f"sequential.{layer.index}.{parameter.name}": reader.full(layer.index, parameter.name).float()
        for layer in reader.layers.weight_layers
        for parameter in layer.parameters
    }
    own = dict(model.named_parameters())
    assert own.keys() == state.keys(), own.keys() ^ state.keys()
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])
    return model.eval()
