"""After which completed steps a checkpoint is written."""

from __future__ import annotations

from neox.config.sections import NeoXConfig


def save_iterations(config: NeoXConfig) -> tuple[int, ...]:
    """Return them ascending, the last step included; empty without `save` or `train_iters`."""
    keys, total = config.checkpoint, config.training.train_iters
    if keys.save is None or total is None:
        return ()
    steps = {total, *(i for i in keys.extra_save_iters or () if 0 <= i <= total)}
    if keys.checkpoint_factor is not None:
        factor = keys.checkpoint_factor
        step = factor if keys.checkpoint_scale == "linear" else 1.0
        while step < total:
            steps.add(int(step))
            step = step + factor if keys.checkpoint_scale == "linear" else step * factor
    return tuple(sorted(steps))
