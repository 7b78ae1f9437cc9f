"""Coordinate check of muP: how far the first optimizer steps move hidden states and logits at several widths.

Under muP the movement does not depend on the width. If it grows with the width, a learning rate that was tuned at one
width is too high at a larger one (arXiv:2203.03466, appendix D.1).
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
from neox.plan import RunPlan, resolve

_VOCABULARY = 512
_LONGEST = 128
"""Most tokens of a row."""
_ROWS = 4


@dataclass(frozen=True)
class Movement:
    """Mean absolute change since initialisation, after each step.

    Attributes:
        hidden_size: The width.
        hidden: Change of the hidden states after the last block.
        logits: Change of the logits.
    """

    hidden_size: int
    hidden: tuple[float, ...]
    logits: tuple[float, ...]


def coordinate_check(config: NeoXConfig, widths: Sequence[int], *, steps: int = 3) -> list[Movement]:
    """Train on one batch of random tokens at several widths, in fp32 and only on this process.

    Args:
        config: The network and its optimizer; `hidden_size` is replaced, the number of heads stays.
        widths: Hidden sizes.
        steps: Number of optimizer steps at the peak learning rate, without warm-up.
    """
    return [_movement(config, width, steps) for width in widths]


def _movement(config: NeoXConfig, width: int, steps: int) -> Movement:
    plan = _plan_of_width(config, width)
    length = min(config.model.seq_length or _LONGEST, _LONGEST)
    model = GPT(plan, ParallelGrid.single())
    optimizer = build_optimizer(plan, model.named_parameters())
    for group in optimizer.param_groups:
        group["lr"] = plan.config.optimizer.optimizer.params.lr * group.get("lr_factor", 1.0)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, _VOCABULARY, (_ROWS, length + 1), generator=generator)
    tokens = rows[:, :-1]
    targets = (rows[:, 1:], torch.full((_ROWS, length), 1 / (_ROWS * length)))
    first_hidden, first_logits = _states(model, tokens)
    hidden: list[float] = []
    logits: list[float] = []
    for _ in range(steps):
        loss = model(tokens, loss=partial(CausalLM().scores, targets=targets))[0]
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        new_hidden, new_logits = _states(model, tokens)
        hidden.append((new_hidden - first_hidden).abs().mean().item())
        logits.append((new_logits - first_logits).abs().mean().item())
    return Movement(width, tuple(hidden), tuple(logits))


def _plan_of_width(config: NeoXConfig, width: int) -> RunPlan:
    """Return a plan of one rank in fp32, without dropout, with another hidden size."""
    changed = {
        "precision": "fp32",
        "hidden_size": width,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "train_micro_batch_size_per_gpu": _ROWS,
    }
    removed = ("pipe_parallel_size", "model_parallel_size", "fp16", "bf16", "zero_optimization", "train_batch_size")
    return resolve(config.updated(changed, without=removed), 1, _VOCABULARY)


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
