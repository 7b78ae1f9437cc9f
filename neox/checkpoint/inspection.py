"""Looking into checkpoints: what one holds, and how two differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox.checkpoint.finding import why_not_whole
from neox.checkpoint.inference import infer_layer_plan
from neox.checkpoint.manifest import read_manifest
from neox.checkpoint.names import parse_optimizer_file
from neox.checkpoint.reader import CheckpointReader


@dataclass(frozen=True)
class Summary:
    """One checkpoint at a glance. Degrees are those of its files; None where nothing tells.

    problems: why it is not whole (its manifest's hashes, or the archives' own checksums), empty if it is.
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
class TensorFacts:
    """One parameter over all tensor ranks. sha256: of its bytes, row-major."""

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
    """One parameter that differs: why, and by how much where shapes agree."""

    index: int
    name: str
    what: str
    largest: float | None = None
    relative: float | None = None


def open_checkpoint(path: Path, *, gpt_j_residual: bool | None = None) -> CheckpointReader:
    """Open a `global_stepN` directory with the layer plan that its files imply. Raises CheckpointError."""
    return CheckpointReader(path, infer_layer_plan(CheckpointReader(path), gpt_j_residual=gpt_j_residual))


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
        problems=tuple(why_not_whole(reader.path, hashes=verify)),
    )


def tensor_facts(reader: CheckpointReader) -> Iterator[TensorFacts]:
    """Every parameter with its norm, largest value and hash, one in memory at a time."""
    for index, name in reader.items():
        full = reader.full(index, name)
        values = full.double()
        yield TensorFacts(
            index=index,
            name=name,
            shape=tuple(full.shape),
            dtype=_name(full.dtype),
            norm=values.norm().item(),
            largest=values.abs().max().item(),
            finite=bool(values.isfinite().all()),
            sha256=_sha256(full),
        )


def compare_checkpoints(first: CheckpointReader, second: CheckpointReader) -> Iterator[TensorDifference]:
    """Parameters that differ between two checkpoints, whatever their degrees."""
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


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
