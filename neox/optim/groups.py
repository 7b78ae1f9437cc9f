"""Parameter groups: weight decay and factors of the learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from neox.optim.clipping import EXPERTS
from neox.parallel import holds_divided_experts
from neox.plan import RunPlan


def decays(parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies, as in gpt-neox: to matrices and positions, not to biases and norms."""
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
    hidden_scale: float = 1.0,
    hidden_apart: bool = False,
) -> list[dict[str, Any]]:
    """Split parameters into torch optimizer groups.

    A group holds parameters that agree in whether they are hidden matrices that are updated in another way, in whether
    and how much they decay, and in the factors of their learning rate. Groups come in the order of (hidden, decayed,
    smallest factors first).

    Args:
        named_parameters: Parameters in the order that each group keeps; frozen ones are left out.
        weight_decay: Weight decay of parameters that decay.
        scale: Factor of all learning rates.
        hidden_scale: Further factor of those of hidden matrices in groups of their own.
        hidden_apart: Whether hidden matrices (`mark_hidden`) have groups of their own, which have `hidden`.

    Returns:
        The groups that have members. A group whose factor is not 1 has it as `lr_factor`. Factors of `mark_lr_factor`
        leave the product of learning rate and weight decay as it is; those of `mark_group` change it, as the learning
        rate of one of torch's groups does.
    """
    members: dict[_GroupKey, list[nn.Parameter]] = {}
    for _, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        decayed = decays(parameter)
        decay = weight_decay if decayed else 0.0
        own_decay: float | None = getattr(parameter, "group_weight_decay", None)
        if own_decay is not None:
            decayed = own_decay > 0
            decay = own_decay
        key = _GroupKey(
            hidden=hidden_apart and is_hidden(parameter),
            decayed=decayed,
            decay=decay,
            factor=float(getattr(parameter, "lr_factor", 1.0)),
            group_factor=float(getattr(parameter, "group_lr_factor", 1.0)),
            divided=holds_divided_experts(parameter),
        )
        members.setdefault(key, []).append(parameter)

    groups = []
    for key in sorted(members, key=_GroupKey.order):
        factor = scale * key.factor
        if key.hidden:
            factor *= hidden_scale
        group: dict[str, Any] = {"params": members[key], "weight_decay": key.decay / factor}
        if factor * key.group_factor != 1.0:
            group["lr_factor"] = factor * key.group_factor
        if key.hidden:
            group["hidden"] = True
        if key.divided:
            group.update(moe=True, name=EXPERTS)  # DeepSpeed's marks
        groups.append(group)
    return groups


class _GroupKey(NamedTuple):
    """What the parameters of one group have in common.

    Attributes:
        hidden: Whether they are hidden matrices that are updated in another way.
        decayed: Whether weight decay applies.
        decay: Weight decay at a factor of 1.
        factor: Factor of the learning rate that follows from the network.
        group_factor: Factor of the learning rate that `parameter_groups` gives.
        divided: Whether they are experts that data ranks divide.
    """

    hidden: bool
    decayed: bool
    decay: float
    factor: float
    group_factor: float
    divided: bool

    def order(self) -> tuple[bool, bool, float, float, float, bool]:
        """Return what groups are sorted by: hidden and decayed ones come first. Checkpoints number groups so."""
        return not self.hidden, not self.decayed, self.factor, self.group_factor, self.decay, self.divided


def planned_groups(plan: RunPlan, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Return the parameter groups of a run's optimizer.

    Under muP (arXiv:2203.03466, table 8) gradients shrink with the width m. The factors of parameters are made for
    optimizers like Adam, whose steps do not depend on the size of the gradient. For others all learning rates grow
    accordingly, for SGD by m.

    What counts for hidden states is the largest singular value of a matrix's step, which should stay as it is
    (arXiv:2310.17813). That of Adam's steps grows by m with the width. All singular values of Muon's steps are equal,
    and with elements of the same size they grow by the root of m only.
    """
    keys = plan.config.optimizer
    width = keys.width_multiplier(plan.architecture.hidden_size)
    kind = keys.optimizer.kind
    return parameter_groups(
        named_parameters,
        keys.applied_weight_decay,
        scale=width**kind.gradient_degree,
        hidden_scale=width**kind.width_degree,
        hidden_apart=kind.hidden_apart,
    )


def is_hidden(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix between hidden states."""
    return getattr(parameter, "hidden", False)
