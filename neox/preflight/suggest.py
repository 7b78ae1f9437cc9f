"""`deepy.py ... --suggest`: a table of the fastest layouts of a run, and the file that sets the best one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from neox.config import NeoXConfig
from neox.config.loader import OVERRIDES
from neox.devices import GPUS
from neox.errors import ConfigError, LaunchError
from neox.files import write_text
from neox.launch.hosts.placement import choose_hosts
from neox.plan import RunPlan, gpu_device
from neox.plan.batches.batch import batch_notes
from neox.plan.devices.device import Device, device_of_kind, gib, likely_gpu
from neox.plan.report.text import estimate_basis, network_basis
from neox.plan.search.divisible import divisible_config
from neox.plan.search.fastest import Suggestion, Suggestions, suggest_layouts
from neox.plan.search.fit import FLASH_IS_FASTER, flash_is_faster, nested_keys
from neox.plan.time.step import STEP_PARTS, StepTime
from neox.preflight.command_line import plain_command
from neox.preflight.job_command import JobCommand, print_to_stderr
from neox.preflight.measure import STEPS, Measurement, measure_layouts

_GPU_KEYS = ("gpu_type", "gpu_memory_gib", "peak_theoretical_tflops")
_LEAST_SHARE = 0.02
_NOTICEABLE = 1.01  # times as long
SHOWN = 10
"""Number of layouts in a table of estimates."""
_FOUND_FOR_EACH = 10  # layouts that are searched for each that is measured, so that other degrees are among them


class SuggestLayouts(JobCommand):
    """The command `--suggest`: print the fastest layouts, and with `--measure` run them."""

    def suggest(self) -> int:
        """Print the fastest layouts; problems are warnings. With `--measure`, run them and print them again."""
        placement, _ = choose_hosts(self.config, self.arguments)
        asked = self.config
        self.config, changed = divisible_config(asked, placement.world_size)
        _, planned, problems = self.plan_without_run()
        print_to_stderr("warning", problems)
        plan = planned.plan
        print_to_stderr("note", batch_notes(asked, plan.batch))
        device = planned.device
        if device.shared and not self.arguments.measure:
            device = gpu_device(plan)
        count = max(SHOWN, _FOUND_FOR_EACH * (self.arguments.measure or 0))
        found, title = find_layouts(
            plan, device, self.arguments.suggest, changed, count, measured=bool(self.arguments.measure)
        )
        print(format_estimates(found, title, plan, is_changed=bool(changed)), flush=True)
        if self.arguments.measure:
            layouts = layouts_to_measure(found, self.arguments.measure, is_changed=bool(changed))
            return self._measure(layouts, plan.grid.world_size)
        self._write_layout(found.best[0])
        return 0

    def _measure(self, layouts: Sequence[Suggestion], ranks: int) -> int:
        """Run layouts for a few steps and print them by their measured time. Return 128 + the signal that ended it."""
        if self.runner.launcher == "none":
            raise ConfigError(
                self.config.problem("launcher", "starts nothing that --measure could time; use another one")
            )
        measurement = measure_layouts(layouts, plain_command(self.arguments), self.run_directory())
        best = measurement.layouts[0] if measurement.layouts else None
        if best is None:
            print("no layout was measured", file=sys.stderr)
        else:
            print(format_measurement(measurement, ranks))
            if best.seconds is None:
                raise LaunchError(f"every measured layout failed, the first with: {best.failure}")
            self._write_layout(best.layout)
        return 0 if measurement.stopped_by is None else 128 + measurement.stopped_by

    def _write_layout(self, layout: Suggestion) -> None:
        output = self.arguments.suggest_output
        if output is not None:
            print(write_keys(layout, self.config, Path(output), self.arguments.suggest.lower()))


def find_layouts(
    plan: RunPlan, device: Device, gpu_name: str, changed: Mapping[str, Any], count: int, *, measured: bool = False
) -> tuple[Suggestions, str]:
    """Search the fastest layouts of a run.

    Args:
        plan: The run.
        device: Device of the ranks. CPUs are only used if no GPU is named; what is measured there is chosen in the
            order that layouts have on a GPU. Of a GPU's, main memory counts if it was given, or measured on the hosts.
        gpu_name: Key of `GPUS`; empty for the one that fits `gpu_memory_gib` best.
        changed: Keys in which the plan differs from the configuration, if these GPUs cannot run the configuration.
        count: Number of layouts to return.
        measured: Whether the layouts will be run, so that their order counts and not their time.

    Returns:
        The layouts, and a line about the search; another each if main memory excludes some, and if flash attention,
        which is not searched, would be faster.

    Raises:
        ConfigError: If there is no such GPU, the time of this network is not estimated, or no layout fits.
    """
    gpu_name = gpu_name.lower()
    if gpu_name and gpu_name not in GPUS:
        raise ConfigError(f"--suggest {gpu_name}: there is no such GPU; known: {', '.join(GPUS)}")
    if device.shared and not gpu_name:
        gpu = GPUS[likely_gpu(plan.config)]
        kind = "CPU ranks"
        basis = f"those of {gpu.name}, to choose what is measured"
    else:
        is_assumed = not gpu_name and not any(map(plan.config.given, _GPU_KEYS))
        of_hosts = device.main_memory
        if gpu_name and plan.config.runner.host_memory_gib is None:
            of_hosts = None  # other GPUs than those of the hosts, in other hosts
        gpu_name = gpu_name or likely_gpu(plan.config)
        gpu = GPUS[gpu_name]
        device = device_of_kind(plan, gpu)
        if of_hosts is not None and not of_hosts.assumed:
            device = replace(device, main_memory=of_hosts)
        kind = f"{gpu.name} ({gpu_name})"
        if is_assumed:
            kind = f"{gpu.name} ({gpu_name}, which is assumed: --gpu-type names yours)"
        basis = estimate_basis(gpu_name, fp8=bool(plan.config.training.fp8))
        if plan.precision == "fp32":
            basis = "estimated in 16 bits, to choose what is measured: fp32 is slower"
        if plan.grid.world_size > gpu.per_host:
            basis += f"; {network_basis([gpu_name])}"
    found = suggest_layouts(plan, device, gpu, count, changed, measured=measured)
    if not found.best:
        message = f"none of {found.tried} layouts fits on {plan.grid.world_size} {kind}"
        if found.other_numerics:
            message += f" as configured; this one fits, but {_numerics(found)}: {_flags(found.other_numerics[0])}"
        if found.least_offloaded is not None and device.main_memory is not None:
            message += (
                f"; some would that offload {gib(found.least_offloaded)} or more for each GPU, where main memory has "
                f"{gib(device.main_memory.size)} ({device.main_memory.source})"
            )
        raise ConfigError(f"{message}; the plan (--dry-run) says what offloading or more GPUs would need")
    batch = f"{plan.batch.train_batch_size:,} samples a step"
    title = f"{found.tried} layouts of {plan.grid.world_size} {kind}, {batch}; times are {basis}"
    if found.least_offloaded is not None and device.main_memory is not None:
        title += (
            f"\nnote: layouts are left out that offload more than {gib(device.main_memory.size)} for each GPU "
            f"({device.main_memory.source})"
        )
    if flash_is_faster(plan, device):
        title += f"\nnote: {FLASH_IS_FASTER}"
    return found, title


def format_estimates(found: Suggestions, title: str, plan: RunPlan, *, is_changed: bool) -> str:
    """Return the table of the fastest layouts, where their time goes, and why the configured layout is slower.

    Args:
        found: The layouts.
        title: First line of the table.
        plan: The run.
        is_changed: Whether the plan differs from the configuration, because these GPUs cannot run the configuration.
    """
    if not is_changed:
        return "\n".join([title, *_table(found), _given_row(found), *_explanation(found), *_other_numerics(found)])
    samples = plan.batch.train_batch_size
    reason = f"the configured degrees and batch cannot be divided over them; a step has {samples} samples here"
    ranks = plan.grid.world_size
    return "\n".join(
        [
            title,
            reason,
            *_table(found),
            f"    the configured layout runs on other numbers of GPUs than {ranks}",
            *_other_numerics(found),
        ]
    )


def layouts_to_measure(found: Suggestions, count: int, *, is_changed: bool) -> list[Suggestion]:
    """Return layouts to measure: the best estimates, the best of other degrees, and the configured one.

    Estimates are less reliable between different degrees than within the same degrees. So the second half of the
    layouts has other degrees than the first half. The configured layout is left out if these ranks cannot run it.

    Args:
        found: The layouts.
        count: Number of layouts.
        is_changed: Whether these ranks cannot run the configured layout.
    """
    chosen = list(found.best[: (count + 1) // 2])
    degrees = {_degrees(layout) for layout in chosen}
    for layout in found.best:
        if len(chosen) < count and _degrees(layout) not in degrees:
            degrees.add(_degrees(layout))
            chosen.append(layout)
    rest = [layout for layout in found.best if layout not in chosen]
    chosen += rest[: count - len(chosen)]
    if found.given_fits and not is_changed and all(layout.changes for layout in chosen):
        chosen.append(found.given)
    return chosen


def _degrees(layout: Suggestion) -> tuple[int, ...]:
    keys = layout.run.layout
    return keys.pp_size, keys.tp_size, keys.cp_size, keys.ep_size


def format_measurement(measurement: Measurement, ranks: int) -> str:
    """Return the table of layouts by their measured time.

    Args:
        measurement: What was measured.
        ranks: Number of ranks.
    """
    lines = [f"median time of {STEPS} steps on {ranks} ranks, without the first ones"]
    on_cpu = any(measured.layout.run.on_cpu for measured in measurement.layouts)  # whose times are not estimated
    lines.append("    step s  tokens/s/rank" + ("" if on_cpu else "  estimated s"))
    for number, measured in enumerate(measurement.layouts, start=1):
        estimate = measured.layout.time
        if measured.seconds is None:
            lines.append(f" -  failed: {measured.failure}")
        else:
            speed = estimate.tokens / measured.seconds / estimate.ranks
            estimated = "" if on_cpu else f"  {estimate.seconds:11.3f}"
            lines.append(f"{number:>2}  {measured.seconds:6.3f}  {speed:13,.0f}{estimated}")
        lines.append(f"      {_flags(measured.layout)}")
    return "\n".join(lines)


def _table(found: Suggestions) -> Iterator[str]:
    """Yield a row for each layout, and the `--set` flags that choose it."""
    yield "    step s  tokens/s/GPU   MFU   memory  bubble  communication"
    for number, layout in enumerate(found.best[:SHOWN], start=1):
        yield f"{number:>2}  {_row(layout)}"
        yield f"      {_flags(layout)}"


def _other_numerics(found: Suggestions) -> Iterator[str]:
    """Yield the fastest layout that adds gradients in another precision, if it is faster than the best of the table."""
    if not found.other_numerics:
        return
    other = found.other_numerics[0]
    if other.time.seconds < found.best[0].time.seconds:
        yield f"other numerics: {_numerics(found)} (not a layout of the same training):"
        yield f"    {_row(other)}"
        yield f"      {_flags(other)}"


def _numerics(found: Suggestions) -> str:
    """Return how layouts of other numerics add gradients."""
    steps = found.other_numerics[0].run.layout.accumulation_steps
    if found.given.run.sums_in_bf16:
        return "it adds the gradients of micro batches in fp32, where the configured layout adds them in bf16"
    return f"it adds the gradients of {steps} micro batches in bf16, where the configured layout adds them in fp32"


def _given_row(found: Suggestions) -> str:
    verdict = "" if found.given_fits else "  (does not fit)"
    return f"    {_row(found.given)}  <- as configured{verdict}"


def _row(layout: Suggestion) -> str:
    time = layout.time
    needed = gib(layout.memory.needed(on_cpu=False))
    return (
        f"{_digits(time.seconds):>6}  {time.tokens_per_gpu:12,.0f}  {time.mfu:4.0%}  {needed:>9}  "
        f"{time.bubble / time.seconds:6.1%}  {time.communication / time.seconds:13.1%}"
    )


def _digits(seconds: float) -> str:
    """Format a time in seconds with two decimals, or with three significant digits below 1 s."""
    if seconds >= 1:
        return f"{seconds:.2f}"
    return f"{seconds:.3g}"


def _flags(layout: Suggestion) -> str:
    if not layout.changes:
        return "(as configured)"
    return " ".join(f"--set {key}={value}" for key, value in layout.changes)


def _explanation(found: Suggestions) -> Iterator[str]:
    """Yield where the time of the best layout goes, and what the given one spends more on."""
    best = found.best[0].time
    shares = [f"{part} {getattr(best, part) / best.seconds:.0%}" for part in STEP_PARTS if _counts(best, part)]
    yield f"the best spends its time on {', '.join(shares)}"
    given = found.given.time
    if not found.given_fits or given.seconds <= best.seconds:
        return
    if given.seconds < _NOTICEABLE * best.seconds:
        yield "the configured layout takes about as long"
        return
    losses = {part: getattr(given, part) - getattr(best, part) for part in STEP_PARTS}
    worse = sorted((part for part in STEP_PARTS if losses[part] > _LEAST_SHARE * given.seconds), key=losses.__getitem__)
    text = f"the configured layout takes {given.seconds / best.seconds:.2f} times as long"
    if worse:
        text += ": " + ", ".join(f"{part} +{_digits(losses[part])} s" for part in reversed(worse))
    yield text


def _counts(time: StepTime, part: str) -> bool:
    return bool(getattr(time, part) >= _LEAST_SHARE * time.seconds)


def write_keys(layout: Suggestion, config: NeoXConfig, output: Path, gpu_type: str = "") -> str:
    """Write the keys of a layout as YAML overrides of earlier files. Nested blocks are replaced as a whole.

    Args:
        layout: The layout.
        config: The configuration.
        output: The file.
        gpu_type: GPU that `--suggest` names, which is one of the keys then; empty if it names none.

    Returns:
        A line that explains how to use the file.

    Raises:
        ConfigError: It cannot be written.
    """
    keys = nested_keys(config, layout.changes)
    if gpu_type and config.runner.gpu_type != gpu_type:
        keys["gpu_type"] = gpu_type
    try:
        write_text(output, yaml.safe_dump({OVERRIDES: keys}, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--suggest-output {output}: cannot be written: {error.strerror or error}") from error
    if not keys:
        return f"{output} sets nothing: the configured layout is the fastest"
    return f"{output} sets the fastest layout: add {output.resolve()} as the last YAML file of the command"
