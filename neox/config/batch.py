"""The batch triple."""

from __future__ import annotations

from neox.config.plan import BatchPlan
from neox.config.sections import NeoXConfig


def solve_batch(config: NeoXConfig, dp: int, problems: list[str]) -> BatchPlan | None:
    """Return the triple: any two of its keys give the third, one alone takes defaults."""
    ds = config.deepspeed
    total, micro, steps = ds.train_batch_size, ds.train_micro_batch_size_per_gpu, ds.gradient_accumulation_steps
    if total is None and micro is None:
        problems.append(
            "the batch size is missing: give train_micro_batch_size_per_gpu (and gradient_accumulation_steps), "
            "or train_batch_size"
        )
        return None
    if total is not None and micro is None:
        steps = steps or 1
        micro = total // (steps * dp)
    elif total is not None and micro is not None and steps is None:
        steps = total // (micro * dp)
    assert micro is not None
    steps = 1 if steps is None else steps
    if total is not None and total != micro * steps * dp:
        problems.append(
            f"train_batch_size {total} ({config.source('train_batch_size')}) is not train_micro_batch_size_per_gpu "
            f"{micro} ({config.source('train_micro_batch_size_per_gpu')}) x gradient_accumulation_steps {steps} "
            f"({config.source('gradient_accumulation_steps')}) x {dp} data-parallel ranks; the nearest that fits is "
            f"{max(1, round(total / (max(micro, 1) * dp))) * max(micro, 1) * dp}"
        )
        return None
    return BatchPlan(micro * steps * dp, micro, steps)
