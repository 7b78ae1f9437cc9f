"""The run: how long, how evaluated, how regularised, how recomputed."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from neox.config.sections.base import OnlyWith, Section


class TrainingConfig(Section):
    """Length, evaluation, dropout, recompute, and when to stop."""

    train_iters: int | None = Field(None, ge=0)
    """Training iterations (optimizer steps). Required to train."""

    eval_iters: int = Field(100, ge=0)
    """Batches in one evaluation."""

    eval_interval: int = Field(1000, ge=1)
    """Iterations between evaluations on the validation set."""

    exit_interval: int | None = Field(None, ge=1)
    """Save and end after an iteration that is a multiple of this."""

    seed: int = Field(1234, ge=0)
    """Seed of initial weights, dropout and the order of data."""

    attention_dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout on attention probabilities (gpt-neox v2.0's default; later versions: 0)."""

    hidden_dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout on what is added to the residual (gpt-neox v2.0's default; later versions: 0)."""

    checkpoint_activations: bool = False
    """Recompute layers in the backward pass instead of keeping their activations."""

    checkpoint_num_layers: Annotated[int, OnlyWith("checkpoint_activations")] = Field(1, ge=1)
    """Layers recomputed together."""

    compile_layers: bool = False
    """Compile each transformer layer with torch.compile: faster steps (more so on GPUs) after a start of up to a
    minute; losses agree up to rounding. Needs a C++ compiler on CPUs. Not with ZeRO 3."""

    max_nonfinite_steps: int = Field(0, ge=0)
    """Steps in a row whose loss or gradient norm is not finite that are skipped and counted before training stops; 0
    stops at the first. Steps that fp16's dynamic loss scale skips while it shrinks do not count."""

    hang_timeout: float = Field(1800.0, gt=0)
    """Seconds without progress after which the launcher prints every rank's Python stack and ends the run."""
