"""Construction of a run's optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from torch import nn

from neox.optim.adamw import AdamW
from neox.optim.clipping import ClippedOptimizer, NormScope
from neox.optim.eight_bits import Adam8bit, Lion8bit
from neox.optim.groups import planned_groups
from neox.optim.lion import Lion
from neox.optim.madgrad import MADGRAD
from neox.optim.muon import Muon
from neox.optim.sm3 import SM3
from neox.optim.torch_optimizers import SGD, Adafactor
from neox.plan import RunPlan

CLASSES: Mapping[str, type[ClippedOptimizer]] = MappingProxyType(
    {
        "adam": AdamW,
        "lion": Lion,
        "sgd": SGD,
        "madgrad": MADGRAD,
        "sm3": SM3,
        "adafactor": Adafactor,
        "muon": Muon,
        "adam8bit": Adam8bit,
        "lion8bit": Lion8bit,
    }
)
"""The class of each optimizer in `neox.config`'s table `OPTIMIZERS`."""


def build_optimizer(
    plan: RunPlan, named_parameters: Iterable[tuple[str, nn.Parameter]], clip: NormScope | None = None
) -> ClippedOptimizer:
    """Build the optimizer; its learning rate is 0 until it is scheduled.

    Args:
        plan: The run.
        named_parameters: This rank's parameters.
        clip: Scope of the norm if this optimizer clips (ZeRO 0); None if DeepSpeed's wrapper does.
    """
    settings = plan.config.optimizer.optimizer
    groups = planned_groups(plan, named_parameters)
    max_norm = plan.config.deepspeed.gradient_clipping if clip is not None else 0.0
    return CLASSES[settings.name](groups, max_norm=max_norm, scope=clip, lr=0.0, **settings.params.options())
