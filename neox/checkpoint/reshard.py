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
VOCABULARY = ("word_embeddings.weight", "final_linear.weight", "final_linear.bias")
"""Parameters with a row for each token id."""


def join(spec: ParameterSpec, parts: Sequence[Tensor], *, where: str, on_drift: OnDrift = "refuse") -> Tensor:
    """Join the tensor ranks' values of one parameter.

    Args:
        spec: The parameter.
        parts: Value of each tensor rank. A split parameter is merged, a `summed_in_neox` bias is added up in
            fp32, a replicated one must be equal on every rank.
        where: File or directory, for messages.
        on_drift: "average" takes the mean of replicated values that differ.

    Returns:
        The full tensor.

    Raises:
        CheckpointError: If replicated values differ.
    """
    if len(parts) == 1:
        return parts[0]
    if spec.partition_dim is not None:
        return merge(spec, parts)
    if spec.summed_in_neox:
        return torch.stack([part.float() for part in parts]).sum(0).to(parts[0].dtype)
    if all(torch.equal(parts[0], part) for part in parts[1:]):
        return parts[0]
    if on_drift == "average":
        return torch.stack([part.float() for part in parts]).mean(0).to(parts[0].dtype)
    largest = max((parts[0].float() - part.float()).abs().max().item() for part in parts[1:])
    raise CheckpointError(
        f"{where}: {spec.name} should be the same on every tensor rank, but the {len(parts)} copies differ by up to "
        f"{largest:.3g}: the run that wrote it let them drift apart; on_drift='average' takes their mean"
    )


def joined_shape(spec: ParameterSpec, parts: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the shape of the full tensor that the stored parts make."""
    dim = spec.partition_dim
    return tuple(sum(p.shape[i] for p in parts) if i == dim else n for i, n in enumerate(parts[0].shape))


def pieces_in_order(spec: ParameterSpec, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the tensor ranks' parts of a split parameter whose concatenation is the full tensor."""
    assert spec.partition_dim is not None
    if len(parts) == 1 or any(part.shape != spec.shard_shape(len(parts)) for part in parts):
        return list(parts)  # of another padding, or of another model: without sections
    located = []
    for rank, part in enumerate(parts):
        offset = 0
        for start, length in spec.ranges(rank, len(parts)):
            located.append((start, part.narrow(spec.partition_dim, offset, length)))
            offset += length
    return [piece for _, piece in sorted(located, key=lambda found: found[0])]


def merge(spec: ParameterSpec, parts: Sequence[Tensor], ranges: Sequence[tuple[int, int]] | None = None) -> Tensor:
    """Return a split parameter from the tensor ranks' parts: the inverse of `neox.parallel.shard`.

    Args:
        spec: The parameter.
        parts: Value of each tensor rank.
        ranges: (start, length) along the split dimension of what is wanted, one after another; all of it if None. Only
            the parts that hold it are read.
    """
    assert spec.partition_dim is not None
    dim, pieces = spec.partition_dim, pieces_in_order(spec, parts)
    if ranges is not None:
        pieces = [piece for start, length in ranges for piece in _cut(pieces, dim, start, length)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _cut(pieces: Sequence[Tensor], dim: int, start: int, length: int) -> Iterator[Tensor]:
    """Yield elements [start, start + length) of the concatenation of pieces along a dimension."""
    offset = 0
    for piece in pieces:
        first, last = max(start, offset), min(start + length, offset + piece.shape[dim])
        if first < last:
            yield piece.narrow(dim, first - offset, last - first)
        offset += piece.shape[dim]


def neox_shard(spec: ParameterSpec, full: Tensor, tp_rank: int, tp_size: int) -> Tensor:
    """Return a tensor rank's part as gpt-neox's files hold it: a summed bias is whole on rank 0, zero on the others."""
    if spec.summed_in_neox and tp_rank > 0:
        return torch.zeros_like(full)
    return shard(full, spec, tp_rank, tp_size)


def fit_vocabulary(spec: ParameterSpec, full: Tensor, vocab_size: int | None) -> Tensor:
    """Cut or extend the rows of a vocabulary tensor to the plan's padded size.

    New rows copy the last padding row, whose logits training has made small; without padding rows they are zero.

    Args:
        spec: The parameter in the network that reads.
        full: The stored tensor [V, H].
        vocab_size: Token ids in use when the checkpoint was written; None if unknown.

    Raises:
        CheckpointError: If a row in use would be cut.
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
