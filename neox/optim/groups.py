"""Parameter groups: which weights decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def decays(parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, not to biases and norms (gpt-neox's rule; both are vectors).

    The same as `ParameterSpec.decay` of the layer plan, told from the tensor, so that it holds on every rank and stage.
    """
    # Under ZeRO-3 a gathered-on-demand parameter is an empty tensor here; DeepSpeed keeps its true shape in ds_shape.
    return len(getattr(parameter, "ds_shape", parameter.shape)) > 1


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Return torch optimizer groups: decayed matrices first, then what does not decay; groups without members left out.

    Frozen parameters are left out. Order within a group is that of `named_parameters`.
    """
    parameters = [p for _, p in named_parameters if p.requires_grad]
    groups = (
        {"params": [p for p in parameters if decays(p)], "weight_decay": weight_decay},
        {"params": [p for p in parameters if not decays(p)], "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]
