"""What a start of a training decides by its checkpoint, as tests look at it."""

from __future__ import annotations

from dataclasses import dataclass

from neox.config import NeoXConfig, apply_decisions
from neox.decisions.checkpoint import choose_checkpoint
from neox.decisions.start import decide_start
from neox.plan import Capabilities
from neox.plan.devices.precision import Precision
from neox.plan.run_identity import FoundRun
from neox.plan.run_start import ChosenStart
from neox.preflight.resume_notes import changes_since
from neox.problems import Problem


@dataclass(frozen=True)
class DecidedRun:
    """A configuration with what its start has decided."""

    config: NeoXConfig
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    start: ChosenStart
    loaded: FoundRun | None
    precision: Precision | None


def decided_run(config: NeoXConfig) -> DecidedRun:
    """Decide as `neox.preflight.planning` does, on one rank."""
    own = choose_checkpoint(config)
    decided = decide_start(config, 1, Capabilities(), own=own)
    applied = apply_decisions(config, decided.decisions)
    notes = decided.notes
    if own.loaded is not None and own.start.own_directory:
        notes += changes_since(own.loaded, applied)
    return DecidedRun(applied, notes, decided.problems, own.start, own.loaded, own.precision)
