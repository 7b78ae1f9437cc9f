"""What one pipeline stage hands to the next, and the forward pass over all stages outside of training.

Legend: B batch, S sequence, H hidden, K losses of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from neox.architecture import CHOICES, Architecture, block_losses, block_statistics
from neox.model.context import Aux, Context
from neox.model.stage import Stage
from neox.parallel import ParallelGrid


@dataclass(frozen=True)
class Handoff:
    """Form in which training passes tensors from stage to stage.

    Hidden states come first. If padding is marked, the lengths of padded rows follow; if documents are kept apart, the
    positions where they start. The losses and statistics that blocks have added so far come last: their
    values only, which the last stage reports. Each stage trains its own losses by itself (`attach_losses`).

    Integers are passed because the pipeline engine expects a gradient for every tensor of floating-point numbers, and
    runs one backward pass for each. So losses travel as the bits of their fp32 values.
    """

    losses: tuple[str, ...]
    token_types: bool = False
    lengths: bool = False
    documents: bool = False

    @classmethod
    def of(cls, architecture: Architecture, *, lengths: bool = False, documents: bool = False) -> Handoff:
        """Return the form for a network whose padding may be marked, and whose documents may be kept apart."""
        statistics = block_statistics(architecture)
        losses = block_losses(architecture) + statistics + ((CHOICES,) if statistics else ())
        is_bidirectional = architecture.bidirectional
        return cls(losses, is_bidirectional, lengths or is_bidirectional, documents)

    def pack(self, hidden: Tensor, context: Context, aux: Aux) -> Tensor | tuple[Tensor, ...]:
        """Return what a stage passes on.

        Args:
            hidden: Hidden states [B, S, H].
            context: The stage's context.
            aux: Losses of all blocks up to this stage.
        """
        passed = [hidden]
        if self.lengths:
            assert context.lengths is not None
            passed.append(context.lengths)
        if self.documents:
            assert context.document_starts is not None
            passed.append(context.document_starts)
        if self.losses:
            zero = torch.zeros((), device=hidden.device)
            values = torch.stack([aux.get(name, zero).detach().float() for name in self.losses])
            passed.append(values.view(torch.int32))
        if len(passed) == 1:
            return hidden
        return tuple(passed)

    def unpack(self, given: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, Context, Aux]:
        """Return the hidden states, the context and the losses that `pack` was given."""
        if isinstance(given, Tensor):
            return given, Context(), {}
        hidden, *others = given
        lengths = others.pop(0) if self.lengths else None
        document_starts = others.pop(0) if self.documents else None
        context = Context(lengths=lengths, document_starts=document_starts)
        aux: Aux = {}
        if self.losses:
            values = others.pop(0).view(torch.float32)
            aux = dict(zip(self.losses, values.unbind(), strict=True))
        return hidden, context, aux

    def unpack_batch(self, given: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, Context]:
        """Return the tokens and the context that the first stage gets: an objective's inputs, in their order."""
        if isinstance(given, Tensor):
            return given, Context()
        tokens, *others = given
        token_types = others.pop(0) if self.token_types else None
        lengths = others.pop(0) if self.lengths else None
        document_starts = others.pop(0) if self.documents else None
        return tokens, Context(token_types=token_types, lengths=lengths, document_starts=document_starts)


def attach_losses(hidden: Tensor, aux: Aux, factor: float) -> Tensor:
    """Return hidden states whose backward pass also trains the losses of a stage's blocks.

    The gradient of the objective's loss arrives through the hidden states; that of these losses begins here.

    Args:
        hidden: Hidden states that the stage passes on [B, S, H].
        aux: Losses of the stage's blocks.
        factor: What the objective's loss is multiplied with before its backward pass: the loss scale divided by the
            number of micro batches.
    """
    losses = [loss for loss in aux.values() if loss.requires_grad]
    if not losses or not torch.is_grad_enabled():
        return hidden
    attached: Tensor = _WithLoss.apply(hidden, torch.stack(losses).sum(), factor)
    return attached


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.gradient = torch.full_like(loss, factor)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.gradient, None


def forward_over_stages(stage: Stage, tokens: Tensor, context: Context, dtype: torch.dtype) -> Tensor | None:
    """Run the network outside of training. All ranks of a model call it together with the same tokens and context.

    Args:
        stage: The stage on this rank.
        tokens: Token ids [B, S].
        context: What is known of the tokens.
        dtype: Type of hidden states.

    Returns:
        Hidden states after the final norm [B, S, H] on the stage that holds the head; None on the others.
    """
    grid = stage.grid
    batch, length = tokens.shape
    if context.begins:
        length += stage.architecture.soft_prompt_tokens
    x = tokens
    for number, stage_range in enumerate(stage.ranges):
        if stage_range.previous is not None and stage_range.previous != grid.pp_rank:
            x = torch.empty(batch, length, stage.architecture.hidden_size, device=tokens.device, dtype=dtype)
            dist.recv(x, src=_rank_of_stage(grid, stage_range.previous), group=grid.pp_group)
        x, _ = stage.forward(x, context, number)
        if stage_range.following is not None and stage_range.following != grid.pp_rank:
            dist.send(x.contiguous(), dst=_rank_of_stage(grid, stage_range.following), group=grid.pp_group)
    if not stage.ranges[-1].is_last:
        return None
    return x


def broadcast_from_head(stage: Stage, x: Tensor) -> None:
    """Copy `x` from the stage that holds the head to all stages of this model, in place."""
    grid = stage.grid
    if grid.pp_size > 1:
        dist.broadcast(x, src=_rank_of_stage(grid, stage.head_stage), group=grid.pp_group)


def _rank_of_stage(grid: ParallelGrid, stage: int) -> int:
    """Return the rank with this rank's data and tensor coordinates on another stage."""
    return grid.topology.rank_of(stage, grid.dp_rank, grid.tp_rank)
