"""Degrees and batch sizes that follow from the number of ranks."""

from __future__ import annotations

from math import prod

from neox.config.neox_config import NeoXConfig
from neox.config.plan import BatchPlan, Topology

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def solve_grid(config: NeoXConfig, world_size: int, problems: list[str]) -> Topology | None:
    """Return the degrees, with dp = world_size / (pp x mp); a world that cannot be divided goes to `problems`."""
    tp_size = config.parallelism.model_parallel_size
    pp_size = max(1, config.parallelism.pipe_parallel_size)  # NeoX's 0 and 1 both mean one stage
    copy = pp_size * tp_size
    if world_size < 1 or world_size % copy:
        near = sorted({n for n in (world_size // copy * copy, -(-world_size // copy) * copy) if n > 0} or {copy})
        degrees = " x ".join(map(config.describe_setting, ("pipe_parallel_size", "model_parallel_size")))
        problems.append(
            f"{world_size} GPUs cannot be divided into copies of the model on {copy}: {degrees}; "
            f"use {' or '.join(map(str, near))} GPUs, or other degrees"
        )
        return None
    return Topology(pp_size, world_size // copy, tp_size)


def solve_batch(config: NeoXConfig, dp_size: int | None, problems: list[str]) -> BatchPlan | None:
    """Return train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp, in samples.

    Any two of the keys give the third, one alone takes one accumulation step.

    Args:
        config: The batch keys.
        dp_size: Data-parallel ranks; None where the degrees do not fit the world. There is no batch then, but a
            problem where no number of ranks would fit.
        problems: Takes what does not fit, with the nearest values that do.
    """
    ds = config.deepspeed
    total, micro, steps = ds.train_batch_size, ds.train_micro_batch_size_per_gpu, ds.gradient_accumulation_steps
    if total is None and micro is None:
        problems.append(f"the batch size is missing: give {MICRO} (with {STEPS}), or {TOTAL}")
        return None
    if dp_size is None:
        _check_without_ranks(config, problems)
        return None
    if total is None:
        assert micro is not None
        steps = steps or 1
        return BatchPlan(micro * steps * dp_size, micro, steps)
    if micro is not None and steps is not None:
        if (product := micro * steps * dp_size) == total:
            return BatchPlan(total, micro, steps)
        factors = f"{config.describe_setting(MICRO)} x {config.describe_setting(STEPS)} x {dp_size} data-parallel ranks"
        fits = f"{TOTAL} {product}, or {_nearest(total, micro * dp_size, STEPS)}"
        problems.append(config.problem(TOTAL, f"is not {factors} = {product}; use {fits}"))
        return None
    given, value, missing = (MICRO, micro, STEPS) if micro is not None else (STEPS, steps or 1, MICRO)
    assert value is not None
    rest, remainder = divmod(total, value * dp_size)
    if remainder or not rest:
        unit = config.describe_setting(given) if config.given(given) else f"{given} 1"
        fits = _nearest(total, value * dp_size, missing)
        problems.append(
            config.problem(TOTAL, f"is not a multiple of {unit} x {dp_size} data-parallel ranks; use {fits}")
        )
        return None
    return BatchPlan(total, value, rest) if given == MICRO else BatchPlan(total, rest, value)


def _check_without_ranks(config: NeoXConfig, problems: list[str]) -> None:
    """Any number of data-parallel ranks needs train_batch_size to be a multiple of the other two."""
    total = config.deepspeed.train_batch_size
    given = [key for key in (MICRO, STEPS) if config.value(key) is not None]
    unit = prod(config.value(key) for key in given)
    if total is not None and total % unit:
        factors = " x ".join(map(config.describe_setting, given))
        nearest = max(1, round(total / unit)) * unit
        problems.append(config.problem(TOTAL, f"is not a multiple of {factors} on any number of GPUs; use {nearest}"))


def _nearest(total: int, unit: int, key: str) -> str:
    """Return the multiple of `unit` nearest to `total`, with the factor it means for `key`."""
    factor = max(1, round(total / unit))
    return f"{TOTAL} {factor * unit} with {key} {factor}"
