"""Coordinate check of muP: how far the first optimizer steps move hidden states and logits at several widths.

Under muP the movement does not depend on the width; where it grows, a learning rate tuned at one width is too high at a
larger one (arXiv:2203.03466, appendix D.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from neox.config import NeoXConfig
from neox.model import GPT, Aux
from neox.objectives import CausalLM
from neox.optim import build_optimizer
from neox.parallel import ParallelGrid
from neox.plan import resolve

_VOCABULARY, _LONGEST, _ROWS = 512, 128, 4


@dataclass(frozen=True)
class Movement:
    """Mean absolute change since initialisation, after each step.

    Attributes:
        hidden_size: The width.
        hidden: Of the hidden states after the last block.
        logits: Of the logits.
    """

    hidden_size: int
    hidden: tuple[float, ...]
    logits: tuple[float, ...]


def coordinate_check(config: NeoXConfig, widths: Sequence[int], *, steps: int = 3) -> list[Movement]:
    """Train on one batch of random tokens at several widths, in fp32 on this process alone.

    Args:
        config: The network and its optimizer; `hidden_size` is replaced, the number of heads stays.
        widths: Hidden sizes.
        steps: Optimizer steps at the peak learning rate, without warm-up.
    """
    return [_movement(config, width, steps) for width in widths]


def _movement(config: NeoXConfig, width: int, steps: int) -> Movement:
    length = min(config.model.seq_length or _LONGEST, _LONGEST)
    alone = {"precision": "fp32", "hidden_size": width, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    degrees = ("pipe_parallel_size", "model_parallel_size", "fp16", "bf16", "zero_optimization", "train_batch_size")
    plan = resolve(config.updated({**alone, "train_micro_batch_size_per_gpu": _ROWS}, without=degrees), 1, _VOCABULARY)
    grid = ParallelGrid.single()
    model = GPT(plan, grid)
    optimizer = build_optimizer(plan, model.named_parameters())
    for group in optimizer.param_groups:
        group["lr"] = plan.config.optimizer.optimizer.params.lr * group.get("lr_factor", 1.0)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, _VOCABULARY, (_ROWS, length + 1), generator=generator)
    targets = (tokens[:, 1:], torch.full((_ROWS, length), 1 / (_ROWS * length)))
    seen = [_states(model, tokens[:, :-1])]
    for _ in range(steps):
        loss = model(tokens[:, :-1], loss=partial(CausalLM().scores, targets=targets))[0]
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        seen.append(_states(model, tokens[:, :-1]))
    hidden, logits = (
        tuple((state[i] - seen[0][i]).abs().mean().item() for state in seen[1:]) for i in range(len(seen[0]))
    )
    return Movement(width, hidden, logits)


@torch.no_grad()
def _states(model: GPT, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden states after the last block, and the logits."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, arguments: object, output: tuple[Tensor, Aux]) -> None:
        kept.append(output[0])

    hook = model.blocks[-1].register_forward_hook(keep)
    logits = model(tokens)
    hook.remove()
    return kept[0], logits
