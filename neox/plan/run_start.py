"""How a run starts: from which checkpoint, and what of it. Every other place asks these values, not the keys.

                 NEW            FINETUNE          WEIGHTS                  RESUME
    weights      initial        checkpoint        checkpoint               checkpoint, fp32 of its optimizer
    optimizer    empty          empty             empty                    checkpoint
    loss scale   initial        initial           initial                  checkpoint, if it is fp16's
    counters     step 0         step 0            checkpoint's step        checkpoint's step, skipped updates
    schedule     from step 0    from step 0       from its step            from its step
    warm-up      configuration  configuration     steps of the checkpoint  steps of the checkpoint
    data         first sample   first sample      next sample, ledger      next sample, ledger
    averages     initial        loaded weights    checkpoint               checkpoint
    precision    configuration  configuration     `auto`: checkpoint's     `auto`: checkpoint's
    seed         configuration  configuration     configuration            configuration
    network      configuration  may differ a bit  the same                 the same
    run          its own        its own           its own; the             its own; the checkpoint's if it is in `save`
                                                  checkpoint's if in `save`

`requested_start` reads the keys; `neox.decisions.checkpoint` chooses, from them and from what is on disk;
`neox.engine.checkpoints.run_start` verifies the choice and carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from neox.config.neox_config import NeoXConfig


class StartMode(Enum):
    """What a run takes from a checkpoint."""

    NEW = "new"
    """Nothing: it begins with initial weights."""
    FINETUNE = "finetune"
    """The weights. The run begins at iteration 0, and positions, attention and head may differ (`finetune`)."""
    WEIGHTS = "weights"
    """The weights and the position. The optimizer begins without a state (`no_load_optim`)."""
    RESUME = "resume"
    """Everything, at any parallel sizes."""


FIRST_LOAD_KEYS = ("finetune", "iteration", "no_load_optim")
"""Keys about the checkpoint that a run starts from. They have no effect once the run resumes from its own ones."""


@dataclass(frozen=True)
class RequestedStart:
    """Start that the configuration asks for, whatever is on disk.

    Attributes:
        mode: What is taken from a checkpoint in `load`; NEW without `load`.
        load: The directory or address of `load`; None without it.
        iteration: Only step that may be loaded; None for any.
        own_directory: Whether `load` is the run's `save`, so that its own checkpoints are asked for.
        iteration_of_save: Whether `iteration` means a step of `save`: without `load`, or if both are the same.
        replaces_save: Whether the checkpoints in `save` are moved away first (`overwrite`).
    """

    mode: StartMode
    load: str | None
    iteration: int | None
    own_directory: bool
    iteration_of_save: bool
    replaces_save: bool


def requested_start(config: NeoXConfig) -> RequestedStart:
    """Return the start that the keys `load`, `save`, `iteration`, `finetune`, `no_load_optim`, `overwrite` ask for."""
    keys = config.checkpoint
    if keys.load is None:
        mode = StartMode.NEW
    elif keys.finetune:
        mode = StartMode.FINETUNE
    elif keys.no_load_optim:
        mode = StartMode.WEIGHTS
    else:
        mode = StartMode.RESUME
    own_directory = False
    if keys.load is not None and keys.save is not None and mode is not StartMode.FINETUNE:
        own_directory = Path(keys.load).resolve() == Path(keys.save).resolve()
    return RequestedStart(
        mode,
        keys.load,
        keys.iteration,
        own_directory,
        iteration_of_save=keys.iteration is not None and (keys.load is None or own_directory),
        replaces_save=keys.overwrite and not own_directory,
    )


@dataclass(frozen=True)
class ChosenStart:
    """How one start of a run begins. The launcher makes it, the payload carries it, rank 0 compares it with the disk.

    Attributes:
        mode: What is taken from the checkpoint.
        directory: The directory that contains the checkpoint, or an address; None for initial weights.
        checkpoint: The checkpoint; None for initial weights, or if the machine that chose does not see it.
        step: Number of completed steps of the run, as far as the checkpoint's name tells it.
        own_directory: Whether the checkpoint is one of this run's own, in `save`. Later ones there move away.
        replaces_save: Whether the checkpoints in `save` are moved away.
        damaged: Checkpoints that do not count because earlier starts have found them damaged.
        left_to_ranks: Whether rank 0 chooses, since the launcher does not see the directories.
    """

    mode: StartMode = StartMode.NEW
    directory: str | None = None
    checkpoint: str | None = None
    step: int = 0
    own_directory: bool = False
    replaces_save: bool = False
    damaged: tuple[str, ...] = ()
    left_to_ranks: bool = False

    @property
    def continues(self) -> bool:
        """Whether the run continues after the checkpoint's steps."""
        return self.mode in (StartMode.WEIGHTS, StartMode.RESUME)

    def __str__(self) -> str:
        """Return the start as text for people."""
        if self.checkpoint is None:
            return "initial weights"
        if self.mode is StartMode.FINETUNE:
            return f"weights of {self.checkpoint}; steps are counted from 0 (finetune)"
        if self.mode is StartMode.WEIGHTS:
            return f"weights of {self.checkpoint} at step {self.step:,}; the optimizer has no state (no_load_optim)"
        return f"goes on from {self.checkpoint}, step {self.step:,}"

    def to_json(self) -> dict[str, Any]:
        """Return the start as JSON values."""
        return {**asdict(self), "mode": self.mode.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ChosenStart:
        """Return the start that `to_json` encoded."""
        return cls(**{**data, "mode": StartMode(data["mode"]), "damaged": tuple(data["damaged"])})


NEW_START = ChosenStart()
"""Start with initial weights, in a `save` without checkpoints."""
