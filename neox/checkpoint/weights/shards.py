"""Splitting one parameter over tensor ranks, and joining the parts that tensor ranks saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from neox.architecture import ParameterSpec
from neox.errors import CheckpointError
from neox.parallel import shard


def join(spec: ParameterSpec, parts: Sequence[Tensor], *, where: str) -> Tensor:
    """Join the tensor ranks' values of one parameter.

    Args:
        spec: The parameter.
        parts: Value of each tensor rank. A split parameter is merged. A `summed_in_neox` bias is added up in fp32. The
            copies of a replicated parameter are averaged in fp32 where they differ.
        where: File or directory, for messages.

    Returns:
        The full tensor.

    Raises:
        CheckpointError: If replicated values have different shapes.
    """
    if len(parts) == 1:
        return parts[0]
    if spec.partition_dim is not None:
        return merge(spec, parts)
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1:
        raise CheckpointError(
            f"{where}: {spec.name} is the same on every tensor rank of one model, but here it has the shapes "
            f"{', '.join(str(list(shape)) for shape in sorted(shapes))}: the files are of several models"
        )
    if spec.summed_in_neox:
        return _stacked(parts).sum(0).to(parts[0].dtype)
    return mean_of_copies(parts)


def mean_of_copies(copies: Sequence[Tensor]) -> Tensor:
    """Return the mean of the tensor ranks' copies of a replicated value; bit for bit the value where they are equal.

    In gpt-neox nothing keeps the copies of norms and biases equal. Each rank of GPT-NeoX-20B has its own, and so have
    the networks that its files are converted to: their mean.
    """
    if all(torch.equal(copies[0], copy) for copy in copies[1:]):
        return copies[0]
    return _stacked(copies).mean(0).to(copies[0].dtype)


def spread(copies: Sequence[Tensor]) -> float:
    """Return the largest difference between the tensor ranks' copies of an element; 0 if all are equal."""
    if all(torch.equal(copies[0], copy) for copy in copies[1:]):
        return 0.0
    values = _stacked(copies)
    return float((values.amax(0) - values.amin(0)).max())


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Return parts [...] as one tensor [number of parts, ...], in fp32 or more."""
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    return torch.stack([part.to(dtype) for part in parts])


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
