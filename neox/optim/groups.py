"""Parameter groups: weight decay and factors of the learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from neox.plan import RunPlan


def decays(parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies: to matrices, not to biases and norms, as in gpt-neox.

    Also to tables of positions, which gpt-neox decays too.
    """
    marked: bool | None = getattr(parameter, "decays", None)
    if marked is not None:
        return marked
    # Under ZeRO-3 a partitioned parameter is an empty tensor; DeepSpeed keeps its full shape in ds_shape.
    return len(getattr(parameter, "ds_shape", parameter.shape)) > 1


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    *,
    scale: float = 1.0,
    hidden_apart: bool = False,
) -> list[dict[str, Any]]:
    """Split parameters into torch optimizer groups: first those with weight decay, then those without.

    Args:
        named_parameters: Parameters in the order that each group keeps; frozen ones are left out.
        weight_decay: Decay of the first group; the second has 0.
        scale: Factor of all learning rates.
        hidden_apart: Whether hidden matrices (`mark_hidden`) have groups of their own, which have `hidden`.

    Returns:
        The groups that have members. Those of parameters with a factor of the learning rate (`mark_lr_factor`) come
        first. A group whose factor is not 1 has it as `lr_factor`; the product of learning rate and weight decay is the
        same in all.
    """
    parameters = [p for _, p in named_parameters if p.requires_grad]
    factors = sorted({_factor(p) for p in parameters})
    groups: list[dict[str, Any]] = [
        {
            "params": [
                p
                for p in parameters
                if decays(p) == decayed and _factor(p) == factor and (hidden_apart and is_hidden(p)) == hidden
            ],
            "weight_decay": weight_decay / (scale * factor) if decayed else 0.0,
        }
        | ({} if scale * factor == 1.0 else {"lr_factor": scale * factor})
        | ({"hidden": True} if hidden else {})
        for hidden in (True, False)
        for decayed in (True, False)
        for factor in factors
    ]
    return [group for group in groups if group["params"]]


def planned_groups(plan: RunPlan, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Return the parameter groups of a run's optimizer.

    Under muP (arXiv:2203.03466, table 8) gradients shrink with the width m. Marks of parameters are for optimizers like
    Adam, whose steps do not depend on the size of the gradient; for others all learning rates grow accordingly, with
    SGD by m.
    """
    keys = plan.config.optimizer
    width = keys.width_multiplier(plan.architecture.hidden_size)
    scale = width**keys.optimizer.kind.gradient_degree
    return parameter_groups(
        named_parameters, keys.applied_weight_decay, scale=scale, hidden_apart=keys.optimizer.kind.hidden_apart
    )


def is_hidden(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix between hidden states."""
    return getattr(parameter, "hidden", False)


def _factor(parameter: nn.Parameter) -> float:
    return float(getattr(parameter, "lr_factor", 1.0))
