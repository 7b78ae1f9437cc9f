"""Forward-pass check of checkpoints (`checkpoint_validation_with_forward_pass`).

A checkpoint stores the logits of a fixed input; they are compared when it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neox.checkpoint import load_file
from neox.engine import Engine, Feature, RunStart, TrainedModel, all_succeeded
from neox.errors import CheckpointError
from neox.log import get_logger
from neox.parallel import gather_last_dim

_log = get_logger(__name__)
FILE = "validation_logits.pt"
_LENGTH = 64
_TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
"""Largest difference, relative to the largest logit. Other parallel degrees sum in another order, which 16 bits round
differently."""


def build(model: TrainedModel, start: RunStart) -> ForwardCheck | None:
    """Return the check; None without `checkpoint_validation_with_forward_pass`."""
    if not model.plan.config.checkpoint.checkpoint_validation_with_forward_pass:
        return None
    return ForwardCheck()


class ForwardCheck(Feature):
    """Stores the logits of a fixed input in each checkpoint, and compares them when one is loaded."""

    def load(self, engine: Engine, start: RunStart) -> None:
        """Compare the loaded model's logits with the stored ones. Raises CheckpointError on all ranks."""
        path = start.checkpoint
        if path is None:
            return
        logits = fixed_logits(engine)
        all_succeeded(lambda: compare_logits(path, logits, engine), f"checking the forward pass of {path}")

    def files(self, engine: Engine) -> Mapping[str, Any]:
        """Return the file with the logits, on one rank of the last stage."""
        logits = fixed_logits(engine)
        if logits is None or engine.grid.dp_rank != 0 or engine.grid.tp_rank != 0:
            return {}
        return {FILE: {"logits": logits, "precision": engine.plan.precision}}


def fixed_logits(engine: Engine) -> Tensor | None:
    """Compute the logits of the fixed input; all ranks call it together.

    Returns:
        Logits [1, S, V], or scores [1, S, 1], in fp32 on the CPU on the last stage's ranks; None on others.
    """
    length = min(engine.plan.config.model.seq_length or _LENGTH, _LENGTH)
    tokens = torch.arange(length, device=engine.device) % engine.plan.vocab_size
    logits = engine.logits(tokens.unsqueeze(0))
    if logits is None:
        return None
    if not engine.plan.architecture.score_head:  # scores are complete on every tensor rank
        logits = gather_last_dim(logits, engine.grid)
    return logits.float().cpu()


def compare_logits(path: Path, logits: Tensor | None, engine: Engine) -> None:
    """Compare logits with the stored ones. No collective operations take place.

    Args:
        path: The checkpoint.
        logits: Logits of the fixed input; None on ranks that have none.
        engine: The engine that computed them.

    Raises:
        CheckpointError: If they differ by more than the precisions explain.
    """
    file = path / FILE
    if not file.is_file():
        if engine.grid.rank == 0:
            _log.warning("%s holds no logits: it was saved without checkpoint_validation_with_forward_pass", path)
        return
    if logits is None:
        return
    stored = load_file(file)
    length = min(stored["logits"].shape[1], logits.shape[1])
    vocabulary = engine.plan.vocab_size
    expected: Tensor = stored["logits"][:, :length, :vocabulary]
    found = logits[:, :length, :vocabulary]
    tolerance = max(_TOLERANCE[stored["precision"]], _TOLERANCE[engine.plan.precision])
    allowed = tolerance * float(expected.abs().max())
    largest = float((expected - found).abs().max())
    if not largest <= allowed:
        raise CheckpointError(
            f"{path}: the loaded model's logits differ by {largest:.3g} from those stored when it was saved (allowed: "
            f"{allowed:.3g}); the configuration or the build of the kernels is another one, or the checkpoint is "
            "damaged. Unset checkpoint_validation_with_forward_pass to load it without this check"
        )
    if engine.grid.dp_rank == 0 and engine.grid.tp_rank == 0:
        _log.info("the loaded model's logits agree with the stored ones to %.1e", largest)
