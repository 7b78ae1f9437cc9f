"""Requirements of matrix products in fp8: shapes of weights, and GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from neox.architecture import ADAPTER, FP8_MULTIPLE, POSITIONS, LayerPlan, ParameterSpec
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
    uneven = {}
    for spec in fp8_matrices(plan.layers):
        rows, columns = spec.shard_shape(plan.grid.tp_size)
        if rows % FP8_MULTIPLE or columns % FP8_MULTIPLE:
            uneven[spec.name] = f"{spec.name} is {rows:,} x {columns:,}"
    if uneven:
        yield config.problem(
            "fp8",
            f"needs matrices whose sides on a rank are multiples of {FP8_MULTIPLE}: {', '.join(uneven.values())}; "
            "change the network's sizes or model_parallel_size, or remove it",
        )


def fp8_matrices(layers: LayerPlan) -> Iterator[ParameterSpec]:
    """Yield the weights that are multiplied in fp8: of the linear layers of blocks that are split over tensor ranks."""
    network = layers.architecture
    tables = {spec.name for spec in POSITIONS[network.positions].shared(network)}
    for layer in layers:
        if layer.kind != "block":
            continue
        for spec in layer.parameters:
            is_split = spec.is_matrix and spec.partition_dim is not None
            if is_split and spec.name not in tables and ADAPTER not in spec.name and not spec.of_recurrence:
                yield spec
