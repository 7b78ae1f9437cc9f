"""Writing a checkpoint's weights again with other degrees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neox.checkpoint.finding import damaged_weights
from neox.checkpoint.identity import ARGS, MODEL
from neox.checkpoint.reader import CheckpointReader
from neox.checkpoint.staging import commit, discard, stage_directory
from neox.checkpoint.writing import write_client_state, write_full_layer
from neox.errors import CheckpointError
from neox.log import progress


def reshard(reader: CheckpointReader, save: Path, *, tp_size: int, pp_size: int) -> Path:
    """Write the weights of a checkpoint as `save/global_stepN` for other degrees, committed; return that path.

    The original stays as it is. The optimizer's state and random states are not part of the result.
    Raises CheckpointError when a dimension does not divide, the original is damaged, or the disk refuses.
    """
    layers = reader.layers
    assert layers is not None
    heads = layers.architecture.num_attention_heads
    if heads % tp_size:
        raise CheckpointError(f"{heads} attention heads do not divide by {tp_size} tensor ranks")
    iteration = reader.iteration
    if (save / reader.path.name).exists() and (save / reader.path.name).samefile(reader.path):
        raise CheckpointError(f"{save}: the result would replace the checkpoint that is read; choose another directory")
    if problems := damaged_weights(reader.path):
        raise CheckpointError(f"{reader.path} is not whole: {'; '.join(problems)}")
    staged = stage_directory(save, iteration)
    try:
        with progress("reshard", layers.numel, unit="parameters") as bar:
            for layer in layers.weight_layers:
                state = {p.name: reader.full(layer.index, p.name) for p in layer.parameters}
                write_full_layer(staged, layer, state, tp_size)
                reader.release()
                bar.update(layer.numel)
        client_state = {"iteration": iteration, **_identity(reader, tp_size, pp_size)}
        for rank in range(tp_size * pp_size):
            write_client_state(staged, rank, client_state)
        return commit(staged)
    except BaseException:
        discard(staged)
        raise


def _identity(reader: CheckpointReader, tp_size: int, pp_size: int) -> dict[str, dict[str, Any]]:
    stored: dict[str, dict[str, Any]] = {}
    for key in (ARGS, MODEL):
        part = reader.client_state.get(key)
        if isinstance(part, Mapping):
            stored[key] = dict(part)
    stored.setdefault(ARGS, {})["model_parallel_size"] = tp_size
    if MODEL in stored:
        stored[MODEL]["pipe_parallel_size"] = pp_size
        for run_fact in ("zero_stage", "data_parallel_size"):
            stored[MODEL].pop(run_fact, None)
    return stored
