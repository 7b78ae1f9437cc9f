"""A feature of a training on paper: its rules, its memory, its lines in the plan, and how a measured run drops it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from neox.config.neox_config import NeoXConfig
from neox.plan.layout import Workload
from neox.problems import Note, Problem

NO_SAVES = "no checkpoint is saved before the last step; give checkpoint_factor"
"""Reason of the notes for a run that saves no checkpoint between its first and its last step."""


@dataclass(frozen=True)
class RankTensors:
    """Sizes of the tensors on one rank, which features copy or average.

    Attributes:
        weight_bytes: Bytes of the weights as the rank holds them between steps.
        gradients: Elements of its gradients before they are divided over data ranks.
        updated: Elements of the fp32 tensors that its optimizer updates in a step.
        updated_at_once: Elements that one call of the optimizer updates; ZeRO 3 calls it for each sub-group.
        of_decays: Elements of the decays and steps of recurrent mixers in its layers.
    """

    weight_bytes: int
    gradients: int
    updated: int
    updated_at_once: int
    of_decays: int = 0


@dataclass(frozen=True)
class FeatureMemory:
    """Bytes that a feature keeps on a rank. The plan shows them with what they are copies of.

    Attributes:
        weights: On the device, at all times.
        gradients: The same.
        optimizer: The same.
        during_update: On the device while the optimizer runs, when there are no activations.
        host: In main memory, at all times.
        saved: Bytes that checkpoints store, from each rank that stores optimizer states.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    during_update: int = 0
    host: int = 0
    saved: int = 0

    def __add__(self, other: FeatureMemory) -> FeatureMemory:
        """Return the memory of both."""
        return FeatureMemory(
            weights=self.weights + other.weights,
            gradients=self.gradients + other.gradients,
            optimizer=self.optimizer + other.optimizer,
            during_update=self.during_update + other.during_update,
            host=self.host + other.host,
            saved=self.saved + other.saved,
        )


NO_MEMORY = FeatureMemory()


def _nothing(config: NeoXConfig) -> Iterator[str]:
    yield from ()


def _no_problems(config: NeoXConfig) -> Iterator[Problem]:
    yield from ()


def _no_notes(config: NeoXConfig) -> Iterator[Note]:
    yield from ()


def _no_memory(run: Workload, rank: RankTensors) -> FeatureMemory:
    return NO_MEMORY


@dataclass(frozen=True)
class FeaturePaper:
    """The half of a feature that needs no torch (`neox/features/NAME/paper.py`).

    Attributes:
        problems: Rules across keys that a configuration breaks. Conditions of one key stand at the key.
        memory: Bytes that it keeps on a rank of a run in a layout.
        notes: Notes on settings that change nothing, or less than they are meant to.
        notes_without_saves: Notes for a run that saves no checkpoint between its first and its last step.
        plan_lines: Lines of the plan under `label`.
        recovery_lines: Lines of the plan about what happens after a failure.
        label: Label of the plan's lines.
        off: Overrides with which a measured run does without the feature.
    """

    problems: Callable[[NeoXConfig], Iterator[Problem]] = _no_problems
    memory: Callable[[Workload, RankTensors], FeatureMemory] = _no_memory
    notes: Callable[[NeoXConfig], Iterator[Note]] = _no_notes
    notes_without_saves: Callable[[NeoXConfig], Iterator[Note]] = _no_notes
    plan_lines: Callable[[NeoXConfig], Iterator[str]] = _nothing
    recovery_lines: Callable[[NeoXConfig], Iterator[str]] = _nothing
    label: str = ""
    off: tuple[str, ...] = ()
