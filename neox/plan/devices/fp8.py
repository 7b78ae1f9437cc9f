"""Requirements of matrix products in fp8: shapes of weights, and GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from neox.architecture import FP8_MULTIPLE
from neox.plan.devices.precision import Capabilities
from neox.plan.run_plan import RunPlan
from neox.problems import Problem


def fp8_problems(plan: RunPlan, capabilities: Capabilities) -> Iterator[Problem]:
    """Yield why the blocks of a bf16 plan cannot multiply in fp8 as it asks.

    Args:
        plan: The plan.
        capabilities: What the hosts can do.
    """
    config = plan.config
    if config.training.fp8 is None:
        return
    if capabilities.fp8 is False:
        yield config.problem("fp8", f"is not what {capabilities.devices} can multiply (an H100 can); remove it")
    elif capabilities.fp8_experts is False and plan.architecture.num_experts:
        rule = f"needs GPUs of compute capability 9.0 (H100, H200) with experts, unlike {capabilities.devices}: "
        rule += "torch has no grouped product in fp8 for others; remove it"
        yield config.problem("fp8", rule, "moe_num_experts")
    uneven = {}
    for spec in plan.layers.divided_linears:
        *_, rows, columns = spec.shard_shape(plan.grid.tp_size)
        if rows % FP8_MULTIPLE or columns % FP8_MULTIPLE:
            uneven[spec.name] = f"{spec.name} is {rows:,} x {columns:,}"
    if uneven:
        yield config.problem(
            "fp8",
            f"needs matrices whose sides on a rank are multiples of {FP8_MULTIPLE}: {', '.join(uneven.values())}; "
            "change the network's sizes or model_parallel_size, or remove it",
        )
