"""After which completed steps a checkpoint is written."""

from __future__ import annotations

from neox.config.sections import NeoXConfig
from neox.config.wording import said


def save_iterations(config: NeoXConfig) -> tuple[int, ...]:
    """Return them ascending, the last step included; empty without `save` or `train_iters`.

    gpt-neox's rule: multiples (linear) or powers (log) of checkpoint_factor below train_iters, and extra_save_iters.
    The configuration must be legal (a factor of 1 with log scale never ends).
    """
    keys, total = config.checkpoint, config.training.train_iters
    if keys.save is None or total is None:
        return ()
    steps = {total, *(i for i in keys.extra_save_iters or () if 0 <= i <= total)}
    factor = keys.checkpoint_factor
    if factor is not None:
        step = factor
        while step < total:
            steps.add(step)
            step = step * factor if keys.checkpoint_scale == "log" else step + factor
    return tuple(sorted(steps))


def save_notes(config: NeoXConfig) -> list[str]:
    """Return a sentence for each save key that comes to nothing."""
    keys, total, notes = config.checkpoint, config.training.train_iters, []
    if keys.save is None and (keys.checkpoint_factor is not None or keys.extra_save_iters):
        notes.append("no checkpoint is written: `save` is not set, though checkpoint_factor or extra_save_iters is")
    late = [i for i in keys.extra_save_iters or () if total is not None and i > total]
    if late:
        notes.append(f"{said(config, 'extra_save_iters', late)} come after the last iteration, {total}")
    return notes
