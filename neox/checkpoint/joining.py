"""Joining and splitting one parameter over tensor ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from neox.architecture import ParameterSpec
from neox.errors import CheckpointError

OnDrift = Literal["refuse", "average"]
VOCABULARY = ("word_embeddings.weight", "final_linear.weight")
_SPLIT_DIM = {
    "word_embeddings.weight": 0,
    "attention.query_key_value.weight": 0,
    "attention.query_key_value.bias": 0,
    "attention.dense.weight": 1,
    "mlp.dense_h_to_4h.weight": 0,
    "mlp.dense_h_to_4h.bias": 0,
    "mlp.dense_4h_to_h.weight": 1,
}
_ROW_BIASES = ("attention.dense.bias", "mlp.dense_4h_to_h.bias")


def spec_without_plan(name: str, shape: Sequence[int], tp_size: int, *, hidden_size: int | None) -> ParameterSpec:
    """Guess a parameter's split from its name and its shape on one rank, for a checkpoint read without a layer plan.

    Raises CheckpointError for a row-parallel bias with tp_size > 1: whether to sum or to take one depends on the model.
    """
    dim = _SPLIT_DIM.get(name)
    if name == "final_linear.weight":  # [V / tp, H] (column) or [V, H / tp] (row)
        dim = 1 if hidden_size is not None and shape[1] != hidden_size else 0
    if name in _ROW_BIASES and tp_size > 1:
        raise CheckpointError(
            f"{name} of {tp_size} tensor ranks is a sum under gpt_j_residual and one value otherwise: "
            "give the model's config so that the right one is taken"
        )
    full = tuple(n * tp_size if i == dim else n for i, n in enumerate(shape))
    return ParameterSpec(name, full, dim)


def join(spec: ParameterSpec, parts: Sequence[Tensor], *, where: str, on_drift: OnDrift = "refuse") -> Tensor:
    """Join the tensor ranks' values of one parameter into the full tensor.

    A split parameter is concatenated, a `summed_in_neox` bias added up in fp32, a replicated one must be equal on every
    rank (or is averaged with on_drift="average"). where: file or directory for messages.
    """
    if len(parts) == 1:
        return parts[0]
    if spec.partition_dim is not None:
        return torch.cat(list(parts), dim=spec.partition_dim)
    if spec.summed_in_neox:
        return torch.stack([part.float() for part in parts]).sum(0).to(parts[0].dtype)
    if all(torch.equal(parts[0], part) for part in parts[1:]):
        return parts[0]
    if on_drift == "average":
        return torch.stack([part.float() for part in parts]).mean(0).to(parts[0].dtype)
    largest = max((parts[0].float() - part.float()).abs().max().item() for part in parts[1:])
    raise CheckpointError(
        f"{where}: {spec.name} should be the same on every tensor rank, but the {len(parts)} copies differ by up to "
        f"{largest:.3g}; the run that wrote it let them drift apart (they can be averaged: on_drift='average')"
    )


def shard(spec: ParameterSpec, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
    """Return tensor rank `tp_rank`'s part of a full tensor, a view; replicated and summed parameters are whole."""
    if spec.partition_dim is None or tp_size == 1:
        return full
    start, length = shard_range(spec, tp_rank, tp_size)
    return full.narrow(spec.partition_dim, start, length)


def joined_shape(spec: ParameterSpec, parts: Sequence[Tensor]) -> tuple[int, ...]:
    """Shape of the full tensor that the stored parts make."""
    dim = spec.partition_dim
    return tuple(sum(p.shape[i] for p in parts) if i == dim else n for i, n in enumerate(parts[0].shape))


def shard_range(spec: ParameterSpec, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """(start, length) of tensor rank `tp_rank`'s part along a split parameter's dimension."""
    assert spec.partition_dim is not None
    length = spec.shape[spec.partition_dim]
    if length % tp_size:
        raise CheckpointError(f"{spec.name}: {length} along dimension {spec.partition_dim} do not divide by {tp_size}")
    part = length // tp_size
    return tp_rank * part, part


def join_range(spec: ParameterSpec, parts: Sequence[Tensor], start: int, length: int) -> Tensor:
    """Elements [start, start + length) along a split parameter's dimension, reading only the parts that hold them."""
    assert spec.partition_dim is not None
    dim, pieces, offset = spec.partition_dim, [], 0
    for part in parts:
        first, last = max(start, offset), min(start + length, offset + part.shape[dim])
        if first < last:
            pieces.append(part.narrow(dim, first - offset, last - first))
        offset += part.shape[dim]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)


def neox_shard(spec: ParameterSpec, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
    """Like `shard`, as gpt-neox's files hold it: a summed bias is whole on rank 0 and zero on the others."""
    if spec.summed_in_neox and tp_rank > 0:
        return torch.zeros_like(full)
    return shard(spec, full, tp_rank, tp_size)


def fit_vocabulary(spec: ParameterSpec, full: Tensor, vocab_size: int | None) -> Tensor:
    """Cut or grow the rows of a vocabulary tensor to the plan's padded size.

    vocab_size: ids in use when the checkpoint was written, None when unknown; cutting one is a CheckpointError.
    New rows copy the last padding row, which training has pushed down; without padding rows they are zero.
    """
    rows, wanted = full.shape[0], spec.shape[0]
    if rows == wanted:
        return full
    if wanted < rows:
        if vocab_size is not None and wanted < vocab_size:
            raise CheckpointError(
                f"{spec.name}: the checkpoint uses {vocab_size} token ids, but this model has only {wanted} rows; "
                "use the tokenizer that the checkpoint was trained with"
            )
        return full.narrow(0, 0, wanted)
    has_padding = vocab_size is not None and vocab_size < rows
    fill = full[-1:] if has_padding else torch.zeros_like(full[-1:])
    return torch.cat([full, fill.expand(wanted - rows, *full.shape[1:])])
