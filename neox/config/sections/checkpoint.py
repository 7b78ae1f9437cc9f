"""Checkpoints: where, when, what."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from neox.config.sections.base import OnlyWith, Section


class CheckpointConfig(Section):
    """Saving and loading."""

    save: str | None = None
    """Directory that checkpoints are written to."""

    load: str | None = None
    """Directory to resume from."""

    iteration: Annotated[int | None, OnlyWith("load"), OnlyWith("save")] = Field(None, ge=0)
    """Checkpoint to load; the newest whole one where unset."""

    finetune: bool = False
    """Load weights only and start at iteration 0."""

    checkpoint_verify: Annotated[bool, OnlyWith("load"), OnlyWith("save")] = True
    """Compare the sha256 of every file when loading; without it, sizes alone."""

    checkpoint_scale: Annotated[Literal["linear", "log"], OnlyWith("checkpoint_factor")] = "linear"
    """`linear`: a checkpoint at every multiple of checkpoint_factor; `log`: at every power of it. And at the end."""

    checkpoint_factor: int | None = Field(None, gt=0)
    """Iterations between checkpoints, or their ratio with log scale."""

    extra_save_iters: tuple[int, ...] | None = None
    """Further iterations to save at; 0 saves the initial weights."""

    keep_last_n_checkpoints: Annotated[int | None, OnlyWith("save")] = Field(None, ge=1)
    """Delete older checkpoints, keeping this many."""

    async_save: Annotated[bool, OnlyWith("save")] = False
    """Copy a checkpoint to CPU memory and write it while training goes on; a rank's whole state must fit there."""

    checkpoint_validation_with_forward_pass: Annotated[bool, OnlyWith("load"), OnlyWith("save")] = False
    """Keep the logits of a fixed input in checkpoints, and compare them after loading."""

    no_save_optim: Annotated[bool, OnlyWith("save")] = False
    """Leave the optimizer's state out of checkpoints."""

    no_save_rng: Annotated[bool, OnlyWith("save")] = False
    """Leave random states out of checkpoints."""

    no_load_optim: Annotated[bool, OnlyWith("load")] = False
    """Do not load the optimizer's state."""

    def save_iterations(self, train_iters: int | None) -> tuple[int, ...]:
        """Return after which completed steps a checkpoint is written, ascending; empty without `save` or train_iters.

        gpt-neox's rule: multiples (linear) or powers (log) of checkpoint_factor below train_iters, extra_save_iters,
        and the last step. A checkpoint_factor of 1 with log scale, which `validation` refuses, never ends.
        """
        if self.save is None or train_iters is None:
            return ()
        steps = {train_iters, *(i for i in self.extra_save_iters or () if 0 <= i <= train_iters)}
        step = factor = self.checkpoint_factor or train_iters
        while step < train_iters:
            steps.add(step)
            step = step * factor if self.checkpoint_scale == "log" else step + factor
        return tuple(sorted(steps))
