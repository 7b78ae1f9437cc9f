"""Time passing: the loop, what watches it, and the composition root."""

from neox.train.pretrain import pretrain
from neox.train.trainer import Trainer

__all__ = ["Trainer", "pretrain"]
