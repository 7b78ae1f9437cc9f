"""Loss spikes on paper."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.feature import NO_SAVES, FeaturePaper
from neox.problems import Note


def notes_without_saves(config: NeoXConfig) -> Iterator[Note]:
    """A rollback has nothing to go back to."""
    if config.healing.loss_spike_action == "rollback":
        rollback = config.describe_setting("loss_spike_action")
        yield Note(
            ("loss_spike_action", "checkpoint_factor"), f"{rollback} has nothing to go back to, because {NO_SAVES}"
        )


def recovery_lines(config: NeoXConfig) -> Iterator[str]:
    """Yield what happens after a loss spike."""
    keys = config.healing
    if keys.loss_spike_action == "warn":
        yield "a warning after a loss spike"
    if keys.loss_spike_action == "rollback":
        yield f"rollbacks after loss spikes, at most {keys.loss_spike_max_rollbacks}"


PAPER = FeaturePaper(notes_without_saves=notes_without_saves, recovery_lines=recovery_lines)
