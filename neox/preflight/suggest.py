"""Table of the fastest layouts of a run, as `deepy.py ... --suggest` prints it, and the file that sets the best one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from neox.errors import ConfigError
from neox.files import write_text
from neox.plan import RunPlan, gpu_device
from neox.plan.device import gib
from neox.plan.search import Suggestion, Suggestions, suggest_layouts
from neox.plan.time import GPUS
from neox.plan.time.of_plan import likely_gpu
from neox.plan.time.step import StepTime

_GIB = 2**30
_PARTS = ("products", "attention", "elementwise", "tensor", "bubble", "gradients", "update")
_LEAST_SHARE = 0.02


def suggest(plan: RunPlan, gpu_name: str, output: Path | None) -> str:
    """Search the fastest layouts and return the table; write the best one's keys to a file if one is given.

    Args:
        plan: The run.
        gpu_name: Key of `GPUS`; empty for the one that fits `gpu_memory_gib` best.
        output: YAML file for the keys of the best layout; None for none.

    Raises:
        ConfigError: If there is no such GPU, the time of this network is not estimated, or no layout fits.
    """
    if gpu_name and gpu_name not in GPUS:
        raise ConfigError(f"--suggest {gpu_name}: there is no such GPU; known: {', '.join(GPUS)}")
    if gpu_name:
        gpu = GPUS[gpu_name]
    else:
        gpu_name, gpu = likely_gpu(plan)
    device = gpu_device(plan, gpu.memory_gib * _GIB)
    if plan.grid.cp_size > 1:
        raise ConfigError("--suggest searches layouts without context ranks only: leave context_parallel_size out")
    found = suggest_layouts(plan, device, gpu)
    if not found.best:
        raise ConfigError(
            f"none of {found.tried} layouts fits on {plan.grid.world_size} {gpu.name}; the plan (--dry-run) says what "
            "offloading or more GPUs would need"
        )
    if output is not None:
        _write_keys(found.best[0], output)
    title = f"{found.tried} layouts of {plan.grid.world_size} {gpu.name} ({gpu_name}); times are estimated"
    return "\n".join([title, *_table(found), *_explanation(found)])


def _table(found: Suggestions) -> Iterator[str]:
    """Yield a row for each layout, and the `--set` flags that choose it."""
    yield "    step s  tokens/s/GPU   MFU   memory  bubble  communication"
    for number, layout in enumerate(found.best, start=1):
        yield f"{number:>2}  {_row(layout)}"
        yield f"      {_flags(layout)}"
    verdict = "" if found.given_fits else "  (does not fit)"
    yield f"    {_row(found.given)}  <- as configured{verdict}"


def _row(layout: Suggestion) -> str:
    time = layout.time
    communication = time.tensor + time.context + time.gradients
    needed = gib(layout.memory.needed(on_cpu=False))
    return (
        f"{time.seconds:6.2f}  {time.tokens_per_gpu:12,.0f}  {time.mfu:4.0%}  {needed:>9}  "
        f"{time.bubble / time.seconds:6.1%}  {communication / time.seconds:13.1%}"
    )


def _flags(layout: Suggestion) -> str:
    if not layout.changes:
        return "(as configured)"
    return " ".join(f"--set {key}={value}" for key, value in layout.changes)


def _explanation(found: Suggestions) -> Iterator[str]:
    """Yield where the time of the best layout goes, and what the given one spends more on."""
    best = found.best[0].time
    shares = [f"{part} {getattr(best, part) / best.seconds:.0%}" for part in _PARTS if _counts(best, part)]
    yield f"the best spends its time on {', '.join(shares)}"
    given = found.given.time
    if given.seconds <= best.seconds:
        return
    losses = {part: getattr(given, part) - getattr(best, part) for part in _PARTS}
    worse = sorted((part for part in _PARTS if losses[part] > _LEAST_SHARE * given.seconds), key=losses.__getitem__)
    reasons = ", ".join(f"{part} +{losses[part]:.2f} s" for part in reversed(worse))
    yield f"the configured layout takes {given.seconds / best.seconds:.2f} times as long: {reasons}"


def _counts(time: StepTime, part: str) -> bool:
    return bool(getattr(time, part) >= _LEAST_SHARE * time.seconds)


def _write_keys(layout: Suggestion, output: Path) -> None:
    """Write the keys of a layout as YAML, blocks nested."""
    keys: dict[str, object] = {}
    for dotted, text in layout.changes:
        *blocks, last = dotted.split(".")
        block = keys
        for name in blocks:
            block = block.setdefault(name, {})  # type: ignore[assignment]
        block[last] = yaml.safe_load(text)
    try:
        write_text(output, yaml.safe_dump(keys, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--suggest-output {output}: cannot be written: {error.strerror or error}") from error
