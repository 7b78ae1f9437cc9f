"""Splitting one parameter over tensor ranks, and joining the parts that tensor ranks saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from neox.architecture import ParameterSpec
from neox.errors import CheckpointError
from neox.parallel import shard

OnDrift = Literal["refuse", "average"]


def join(spec: ParameterSpec, parts: Sequence[Tensor], *, where: str, on_drift: OnDrift = "refuse") -> Tensor:
    """Join the tensor ranks' values of one parameter.

    Args:
        spec: The parameter.
        parts: Value of each tensor rank. A split parameter is merged. A `summed_in_neox` bias is added up in fp32. A
            replicated parameter must be equal on every rank.
        where: File or directory, for messages.
        on_drift: Treatment of replicated values that differ; "average" takes their mean.

    Returns:
        The full tensor.

    Raises:
        CheckpointError: If replicated values differ.
    """
    if len(parts) == 1:
        return parts[0]
    if spec.partition_dim is not None:
        return merge(spec, parts)
    dtype = parts[0].dtype
    if spec.summed_in_neox:
        return _stacked(parts).sum(0).to(dtype)
    if all(torch.equal(parts[0], part) for part in parts[1:]):
        return parts[0]
    if on_drift == "average":
        return _stacked(parts).mean(0).to(dtype)
    values = _stacked(parts)
    largest = (values[1:] - values[0]).abs().max().item()
    raise CheckpointError(
        f"{where}: {spec.name} should be the same on every tensor rank, but the {len(parts)} copies differ by up to "
        f"{largest:.3g}: the run that wrote it let them drift apart; on_drift='average' takes their mean"
    )


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Return parts [...] as one fp32 tensor [number of parts, ...]."""
    return torch.stack([part.float() for part in parts])


def joined_shape(spec: ParameterSpec, parts: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the shape of the full tensor that the stored parts make up."""
    shape = list(parts[0].shape)
    if spec.partition_dim is not None:
        shape[spec.partition_dim] = sum(part.shape[spec.partition_dim] for part in parts)
    return tuple(shape)


def pieces_in_order(spec: ParameterSpec, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a split parameter's parts whose concatenation is the full tensor.

    A rank's part holds its share of each section. The views are ordered by section, then by rank.
    """
    dim = spec.partition_dim
    assert dim is not None
    if len(parts) == 1:
        return list(parts)
    if any(part.shape != spec.shard_shape(len(parts)) for part in parts):
        return list(parts)  # from another padding, or from another model: without sections
    by_start: dict[int, Tensor] = {}
    for rank, part in enumerate(parts):
        offset = 0
        for start, length in spec.ranges(rank, len(parts)):
            by_start[start] = part.narrow(dim, offset, length)
            offset += length
    return [by_start[start] for start in sorted(by_start)]


def merge(spec: ParameterSpec, parts: Sequence[Tensor], ranges: Sequence[tuple[int, int]] | None = None) -> Tensor:
    """Return a split parameter from the tensor ranks' parts: the inverse of `neox.parallel.shard`.

    Args:
        spec: The parameter.
        parts: Value of each tensor rank.
        ranges: Wanted (start, length) along the split dimension, one after another; None for the whole parameter. Only
            the parts that hold them are read.
    """
    dim = spec.partition_dim
    assert dim is not None
    pieces = pieces_in_order(spec, parts)
    if ranges is not None:
        whole = pieces
        sizes = [piece.shape[dim] for piece in whole]
        pieces = []
        for start, length in ranges:
            for number, first, count in overlaps(sizes, start, length):
                pieces.append(whole[number].narrow(dim, first, count))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def overlaps(sizes: Sequence[int], start: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of neighbouring pieces that make up a range of their concatenation.

    Args:
        sizes: Lengths of the pieces.
        start: First element of the range.
        length: Length of the range.

    Yields:
        Number of a piece, first element in the piece, number of elements.
    """
    offset = 0
    for number, size in enumerate(sizes):
        first = max(start, offset)
        end = min(start + length, offset + size)
        if first < end:
            yield number, first - offset, end - first
        offset += size


def neox_shard(spec: ParameterSpec, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
    """Return a tensor rank's part as gpt-neox's files hold it: rank 0 has the whole of a summed bias, others zeros."""
    if spec.summed_in_neox and tp_rank > 0:
        return torch.zeros_like(full)
    return shard(full, spec, tp_rank, tp_size)


def fit_vocabulary(spec: ParameterSpec, full: Tensor, vocab_size: int | None) -> Tensor:
    """Cut or extend the rows of a vocabulary tensor to the plan's padded size.

    New rows copy the last padding row, whose logits training has made small. Without padding rows they are zero.

    Args:
        spec: The parameter in the network that reads.
        full: The stored tensor [V, H] or [V].
        vocab_size: Number of token ids in use when the checkpoint was written; None if unknown.

    Raises:
        CheckpointError: If a row in use would be cut.
    """
    rows = full.shape[0]
    wanted = spec.shape[0]
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
    last = full[-1:]
    new_row = last if has_padding else torch.zeros_like(last)
    new_rows = new_row.expand(wanted - rows, *full.shape[1:])
    return torch.cat([full, new_rows])
