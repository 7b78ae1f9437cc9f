"""Checkpoint tools: summaries, comparison, and new files for other parallel degrees."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox.architecture import BLOCK_OFFSET, WORD_EMBEDDINGS, Architecture, LayerPlan, build_layer_plan
from neox.checkpoint.weights.reader import UNUSED_IN_NEOX, CheckpointReader
from neox.checkpoint_files.contents import why_incomplete
from neox.checkpoint_files.manifest import read_manifest
from neox.checkpoint_files.names import AVERAGED_FROM, AVERAGED_STEPS, parse_optimizer_file
from neox.config import NeoXConfig
from neox.errors import CheckpointError
from neox.plan import architecture_of, saved_architecture


@dataclass(frozen=True)
class Summary:
    """One checkpoint at a glance.

    Attributes:
        path: Its directory.
        iteration: Completed steps, if known.
        tp_size: Tensor-parallel degree of the files.
        pp_size: Pipeline degree of the files, if known.
        dp_size: Data-parallel degree of the optimizer's files, if there are any.
        layers: Number of blocks.
        parameters: Number of parameters.
        active_parameters: Number of parameters that one token is computed with.
        dtypes: Dtypes of the weights.
        bytes_on_disk: Size of all files.
        has_manifest: Whether it has a manifest.
        optimizer_files: Number of the optimizer's files.
        averaged_steps: Steps that its average of the weights has followed; None if it holds no average.
        averaged_from: Checkpoints whose mean it is, with their weights; empty if it is no mean.
        args: The model's settings that the run stored.
        problems: Reasons why it is incomplete or damaged (hashes of its manifest, or checksums in its files).
    """

    path: Path
    iteration: int | None
    tp_size: int
    pp_size: int | None
    dp_size: int | None
    layers: int
    parameters: int
    active_parameters: int
    dtypes: tuple[str, ...]
    bytes_on_disk: int
    has_manifest: bool
    optimizer_files: int
    averaged_steps: int | None
    averaged_from: Mapping[str, float]
    args: dict[str, Any]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class TensorStats:
    """One parameter over all tensor ranks.

    Attributes:
        index: Index of its layer.
        name: Its name in the layer.
        shape: Its shape.
        dtype: Its dtype.
        norm: Its 2-norm.
        largest: Its largest absolute value.
        finite: Whether all values are finite.
        sha256: Hash of its bytes, row-major.
    """

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
    """One parameter that differs.

    Attributes:
        index: Index of its layer.
        name: Its name in the layer.
        what: Kind of difference, in words.
        largest: Largest absolute difference; None unless the shapes are equal.
        relative: Largest difference as a fraction of the largest value.
    """

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
    date = config.checkpoint.gpt_neox_date if config is not None else None
    return CheckpointReader(path, find_layer_plan(CheckpointReader(path), config), gpt_neox_date=date)


def find_layer_plan(reader: CheckpointReader, config: NeoXConfig | None = None) -> LayerPlan:
    """Return the layers of a checkpoint: from a configuration, from the settings that it stores, or from its files.

    Args:
        reader: Reader without layers.
        config: The run's configuration, for a checkpoint that does not describe its network.

    Raises:
        CheckpointError: If layers are missing, or the files are of another network than the one described.
    """
    if config is not None:
        architecture = architecture_of(config)
    else:
        architecture = _stored_architecture(reader) or _architecture_of_files(reader)
    head = _head_weight(reader)
    hidden = reader.parts(0, WORD_EMBEDDINGS)[0].shape[1]
    split_by_hidden = head is not None and head.shape[1] != hidden
    plan = build_layer_plan(
        architecture, reader.vocabulary_rows, head_parallelism="row" if split_by_hidden else "column"
    )
    unused = UNUSED_IN_NEOX if architecture.residual == "parallel_one_norm" else ()
    for index in (0, BLOCK_OFFSET):
        stored = {name for name in reader.names(index) if not name.startswith(unused)}
        if stored != {spec.name for spec in plan[index].parameters}:
            advice = "the config is of another network" if config else "give the run's config, which names the network"
            raise CheckpointError(f"{reader.path}: layer {index} holds {', '.join(sorted(stored))}; {advice}")
    return plan


def _number_of_blocks(reader: CheckpointReader) -> int:
    """Return the number of blocks that have files. Raises CheckpointError without an embedding or a first block."""
    indices = set(reader.indices)
    if 0 not in indices or BLOCK_OFFSET not in indices:
        raise CheckpointError(f"{reader.path}: has no embedding (layer 0) or no first block (layer {BLOCK_OFFSET})")
    blocks = 0
    while BLOCK_OFFSET + blocks in indices:
        blocks += 1
    return blocks


def _head_weight(reader: CheckpointReader) -> Tensor | None:
    """Return tensor rank 0's part of an untied head's weight; None if the head is tied."""
    head = BLOCK_OFFSET + _number_of_blocks(reader) + 2
    if head not in reader.indices or "final_linear.weight" not in reader.names(head):
        return None
    return reader.parts(head, "final_linear.weight")[0]


def _stored_architecture(reader: CheckpointReader) -> Architecture | None:
    """Return the network that the checkpoint's settings describe.

    None if settings are missing, as in checkpoints of gpt-neox and of older versions.
    """
    stored = saved_architecture(reader.args)
    for field in fields(Architecture):
        if field.default is MISSING and field.name not in stored:
            return None
    return Architecture(**stored)


def _architecture_of_files(reader: CheckpointReader) -> Architecture:
    """Return the network of GPT-NeoX's kind whose shapes the files have."""
    blocks = _number_of_blocks(reader)
    hidden = reader.parts(0, WORD_EMBEDDINGS)[0].shape[1]
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
        tie_word_embeddings=_head_weight(reader) is None,
    )


def summarize(reader: CheckpointReader, *, verify: bool = True) -> Summary:
    """Describe a checkpoint.

    Args:
        reader: Reader with layers.
        verify: Whether every byte is read and checked.
    """
    assert reader.layers is not None
    bytes_on_disk = 0
    data_ranks = []
    for path in reader.path.rglob("*"):
        if path.is_file():
            bytes_on_disk += path.stat().st_size
            optimizer_file = parse_optimizer_file(path.name)
            if optimizer_file is not None:
                data_ranks.append(optimizer_file.dp_rank)
    dtypes = set()
    for index, name in reader.items():
        dtypes.add(_name(reader.parts(index, name)[0].dtype))
    return Summary(
        path=reader.path,
        iteration=reader.iteration_or_none,
        tp_size=reader.tp_size,
        pp_size=reader.pp_size,
        dp_size=1 + max(data_ranks) if data_ranks else None,
        layers=reader.layers.architecture.num_layers,
        parameters=reader.layers.numel,
        active_parameters=reader.layers.active_numel,
        dtypes=tuple(sorted(dtypes)),
        bytes_on_disk=bytes_on_disk,
        has_manifest=read_manifest(reader.path) is not None,
        optimizer_files=len(data_ranks),
        averaged_steps=reader.client_state.get(AVERAGED_STEPS),
        averaged_from=dict(reader.client_state.get(AVERAGED_FROM) or {}),
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
    reader.note_averages()


def compare_checkpoints(first: CheckpointReader, second: CheckpointReader) -> Iterator[TensorDifference]:
    """Yield the parameters that differ between two checkpoints of any parallel degrees."""
    in_first = set(first.items())
    in_second = set(second.items())
    for index, name in sorted(in_first | in_second):
        if (index, name) not in in_second:
            yield TensorDifference(index, name, "only in the first")
            continue
        if (index, name) not in in_first:
            yield TensorDifference(index, name, "only in the second")
            continue
        difference = _compare(index, name, first.full(index, name), second.full(index, name))
        if difference is not None:
            yield difference
    first.note_averages()
    second.note_averages()


def _compare(index: int, name: str, a: Tensor, b: Tensor) -> TensorDifference | None:
    """Return the difference of a parameter in two checkpoints; None if it is the same."""
    if a.shape != b.shape:
        return TensorDifference(index, name, f"shape {list(a.shape)} and {list(b.shape)}")
    if a.dtype == b.dtype and torch.equal(a, b):
        return None
    what = "values" if a.dtype == b.dtype else f"{_name(a.dtype)} and {_name(b.dtype)}"
    a = a.double()
    b = b.double()
    difference = (a - b).abs().max().item()
    largest = max(a.abs().max().item(), b.abs().max().item())
    relative = difference / largest if largest > 0 else 0.0
    return TensorDifference(index, name, what, difference, relative)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
