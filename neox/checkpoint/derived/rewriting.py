"""Checkpoints made of others: the weights for other degrees, with other rows of the vocabulary, or their mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from neox.architecture import LayerPlan, ParameterSpec
from neox.checkpoint.chat_template import saved_chat_template, write_chat_template
from neox.checkpoint.generation_settings import saved_generation_settings, write_generation_settings
from neox.checkpoint.identity import ARGS, MODEL
from neox.checkpoint.save_directory.staging import commit, discard, refuse_running, stage_directory
from neox.checkpoint.weights.reader import CheckpointReader
from neox.checkpoint.weights.tensor_files import write_client_state, write_config, write_full_layer
from neox.checkpoint_files.contents import damaged_weights
from neox.checkpoint_files.names import LEDGER, REFERENCE, REFERENCE_FROM
from neox.errors import CheckpointError
from neox.log import progress
from neox.tokenizer import TokenizerIdentity, saved_tokenizer_identity, write_tokenizer_identity

Identity = dict[str, Any]
"""Parts of a client state about the model and about the data that it has read."""


def reshard(reader: CheckpointReader, save: Path, *, tp_size: int, pp_size: int) -> Path:
    """Write a checkpoint's weights as `save/global_stepN` for other degrees, and commit it.

    The original is not changed. The result has no optimizer state and no random states.

    Args:
        reader: The original, opened with its layers.
        save: Directory of checkpoints to write into.
        tp_size: Tensor-parallel degree of the result.
        pp_size: Pipeline degree of the result.

    Returns:
        The new checkpoint's directory.

    Raises:
        CheckpointError: If a dimension does not divide, the original is damaged, or the disk refuses.
    """
    layers = reader.layers
    assert layers is not None
    check_degree(layers, tp_size)

    def stored(index: int, spec: ParameterSpec) -> Tensor:
        return reader.full(index, spec.name)

    identity = identity_of(reader, tp_size, pp_size)
    return rewrite(reader, save, layers, stored, identity=identity, tp_size=tp_size, pp_size=pp_size)


def rewrite(
    reader: CheckpointReader,
    save: Path,
    layers: LayerPlan,
    value: Callable[[int, ParameterSpec], Tensor],
    *,
    identity: Identity,
    tp_size: int,
    pp_size: int,
    config: Mapping[str, Any] | None = None,
    tokenizer: TokenizerIdentity | None = None,
) -> Path:
    """Write weights that follow from those of a checkpoint as `save/global_stepN`, and commit it.

    Args:
        reader: The original.
        save: Directory of checkpoints to write into.
        layers: Layers of the result.
        value: Function of a layer's index and a parameter of the result to its full tensor. Layers come in order.
        identity: Result of `identity_of`.
        tp_size: Tensor-parallel degree of the result.
        pp_size: Pipeline degree of the result.
        config: Keys of the run, which are stored next to the weights; None to store none.
        tokenizer: Identity of the result's tokenizer; None for the original's.

    Returns:
        The new checkpoint's directory.

    Raises:
        CheckpointError: If the original is damaged or would be replaced, a training writes into `save`, or writing
            fails.
    """
    iteration = reader.iteration
    target = save / reader.path.name
    if target.exists() and target.samefile(reader.path):
        raise CheckpointError(f"{save}: the result would replace the checkpoint that is read; choose another directory")
    problems = damaged_weights(reader.path)
    if problems:
        raise CheckpointError(f"{reader.path} is not complete: {'; '.join(problems)}")
    refuse_running(save)
    staged = stage_directory(save, iteration)
    try:
        with progress("writing", layers.numel, unit="parameters") as bar:
            for layer in layers.weight_layers:
                state = {}
                for spec in layer.parameters:
                    state[spec.name] = value(layer.index, spec)
                write_full_layer(staged, layer, state, tp_size)
                reader.release()
                bar.update(layer.numel)
        reader.note_averages()
        for rank in range(tp_size * pp_size):
            write_client_state(staged, rank, {"iteration": iteration, **identity})
        if config is not None:
            write_config(staged, config)
        write_chat_template(staged, saved_chat_template(reader.path))
        write_generation_settings(staged, saved_generation_settings(reader.path))
        write_tokenizer_identity(staged, tokenizer or saved_tokenizer_identity(reader.path))
        return commit(staged)
    except BaseException:
        discard(staged)
        raise


def identity_of(reader: CheckpointReader, tp_size: int, pp_size: int) -> Identity:
    """Return the parts of a checkpoint's client state about the model, for other degrees, and about the data."""
    stored: Identity = {}
    for key in (ARGS, MODEL, LEDGER):
        part = reader.client_state.get(key)
        if isinstance(part, Mapping):
            stored[key] = dict(part)
    reference = reader.client_state.get(REFERENCE)
    if isinstance(reference, str):
        stored[REFERENCE] = reference
    reference_from = reader.client_state.get(REFERENCE_FROM)
    if isinstance(reference_from, list):
        stored[REFERENCE_FROM] = reference_from
    stored.setdefault(ARGS, {})["model_parallel_size"] = tp_size
    if MODEL in stored:
        stored[MODEL]["pipe_parallel_size"] = pp_size
        stored[MODEL]["lora"] = None  # the reader has added adapters to the weights
        for run_setting in ("zero_stage", "data_parallel_size"):
            stored[MODEL].pop(run_setting, None)
    return stored


def check_degree(layers: LayerPlan, tp_size: int) -> None:
    """Raise CheckpointError if a network cannot be split over so many tensor ranks."""
    heads = layers.architecture.num_kv_heads
    if heads % tp_size:
        raise CheckpointError(f"{heads} attention heads do not divide by {tp_size} tensor ranks")
    for layer in layers.weight_layers:
        for spec in layer.parameters:
            if not spec.is_divisible(tp_size):
                raise CheckpointError(
                    f"{spec.name}: shape {list(spec.shape)} does not divide by {tp_size} tensor ranks"
                )
