"""Batch sizes: any two of three keys give the third."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from neox.config.neox_config import NeoXConfig
from neox.plan.ranks.topology import model_ranks_of
from neox.problems import Problem

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
BATCH_KEYS = (TOTAL, MICRO, STEPS)
"""Keys that decide the batch: train_batch_size = micro batch x accumulation steps x data-parallel ranks."""


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes in samples: train_batch_size = micro batch x accumulation steps x data-parallel ranks."""

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int

    @property
    def samples_of_data_rank(self) -> int:
        """Samples of one step on one data-parallel rank."""
        return self.train_micro_batch_size_per_gpu * self.gradient_accumulation_steps

    @property
    def samples_at_once(self) -> int:
        """Samples of one micro batch over all data-parallel ranks."""
        return self.train_batch_size // self.gradient_accumulation_steps


def solve_batch(config: NeoXConfig, dp_size: int | None, problems: list[Problem]) -> BatchPlan | None:
    """Return train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp, in samples.

    Any two of the keys give the third. If there is only one, a step has one accumulation step.

    Args:
        config: The batch keys.
        dp_size: Data-parallel ranks; None if the degrees do not fit the world. There is no batch then, but a problem
            if no number of ranks would fit.
        problems: Takes what does not fit, with the nearest values that do.
    """
    total = config.deepspeed.train_batch_size
    micro = config.deepspeed.train_micro_batch_size_per_gpu
    steps = config.deepspeed.gradient_accumulation_steps
    if total is None and micro is None:
        problems.append(Problem(BATCH_KEYS, f"the batch size is missing: give {MICRO} (with {STEPS}), or {TOTAL}"))
        return None
    if dp_size is None:
        problems += _problems_on_any_ranks(config)
        return None
    if total is None:
        assert micro is not None
        steps = steps or 1
        return BatchPlan(micro * steps * dp_size, micro, steps)
    if micro is None:
        steps = steps or 1
        micro = _third_size(config, total, MICRO, STEPS, steps, dp_size, problems)
        return None if micro is None else BatchPlan(total, micro, steps)
    if steps is None:
        steps = _third_size(config, total, STEPS, MICRO, micro, dp_size, problems)
        return None if steps is None else BatchPlan(total, micro, steps)
    return _whole_batch(config, BatchPlan(total, micro, steps), dp_size, problems)


@dataclass(frozen=True)
class IntendedBatch:
    """The batch that a configuration was made for, whatever number of GPUs a plan is about.

    Attributes:
        samples: Samples of a step.
        origin: The keys that say it, as text.
    """

    samples: int
    origin: str


def intended_batch(config: NeoXConfig, hosts: tuple[int, str] | None = None) -> IntendedBatch | None:
    """Return the batch that a configuration was made for; None if it names none.

    That is `train_batch_size`, or micro batch x accumulation steps x copies of the model on the GPUs that the
    configuration names: `planned_num_gpus`, else `global_num_gpus`, else its hosts, else `num_gpus`.

    Args:
        config: The configuration.
        hosts: Ranks of the hosts that the configuration names, and the text that says where it names them.
    """
    total = config.deepspeed.train_batch_size
    if total is not None:
        return IntendedBatch(total, config.describe_setting(TOTAL))
    gpus = intended_gpus(config, hosts)
    if gpus is None:
        return None
    number, named = gpus
    samples = _samples_on(config, number)
    if samples == 0:
        return None
    factors = [config.describe_setting(key) for key in (MICRO, STEPS) if config.value(key) is not None]
    ranks = model_ranks_of(config)
    copies = named if ranks == 1 else f"{named} / {ranks} of a copy of the model"
    return IntendedBatch(samples, " x ".join([*factors, copies]))


def intended_gpus(config: NeoXConfig, hosts: tuple[int, str] | None = None) -> tuple[int, str] | None:
    """Return the number of GPUs that a configuration was made for, and the text that says where; None if it names none.

    Args:
        config: The configuration.
        hosts: As for `intended_batch`.
    """
    for key in ("planned_num_gpus", "global_num_gpus"):
        if config.value(key):
            return config.value(key), config.describe_setting(key)
    if hosts is not None:
        return hosts
    if config.runner.num_gpus and config.runner.hostfile is None:
        return config.runner.num_gpus, config.describe_setting("num_gpus")
    return None


def _samples_on(config: NeoXConfig, gpus: int) -> int:
    """Return the samples of a step on a number of GPUs by the micro batch and the accumulation steps; 0 without any."""
    micro = config.deepspeed.train_micro_batch_size_per_gpu or 0
    steps = config.deepspeed.gradient_accumulation_steps or 1
    return micro * steps * gpus // model_ranks_of(config)


def batch_notes(config: NeoXConfig, batch: BatchPlan) -> list[str]:
    """Return that a batch is not the one of `planned_num_gpus`, because of the number of ranks, and what keeps it."""
    planned = config.runner.planned_num_gpus
    if planned is None or config.given(TOTAL):
        return []
    samples = _samples_on(config, planned)
    if samples in (0, batch.train_batch_size):
        return []
    origin = config.describe_setting("planned_num_gpus")
    kept = f"--set {TOTAL}={samples} --set {STEPS}=null"
    return [f"{origin}: a step has {samples:,} samples there, and {batch.train_batch_size:,} here; {kept} keeps it"]


def _whole_batch(config: NeoXConfig, batch: BatchPlan, dp_size: int, problems: list[Problem]) -> BatchPlan | None:
    """Return a batch whose three sizes are all given, if they fit each other."""
    micro = batch.train_micro_batch_size_per_gpu
    product = micro * batch.gradient_accumulation_steps * dp_size
    if product == batch.train_batch_size:
        return batch
    factors = f"{config.describe_setting(MICRO)} x {config.describe_setting(STEPS)} x {dp_size} data-parallel ranks"
    fits = f"{TOTAL} {product}, or {_nearest(batch.train_batch_size, micro * dp_size, STEPS)}"
    problems.append(config.problem(TOTAL, f"is not {factors} = {product}; use {fits}", MICRO, STEPS))
    return None


def _third_size(
    config: NeoXConfig, total: int, missing: str, key: str, value: int, dp_size: int, problems: list[Problem]
) -> int | None:
    """Return the micro batch or the accumulation steps that follow from the total and the other one.

    Args:
        config: The batch keys.
        total: Value of `train_batch_size`.
        missing: Key of the size to return.
        key: Key of the other one.
        value: Value of the other one.
        dp_size: Data-parallel ranks.
        problems: Takes the problem of a total that cannot be divided. The result is None then.
    """
    size, remainder = divmod(total, value * dp_size)
    if size and not remainder:
        return size
    given = f"{key} {value}"
    if config.given(key):
        given = config.describe_setting(key)
    fits = _nearest(total, value * dp_size, missing)
    rule = f"is not a multiple of {given} x {dp_size} data-parallel ranks; use {fits}"
    problems.append(config.problem(TOTAL, rule, MICRO, STEPS))
    return None


def _problems_on_any_ranks(config: NeoXConfig) -> list[Problem]:
    """Return the problem of a train_batch_size that is no multiple of the other two, whatever the number of ranks."""
    total = config.deepspeed.train_batch_size
    given = [key for key in (MICRO, STEPS) if config.value(key) is not None]
    unit = prod(config.value(key) for key in given)
    if total is None or total % unit == 0:
        return []
    factors = " x ".join(map(config.describe_setting, given))
    nearest = max(1, round(total / unit)) * unit
    rule = f"is not a multiple of {factors} on any number of GPUs; use {nearest}"
    return [config.problem(TOTAL, rule, *given)]


def _nearest(total: int, unit: int, key: str) -> str:
    """Return the multiple of `unit` nearest to `total`, with the factor it means for `key`."""
    factor = max(1, round(total / unit))
    return f"{TOTAL} {factor * unit} with {key} {factor}"
