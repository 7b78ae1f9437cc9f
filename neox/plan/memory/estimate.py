"""Memory estimate of one rank in training, put together from its parts.

Not counted: the CUDA context, communication buffers and fragmentation; `fit.py` keeps a reserve for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neox.architecture import LayerPlan
from neox.plan.memory.activations import activation_bytes, kept_inputs_on_host
from neox.plan.memory.parameters import ParameterCount, count_parameters
from neox.plan.memory.setting import MemorySetting
from neox.plan.memory.zero import Sharding, copied_bytes, file_bytes, host_bytes, sharding_of
from neox.plan.stages import StagePlan


@dataclass(frozen=True)
class MemoryPlan:
    """Estimated bytes of one rank.

    Attributes:
        weights: Weights on the device, including the copy of a reference model.
        gradients: Gradients with the buffers of their reduction.
        optimizer: Optimizer states, fp32 copies of weights and their average on the device.
        activations: Peak of temporary memory: activations and logits, or what the update needs.
        host: Main memory of offloaded states and weights, of averaged weights, and of inputs of recomputed blocks.
        copies: Main memory of the copies that background saves write.
        files: Files on a local disk with offloaded states and weights.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    host: int = 0
    copies: int = 0
    files: int = 0

    @property
    def main_memory(self) -> int:
        """Bytes in main memory of what is offloaded or copied; on a CPU they are a part of `needed`."""
        return self.host + self.copies

    @property
    def total(self) -> int:
        """Sum of all parts on the device."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def needed(self, *, on_cpu: bool) -> int:
        """Return the bytes that the rank's device holds: on a CPU also what is in main memory."""
        if on_cpu:
            return self.total + self.main_memory
        return self.total


def stage_memory(layers: LayerPlan, stage: StagePlan, setting: MemorySetting) -> MemoryPlan:
    """Return the memory of one rank of a pipeline stage."""
    count = count_parameters(layers, stage, setting)
    sharding = sharding_of(setting)(setting, count)
    averages_here = 0
    averages_on_host = 0
    if setting.averages_on_host:
        averages_on_host = sharding.averages()
    else:
        averages_here = sharding.averages()
    return MemoryPlan(
        weights=sharding.weights() * (1 + setting.copies_reference),
        gradients=sharding.gradients() + sharding.reduction_buckets() + _summed_gradients(setting, count),
        optimizer=sharding.optimizer_states() + averages_here,
        activations=_temporary_peak(layers, stage, sharding),
        host=host_bytes(sharding) + averages_on_host + kept_inputs_on_host(layers, stage, setting),
        copies=copied_bytes(sharding),
        files=file_bytes(sharding),
    )


def fullest_stage(layers: LayerPlan, stages: Sequence[StagePlan], setting: MemorySetting) -> MemoryPlan:
    """Return the memory of a rank of the stage that needs the most on its device."""
    memories = [stage_memory(layers, stage, setting) for stage in stages]
    return max(memories, key=lambda memory: memory.needed(on_cpu=setting.on_cpu))


def _summed_gradients(setting: MemorySetting, count: ParameterCount) -> int:
    """Return bytes of the fp32 sum of gradients over several steps, which the noise scale needs: trained x 4."""
    if not setting.sums_gradients:
        return 0
    return 4 * count.trained


def _temporary_peak(layers: LayerPlan, stage: StagePlan, sharding: Sharding) -> int:
    """Return the bytes of the phase of a step that needs the most: passes, reduction after them, or update.

    Passes hold activations, and gathered weights or a second sum of gradients. They are gone in the other two.
    """
    passes = sharding.passes(activation_bytes(layers, stage, sharding.setting))
    update = sharding.update() + sharding.copied_before_update()
    return max(passes, sharding.reduction_after_passes(), update)
