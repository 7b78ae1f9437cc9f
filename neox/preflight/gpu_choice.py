"""Which kinds of GPU a training needs, how many of each, and how long it takes on them: `tools/which_gpu.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from neox.config.neox_config import NeoXConfig
from neox.devices import GPUS, Gpu
from neox.errors import ConfigError, LaunchError
from neox.launch.hosts.placement import place_ranks
from neox.plan import resolve
from neox.plan.batches.batch import BATCH_KEYS, STEPS, TOTAL, IntendedBatch, intended_batch, intended_gpus
from neox.plan.devices.device import PROCESS_BYTES, device_of_kind
from neox.plan.devices.precision import choose_precision
from neox.plan.search.divisible import divisible_config
from neox.plan.search.fastest import Suggestion, suggest_layouts
from neox.plan.search.fit import FLASH_IS_FASTER, flash_is_faster
from neox.plan.time.step import COMPUTE_OPTIMAL_RATIO

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of GPUs that are tried, the smallest first; more than `Gpu.per_host` are several hosts."""
_CHEAPER_WITHIN = 8  # times the smallest number of GPUs are searched for a cheaper one
_WORTH_SHOWING = 0.1  # share of the GPU hours that it must save
_GIB = 2**30
_DAY = 86_400.0


@dataclass(frozen=True)
class GpuChoice:
    """A number of GPUs of one kind on which a run fits.

    Attributes:
        gpu_type: Value of `--gpu-type`.
        name: Name of the GPU.
        gpus: Number of GPUs; None if the run fits on none of the numbers that were tried.
        batch: Samples of a step.
        memory_gib: Memory of the fullest rank in GiB.
        tokens_per_second: Tokens of all GPUs together.
        mfu: Model FLOPs utilization, 0 to 1.
        tokens: Tokens that are trained.
        parameters: Parameters that a token meets: all of them, or with experts those of the chosen ones.
        days: Days for these tokens.
        gpu_hours: Hours of all GPUs together.
        price: What they cost, if the price of a GPU hour is known.
        main_memory_gib: Main memory of a host in GiB that offloaded states and weights take; if `gpus` is None because
            of it, what they would take.
        changes: Keys in which the fastest layout differs from the configuration, with their values.
        reason: Why the run needs another kind of GPU, if `gpus` is None.
        notes: Settings that would be faster than those of the configuration that each layout keeps.
    """

    gpu_type: str
    name: str
    gpus: int | None
    batch: int = 0
    memory_gib: float = 0.0
    main_memory_gib: float = 0.0
    tokens_per_second: float = 0.0
    mfu: float = 0.0
    tokens: float = 0.0
    parameters: int = 0
    days: float = 0.0
    gpu_hours: float = 0.0
    price: float | None = None
    changes: tuple[tuple[str, str], ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Return the attributes by name."""
        return {**asdict(self), "changes": dict(self.changes)}


def batch_to_plan(config: NeoXConfig) -> IntendedBatch | None:
    """Return the batch that a configuration was made for, also by its hostfile; None if it names none."""
    return intended_batch(config, _named_hosts(config))


def gpus_to_plan(config: NeoXConfig) -> tuple[int, str] | None:
    """Return the number of GPUs that a configuration was made for, also by its hostfile, and the text that says where.

    None if it names none.
    """
    return intended_gpus(config, _named_hosts(config))


def _named_hosts(config: NeoXConfig) -> tuple[int, str] | None:
    """Return the ranks of a configuration's hostfile, and the text that names it; None if there is none here."""
    if config.runner.hostfile is None:
        return None
    try:
        placement = place_ranks(config.runner, config.source("hostfile"))
    except (ConfigError, LaunchError):  # it is on another machine
        return None
    return placement.world_size, f"{placement.world_size} ranks of {placement.why}"


def describe_batch(config: NeoXConfig) -> str:
    """Return what batch is planned on each number of GPUs, and which keys say it."""
    intended = batch_to_plan(config)
    if intended is not None:
        return f"{intended.samples:,} samples a step on any number of GPUs: {intended.origin}"
    keys = " x ".join(config.describe_setting(key) for key in BATCH_KEYS if config.value(key) is not None)
    return (
        f"{keys} on each copy of the model, so a step has more samples on more GPUs: no number of GPUs is named; "
        f"--set {TOTAL}=N keeps one batch"
    )


def choose_gpus(
    config: NeoXConfig,
    vocab_size: int,
    tokens: float,
    kinds: Sequence[str] = tuple(GPUS),
    counts: Sequence[int] = COUNTS,
    hourly_price: float | None = None,
    *,
    days: float | None = None,
    every: bool = False,
) -> Iterator[GpuChoice]:
    """Yield for each kind of GPU the smallest number on which a run fits, and a larger one that takes fewer GPU hours.

    Each has its fastest layout. Batch, precision and kernels are those of the configuration; its batch is that of the
    GPUs that it was made for (`batch_to_plan`). Times are estimates. If fewer GPUs would do with more main memory for
    what they offload than they have (`device_of_kind`), the smallest such number comes first, with `gpus` None.

    Args:
        config: The run. What it says of its GPUs is replaced.
        vocab_size: Number of ids of the tokenizer.
        tokens: Tokens that are trained; with `days` those that are trained in this time.
        kinds: Keys of `GPUS`.
        counts: Numbers of GPUs that are tried, the smallest first.
        hourly_price: Price of one GPU for an hour.
        days: Days of training, which decide about the tokens.
        every: Whether to yield each of the numbers, those that do not serve with the reason.

    Raises:
        ConfigError: There is no such GPU, the configuration is wrong, or its network's time is not estimated.
    """
    unknown = [kind for kind in kinds if kind not in GPUS]
    if unknown:
        raise ConfigError(f"there is no GPU {', '.join(unknown)}; known: {', '.join(GPUS)}")
    config, of_batch = _with_batch(config)
    for kind in kinds:
        gpu = GPUS[kind]
        of_kind = config.updated({"gpu_type": kind}, without=("gpu_memory_gib", "peak_theoretical_tflops"))
        if "bf16" not in gpu.formats and choose_precision(config, []) == "bf16":
            yield GpuChoice(kind, gpu.name, None, reason="it has no bf16: --set precision=fp16")
            continue
        refused: list[ConfigError] = []
        if every:
            for count in counts:
                try:
                    searched = _search(of_kind, of_batch, vocab_size, gpu, count)
                except ConfigError as error:
                    refused.append(error)
                    yield GpuChoice(kind, gpu.name, None, reason=f"{_number(count)}: {str(error).splitlines()[0]}")
                    continue
                if searched.fastest is None:
                    yield _refusal(kind, count, searched)
                else:
                    yield _choice(kind, count, searched, searched.fastest, tokens, days, hourly_price)
            if len(refused) == len(counts):  # so it is not about their number
                raise refused[0]
            continue
        fitting: list[GpuChoice] = []
        lacks_main_memory: GpuChoice | None = None
        notes: tuple[str, ...] = ()
        most = max(counts)
        for count in counts:
            if count > most:
                break
            try:
                searched = _search(of_kind, of_batch, vocab_size, gpu, count)
            except ConfigError as error:  # perhaps of this number of GPUs alone
                refused.append(error)
                continue
            notes = searched.notes
            if searched.fastest is None:
                if searched.lacks_main_memory and lacks_main_memory is None:
                    lacks_main_memory = _refusal(kind, count, searched)
                continue
            if not fitting:
                most = _CHEAPER_WITHIN * count
            fitting.append(_choice(kind, count, searched, searched.fastest, tokens, days, hourly_price))
        if len(refused) == len(counts):
            raise refused[0]
        if lacks_main_memory is not None:
            yield lacks_main_memory
        if not fitting:
            reason = f"it does not fit on {', '.join(map(str, counts))}"
            yield GpuChoice(kind, gpu.name, None, reason=reason, notes=notes)
            continue
        yield fitting[0]
        cheapest = min(fitting, key=lambda choice: choice.gpu_hours)
        if cheapest.gpu_hours < (1 - _WORTH_SHOWING) * fitting[0].gpu_hours:
            yield cheapest


def _with_batch(config: NeoXConfig) -> tuple[NeoXConfig, Mapping[str, Any]]:
    """Return a configuration whose batch is the same on any number of GPUs, and the keys that make it so."""
    intended = batch_to_plan(config)
    if intended is None or config.deepspeed.train_batch_size is not None:
        return config, {}
    keys = {TOTAL: intended.samples, STEPS: None}
    return config.updated(keys), keys


class _Search(NamedTuple):
    """The fastest layout on a number of GPUs, None if none fits.

    Attributes:
        fastest: The layout.
        batch: Samples of a step.
        parameters: Parameters that a token meets.
        notes: Settings that would be faster.
        least_offloaded: As that of `Suggestions`.
        main_memory: Bytes of main memory that a rank may take; None if unknown.
        expected_mfu: MFU that the configuration gives in place of estimates.
    """

    fastest: Suggestion | None
    batch: int
    parameters: int
    notes: tuple[str, ...]
    least_offloaded: int | None
    main_memory: int | None
    expected_mfu: float | None

    @property
    def lacks_main_memory(self) -> bool:
        """Whether no layout fits, but some would with more main memory."""
        return self.fastest is None and self.least_offloaded is not None


def _refusal(kind: str, count: int, searched: _Search) -> GpuChoice:
    """Return why a run does not fit on a number of GPUs."""
    gpu = GPUS[kind]
    refusal = GpuChoice(kind, gpu.name, None, reason=f"{_number(count)}: it does not fit", notes=searched.notes)
    if searched.least_offloaded is None or searched.main_memory is None:
        return refusal
    of_host = min(count, gpu.per_host)
    needed = (searched.least_offloaded + PROCESS_BYTES) * of_host / _GIB
    available = (searched.main_memory + PROCESS_BYTES) * of_host / _GIB
    reason = f"{_number(count)}: it needs {needed:,.0f} GiB of main memory of a host, where it has {available:,.0f} GiB"
    return replace(refusal, reason=reason, main_memory_gib=needed)


def _choice(
    kind: str,
    count: int,
    searched: _Search,
    layout: Suggestion,
    tokens: float,
    days: float | None,
    hourly_price: float | None,
) -> GpuChoice:
    """Return what a layout on a number of GPUs takes for some tokens, or trains in some days."""
    gpu = GPUS[kind]
    speed = layout.time.tokens_per_gpu * count
    mfu = layout.time.mfu
    if searched.expected_mfu is not None:
        speed *= searched.expected_mfu / mfu
        mfu = searched.expected_mfu
    if days is not None:
        tokens = speed * days * _DAY
    seconds = tokens / speed
    hours = seconds / 3600 * count
    return GpuChoice(
        gpu_type=kind,
        name=gpu.name,
        gpus=count,
        batch=searched.batch,
        memory_gib=layout.memory.needed(on_cpu=False) / _GIB,
        main_memory_gib=layout.memory.main_memory * min(count, gpu.per_host) / _GIB,
        tokens_per_second=speed,
        mfu=mfu,
        tokens=tokens,
        parameters=searched.parameters,
        days=seconds / _DAY,
        gpu_hours=hours,
        price=None if hourly_price is None else hours * hourly_price,
        changes=layout.changes,
        notes=searched.notes,
    )


def _search(config: NeoXConfig, of_batch: Mapping[str, Any], vocab_size: int, gpu: Gpu, count: int) -> _Search:
    """Search the fastest layout on a number of GPUs.

    Args:
        config: The run.
        of_batch: Keys of its batch in which it differs from the user's configuration.
        vocab_size: Number of ids of the tokenizer.
        gpu: Kind of the GPUs.
        count: Their number.

    Raises:
        ConfigError: They cannot train it.
    """
    divided, changed = divisible_config(config, count)
    plan = resolve(divided, count, vocab_size)
    device = device_of_kind(plan, gpu)
    found = suggest_layouts(plan, device, gpu, 1, {**of_batch, **changed})
    notes: tuple[str, ...] = ()
    if flash_is_faster(plan, device):
        notes = (FLASH_IS_FASTER,)
    main_memory = None
    if device.main_memory is not None:
        main_memory = device.main_memory.size
    return _Search(
        fastest=next(iter(found.best), None),
        batch=plan.batch.train_batch_size,
        parameters=plan.layers.active_numel,
        notes=notes,
        least_offloaded=found.least_offloaded,
        main_memory=main_memory,
        expected_mfu=config.logging.expected_mfu if config.given("expected_mfu") else None,
    )


def _number(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def format_choices(choices: Sequence[GpuChoice], title: str, *, with_tokens: bool = False) -> str:
    """Return a table of choices for a terminal.

    Args:
        choices: The choices.
        title: Lines above the table.
        with_tokens: Whether the rows differ in their tokens, which are shown then, also for each parameter, and with
            the parameters of a model that would get 20 for each in the same time.
    """
    heading = f"{'':34} GPUs  batch   memory  host memory   tokens/s   MFU      time  GPU hours"
    if with_tokens:
        heading += "  parameters    tokens  a parameter  20 each for"
    if any(choice.price is not None for choice in choices):
        heading += "      price"
    notes = dict.fromkeys(note for choice in choices for note in choice.notes)  # a line, also if all rows have it
    lines = [title, *(f"note: {note}" for note in notes), heading]
    for choice in choices:
        start = f"{choice.name + ' (' + choice.gpu_type + ')':<34}"
        if choice.gpus is None:
            lines.append(f"{start}    -  {choice.reason}")
            continue
        price = "" if choice.price is None else f"{_figure(choice.price):>11}"
        memory = f"{_figure(choice.memory_gib):>3} GiB {choice.main_memory_gib:8,.0f} GiB"
        speed = f"{choice.tokens_per_second:10,.0f} {choice.mfu:5.0%}"
        time = f"{speed} {_span(choice.days):>9} {_figure(choice.gpu_hours):>10}"
        tokens = ""
        if with_tokens:
            tokens = f"{choice.parameters / 1e9:10.3g} B{_figure(choice.tokens / 1e9):>8} B"
            tokens += f" {_figure(choice.tokens / choice.parameters):>12}"
            tokens += f" {_parameters_with(COMPUTE_OPTIMAL_RATIO, choice) / 1e9:10.2g} B"
        lines.append(f"{start} {choice.gpus:4} {choice.batch:6,}  {memory} {time}{tokens}{price}")
    return "\n".join(lines)


def _parameters_with(ratio: float, choice: GpuChoice) -> float:
    """Return the parameters of a model that gets `ratio` tokens for each of them in the time of a choice.

    A token's FLOPs grow with the parameters, so the tokens of a time shrink with them, and the ratio with their square.
    """
    return choice.parameters * (choice.tokens / choice.parameters / ratio) ** 0.5


def _span(days: float) -> str:
    """Return a time as text, in the largest unit of which it has one."""
    seconds = days * _DAY
    for unit, length in (("days", _DAY), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{_figure(seconds / length)} {unit}"
    return f"{_figure(seconds)} s"


def _figure(value: float) -> str:
    """Return a number as text, with two digits that count if it is small."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"
