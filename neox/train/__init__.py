"""Training loop, callbacks and `pretrain`."""

from neox.train.pretrain import pretrain
from neox.train.trainer import Trainer

__all__ = ["Trainer", "pretrain"]
