"""What multiplying in fp8 asks of a run's shapes and GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from neox.architecture import ADAPTER, FP8_MULTIPLE, POSITIONS, LayerPlan, ParameterSpec
from neox.plan.precision import Capabilities
from neox.plan.run_plan import RunPlan
from neox.problems import Problem


def fp8_problems(plan: RunPlan, capabilities: Capabilities) -> Iterator[Problem]:
    """Yield why the blocks of a bf16 plan cannot multiply in fp8 where it asks for it.

    Args:
        plan: The plan.
        capabilities: What the hosts can do.
    """
    config = plan.config
    if config.training.fp8 is None:
        return
    if capabilities.fp8 is False:
        yield config.problem("fp8", f"is not what {capabilities.devices} can multiply (an H100 can); remove it")
    uneven = {}
    for spec in fp8_matrices(plan.layers):
        here = spec.shard_shape(plan.grid.tp_size)
        if any(size % FP8_MULTIPLE for size in here):
            uneven[spec.name] = f"{spec.name} is {here[0]:,} x {here[1]:,}"
    if uneven:
        yield config.problem(
            "fp8",
            f"needs matrices whose sides on a rank are multiples of {FP8_MULTIPLE}: {', '.join(uneven.values())}; "
            "change the network's sizes or model_parallel_size, or remove it",
        )


def fp8_matrices(layers: LayerPlan) -> Iterator[ParameterSpec]:
    """Yield the weights that are multiplied in fp8: of the linear layers of blocks that are split over tensor ranks."""
    tables = {spec.name for spec in POSITIONS[layers.architecture.positions].shared(layers.architecture)}
    for layer in layers:
        for spec in layer.parameters if layer.kind == "block" else ():
            split = spec.is_matrix and spec.partition_dim is not None
            if split and spec.name not in tables and ADAPTER not in spec.name:
                yield spec
