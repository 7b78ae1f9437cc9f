"""The average of the weights on paper."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.feature import NO_MEMORY, FeatureMemory, FeaturePaper, RankTensors
from neox.plan.layout import Workload
from neox.problems import Problem

_FP32 = 4


def problems(config: NeoXConfig) -> Iterator[Problem]:
    """An average of weights is not kept in files."""
    zero = config.deepspeed.zero_optimization
    for block, directory in (("offload_optimizer", zero.states_directory), ("offload_param", zero.weights_directory)):
        if config.optimizer.ema_decay is not None and directory is not None:
            key = f"zero_optimization.{block}.device"
            rule = (
                f"does not work with {config.describe_setting(key)}: the average is not kept in files; use device: cpu"
            )
            yield config.problem("ema_decay", rule, key)


def memory(run: Workload, rank: RankTensors) -> FeatureMemory:
    """The average has an fp32 element for each one that the optimizer updates on this rank, and is next to it."""
    if run.config.optimizer.ema_decay is None:
        return NO_MEMORY
    average = _FP32 * rank.updated
    if run.config.optimizer.ema_device == "cpu" or run.layout.offloads_states:
        return FeatureMemory(host=average, saved=average)
    return FeatureMemory(optimizer=average, saved=average)


def plan_lines(config: NeoXConfig) -> Iterator[str]:
    """Yield what is kept as an average of the weights; nothing if there is none."""
    keys = config.optimizer
    if keys.ema_decay is None:
        return
    every = "step" if keys.ema_every == 1 else f"{keys.ema_every} steps"
    evaluated = ", evaluated too (eval_ema)" if keys.eval_ema else ""
    yield f"of the weights in fp32, with decay {keys.ema_decay:g} after each {every}{evaluated} (ema_decay)"


PAPER = FeaturePaper(problems=problems, memory=memory, plan_lines=plan_lines, label="average")
