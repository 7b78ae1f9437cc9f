"""The batch triple: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp."""

from __future__ import annotations

from math import prod

from neox.config.plan import BatchPlan
from neox.config.sections import NeoXConfig
from neox.config.wording import place, said

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def solve_batch(config: NeoXConfig, dp: int | None, problems: list[str]) -> BatchPlan | None:
    """Return the triple, in samples: any two of its keys give the third, one alone takes one accumulation step.

    A triple that does not fit goes to `problems`, with the nearest one that does. Without dp, which an impossible
    grid has not, there is no triple, but a problem where none would fit.
    """
    ds = config.deepspeed
    total, micro, steps = ds.train_batch_size, ds.train_micro_batch_size_per_gpu, ds.gradient_accumulation_steps
    if total is None and micro is None:
        problems.append(f"the batch size is missing: give {MICRO} (with {STEPS}), or {TOTAL}")
        return None
    if dp is None:
        _check_without_ranks(config, problems)
        return None
    if total is None:
        assert micro is not None
        steps = steps or 1
        return BatchPlan(micro * steps * dp, micro, steps)
    if micro is not None and steps is not None:
        if micro * steps * dp == total:
            return BatchPlan(total, micro, steps)
        fits = f"{TOTAL} {micro * steps * dp}, or {_nearest(total, micro * dp, STEPS)}"
        factors = f"{said(config, MICRO, micro)} x {said(config, STEPS, steps)} x {dp} data-parallel ranks"
        problems.append(f"{place(config, TOTAL)}`{TOTAL}: {total}` is not {factors} = {micro * steps * dp}; use {fits}")
        return None
    given, value, missing = (MICRO, micro, STEPS) if micro is not None else (STEPS, steps or 1, MICRO)
    assert value is not None
    rest, remainder = divmod(total, value * dp)
    if remainder or not rest:
        fits = _nearest(total, value * dp, missing)
        unit = said(config, given, value) if config.given(given) else f"{given} 1"
        problems.append(
            f"{place(config, TOTAL)}`{TOTAL}: {total}` is not a multiple of {unit} x {dp} data-parallel ranks; "
            f"use {fits}"
        )
        return None
    return BatchPlan(total, value, rest) if given == MICRO else BatchPlan(total, rest, value)


def _check_without_ranks(config: NeoXConfig, problems: list[str]) -> None:
    """Any number of data-parallel ranks needs train_batch_size to be a multiple of the other two."""
    ds = config.deepspeed
    given = {key: value for key in (MICRO, STEPS) if (value := getattr(ds, key)) is not None}
    unit = prod(given.values())
    if ds.train_batch_size is not None and ds.train_batch_size % unit:
        factors = " x ".join(said(config, key, value) for key, value in given.items())
        problems.append(
            f"{place(config, TOTAL)}`{TOTAL}: {ds.train_batch_size}` is not a multiple of {factors} on any number of "
            f"GPUs; use {max(1, round(ds.train_batch_size / unit)) * unit}"
        )


def _nearest(total: int, unit: int, key: str) -> str:
    """Return the multiple of `unit` nearest to `total`, with the factor it means for `key`."""
    factor = max(1, round(total / unit))
    return f"{TOTAL} {factor * unit} with {key} {factor}"
