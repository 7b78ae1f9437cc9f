"""Checkpoint tools: summaries, comparison, and rewriting weights with other parallel degrees."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox.architecture import BLOCK_OFFSET, WORD_EMBEDDINGS, Architecture, LayerPlan, build_layer_plan
from neox.checkpoint.finding import damaged_weights, why_incomplete
from neox.checkpoint.identity import ARGS, MODEL
from neox.checkpoint.manifest import read_manifest
from neox.checkpoint.names import parse_optimizer_file
from neox.checkpoint.reader import UNUSED_IN_NEOX, CheckpointReader
from neox.checkpoint.staging import commit, discard, stage_directory
from neox.checkpoint.tensor_files import write_client_state, write_full_layer
from neox.config import NeoXConfig
from neox.errors import CheckpointError
from neox.log import progress
from neox.plan import architecture_of, saved_architecture


@dataclass(frozen=True)
class Summary:
    """One checkpoint at a glance. Degrees are those of its files; None if they are unknown.

    Attributes:
        problems: Why it is incomplete or damaged (its manifest's hashes, or the archives' own checksums).
    """

    path: Path
    iteration: int | None
    tp_size: int
    pp_size: int | None
    dp_size: int | None
    layers: int
    parameters: int
    dtypes: tuple[str, ...]
    bytes_on_disk: int
    has_manifest: bool
    optimizer_files: int
    args: dict[str, Any]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class TensorStats:
    """One parameter over all tensor ranks. `sha256` is of its bytes, row-major."""

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    largest: float
    finite: bool
    sha256: str


@dataclass(frozen=True)
class TensorDifference:
    """One parameter that differs: the kind of difference, and its size if the shapes are equal."""

    index: int
    name: str
    what: str
    largest: float | None = None
    relative: float | None = None


def open_checkpoint(path: Path, *, config: NeoXConfig | None = None) -> CheckpointReader:
    """Open a `global_stepN` directory with the layers of its network.

    Args:
        path: The directory.
        config: As in `find_layer_plan`.

    Raises:
        CheckpointError: If it is no complete checkpoint.
    """
    return CheckpointReader(path, find_layer_plan(CheckpointReader(path), config))


def find_layer_plan(reader: CheckpointReader, config: NeoXConfig | None = None) -> LayerPlan:
    """Return the layers of a checkpoint: from a configuration, from what it stores about itself, or from its files.

    Args:
        reader: Reader without layers.
        config: The run's configuration, for files that say too little.

    Raises:
        CheckpointError: If layers are missing, or the files are of a network that they do not describe.
    """
    indices = set(reader.indices)
    if 0 not in indices or BLOCK_OFFSET not in indices:
        raise CheckpointError(f"{reader.path}: has no embedding (layer 0) or no first block (layer {BLOCK_OFFSET})")
    blocks = next(i for i in range(BLOCK_OFFSET, max(indices) + 2) if i not in indices) - BLOCK_OFFSET
    hidden = reader.parts(0, WORD_EMBEDDINGS)[0].shape[1]
    head = blocks + 4
    untied = head in indices and "final_linear.weight" in reader.names(head)
    split_by_rows = untied and reader.parts(head, "final_linear.weight")[0].shape[1] != hidden
    if config is not None:
        architecture = architecture_of(config)
    else:
        architecture = _stored_architecture(reader) or _architecture_of_files(reader, blocks, hidden, untied)
    plan = build_layer_plan(architecture, reader.vocabulary_rows, head_parallelism="row" if split_by_rows else "column")
    for index in (0, BLOCK_OFFSET):
        unused = UNUSED_IN_NEOX if architecture.residual == "parallel_one_norm" else ()
        stored = {name for name in reader.names(index) if not name.startswith(unused)}
        if stored != {p.name for p in plan[index].parameters}:
            raise CheckpointError(
                f"{reader.path}: layer {index} holds {', '.join(sorted(stored))}; "
                + ("the config is of another network" if config else "give the run's config, which says what network")
            )
    return plan


def _stored_architecture(reader: CheckpointReader) -> Architecture | None:
    """Return the network by what the checkpoint stores; None where that is not enough (gpt-neox's, older ones)."""
    stored = saved_architecture(reader.args)
    needed = {f.name for f in fields(Architecture) if f.default is MISSING}
    return Architecture(**stored) if needed <= stored.keys() else None


def _architecture_of_files(reader: CheckpointReader, blocks: int, hidden: int, untied: bool) -> Architecture:
    """Return the network of GPT-NeoX's kind whose shapes the files have."""
    parallel = reader.args.get("gpt_j_residual")
    if parallel is None and reader.tp_size > 1:  # for one rank the values are the same either way
        raise CheckpointError(
            f"{reader.path}: has {reader.tp_size} tensor ranks and does not say whether their row-parallel biases "
            "are summed (gpt_j_residual); give the run's config"
        )
    heads = int(reader.args.get("num_attention_heads", 1))
    return Architecture(
        num_layers=blocks,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        mlp_width=4 * hidden,
        activation="gelu",  # choices without parameters leave no trace in the files: any value serves here
        norm="layernorm",
        norm_epsilon=1e-5,
        positions="none",
        rotary_ndims=0,
        rotary_base=0.0,
        max_positions=0,
        attention=("global",) * blocks,
        residual="parallel" if parallel else "sequential",
        tie_word_embeddings=not untied,
    )


def summarize(reader: CheckpointReader, *, verify: bool = True) -> Summary:
    """Describe a checkpoint; `verify` reads every byte to check it."""
    assert reader.layers is not None
    files = [p for p in reader.path.rglob("*") if p.is_file()]
    optimizer = [found for p in files if (found := parse_optimizer_file(p.name)) is not None]
    dtypes = {_name(reader.parts(index, name)[0].dtype) for index, name in reader.items()}
    return Summary(
        path=reader.path,
        iteration=reader.iteration_or_none,
        tp_size=reader.tp_size,
        pp_size=reader.pp_size,
        dp_size=1 + max(f.dp_rank for f in optimizer) if optimizer else None,
        layers=reader.layers.architecture.num_layers,
        parameters=reader.layers.numel,
        dtypes=tuple(sorted(dtypes)),
        bytes_on_disk=sum(p.stat().st_size for p in files),
        has_manifest=read_manifest(reader.path) is not None,
        optimizer_files=len(optimizer),
        args=dict(reader.args),
        problems=tuple(why_incomplete(reader.path, hashes=verify)),
    )


def tensor_stats(reader: CheckpointReader) -> Iterator[TensorStats]:
    """Yield every parameter's norm, largest value and hash, with one parameter in memory at a time."""
    for index, name in reader.items():
        full = reader.full(index, name)
        values = full.double()
        yield TensorStats(
            index=index,
            name=name,
            shape=tuple(full.shape),
            dtype=_name(full.dtype),
            norm=values.norm().item(),
            largest=values.abs().max().item(),
            finite=bool(values.isfinite().all()),
            sha256=hashlib.sha256(full.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest(),
        )


def compare_checkpoints(first: CheckpointReader, second: CheckpointReader) -> Iterator[TensorDifference]:
    """Yield the parameters that differ between two checkpoints of any parallel degrees."""
    one, two = set(first.items()), set(second.items())
    for index, name in sorted(one | two):
        if (index, name) not in two:
            yield TensorDifference(index, name, "only in the first")
        elif (index, name) not in one:
            yield TensorDifference(index, name, "only in the second")
        elif (found := _compare(first.full(index, name), second.full(index, name))) is not None:
            yield TensorDifference(index, name, *found)


def _compare(a: Tensor, b: Tensor) -> tuple[str, float | None, float | None] | None:
    if a.shape != b.shape:
        return f"shape {list(a.shape)} and {list(b.shape)}", None, None
    if a.dtype == b.dtype and torch.equal(a, b):
        return None
    difference = (a.double() - b.double()).abs().max().item()
    what = "values" if a.dtype == b.dtype else f"{_name(a.dtype)} and {_name(b.dtype)}"
    largest = max(a.double().abs().max().item(), b.double().abs().max().item())
    return what, difference, difference / largest if largest > 0 else 0.0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    heads = layers.architecture.num_kv_heads
    if heads % tp_size:
        raise CheckpointError(f"{heads} attention heads do not divide by {tp_size} tensor ranks")
    for spec in (spec for layer in layers.weight_layers for spec in layer.parameters):
        if not spec.is_divisible(tp_size):
            raise CheckpointError(f"{spec.name}: shape {list(spec.shape)} does not divide by {tp_size} tensor ranks")
    iteration = reader.iteration
    if (save / reader.path.name).exists() and (save / reader.path.name).samefile(reader.path):
        raise CheckpointError(f"{save}: the result would replace the checkpoint that is read; choose another directory")
    if problems := damaged_weights(reader.path):
        raise CheckpointError(f"{reader.path} is not complete: {'; '.join(problems)}")
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
        for run_setting in ("zero_stage", "data_parallel_size"):
            stored[MODEL].pop(run_setting, None)
    return stored
