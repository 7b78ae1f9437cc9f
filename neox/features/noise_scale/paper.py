"""The gradient noise scale on paper."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.devices.precision import PRECISION_KEYS, choose_precision
from neox.plan.feature import NO_MEMORY, FeatureMemory, FeaturePaper, RankTensors
from neox.plan.layout import Workload
from neox.problems import Problem

_FP32 = 4


def problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield layouts under which a gradient of a single batch cannot be seen."""
    if not config.logging.log_gradient_noise_scale:
        return
    if config.parallelism.context_parallel_size > 1:
        rule = "compares gradients of single samples, which are split over context ranks; remove one of them"
        yield config.problem("log_gradient_noise_scale", rule, "context_parallel_size")
    if config.deepspeed.zero_optimization.stage:  # refused at the key
        return
    if config.parallelism.pipe_parallel_size > 1 and choose_precision(config, []) == "bf16":
        stages = config.describe_setting("pipe_parallel_size")
        rule = (
            f"does not work with bf16 and {stages}, where gradients are clipped and divided over ranks first; "
            "use pipe_parallel_size 1 or fp16, or remove it"
        )
        yield config.problem("log_gradient_noise_scale", rule, "pipe_parallel_size", *PRECISION_KEYS)


def memory(run: Workload, rank: RankTensors) -> FeatureMemory:
    """The sum of several steps' gradients is fp32. In main memory it is not counted."""
    logging = run.config.logging
    if not logging.log_gradient_noise_scale or logging.gradient_noise_scale_cpu_offload:
        return NO_MEMORY
    return FeatureMemory(gradients=_FP32 * rank.gradients)


PAPER = FeaturePaper(problems=problems, memory=memory, off=("log_gradient_noise_scale=false",))
