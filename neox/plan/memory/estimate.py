"""Memory estimate of one rank in training, put together from its parts.

Not counted: the CUDA context, communication buffers and fragmentation; `device.py` keeps a reserve for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neox.features.on_paper import PAPERS
from neox.plan.feature import NO_MEMORY, FeatureMemory, RankTensors
from neox.plan.layout import Workload
from neox.plan.memory.activations import activation_bytes, kept_inputs_on_host
from neox.plan.memory.parameters import count_parameters
from neox.plan.memory.zero import Sharding, copied_bytes, file_bytes, host_bytes, sharding_of
from neox.plan.ranks.stages import StagePlan


@dataclass(frozen=True)
class MemoryPlan:
    """Estimated bytes of one rank.

    Attributes:
        weights: Weights on the device, and copies of them that features keep.
        gradients: Gradients with the buffers of their reduction, and sums that features keep.
        optimizer: Optimizer states, fp32 copies of weights and averages that features keep.
        activations: Peak of temporary memory: activations and logits, or what the update needs.
        host: Main memory of offloaded states and weights, of features, and of inputs of recomputed blocks.
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


def stage_memory(run: Workload, stage: StagePlan, data_rank: int = 0) -> MemoryPlan:
    """Return the memory of one rank of a pipeline stage. Background saves take the most on the first data rank."""
    count = count_parameters(run, stage)
    sharding = sharding_of(run)(run, count)
    features = memory_of_features(sharding)

    # Weights, gradients and optimizer states stay for the whole step.
    weights = sharding.weights() + features.weights
    gradients = sharding.gradients() + sharding.reduction_buckets() + features.gradients
    optimizer = sharding.optimizer_states() + features.optimizer
    host = host_bytes(sharding) + kept_inputs_on_host(run, stage) + features.host

    # The rest of memory is used in turn, so the phase of a step that needs the most counts:
    #
    #     forward and backward passes | reduction after them | update
    #     activations, and gathered   | the engine's bucket  | fp32 gradients, the optimizer's
    #     weights or gradients        |                      | temporaries, copies of features
    passes = sharding.passes(activation_bytes(run, stage))
    update = sharding.update() + features.during_update
    return MemoryPlan(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=max(passes, sharding.reduction_after_passes(), update),
        host=host,
        copies=copied_bytes(sharding, data_rank, features.saved),
        files=file_bytes(sharding),
    )


def memory_of_features(sharding: Sharding) -> FeatureMemory:
    """Return the bytes that all features together keep on one rank; each says in its `paper.py` what that is."""
    rank = RankTensors(
        weight_bytes=sharding.weights(),
        gradients=sharding.count.trained,
        updated=sharding.updated,
        updated_at_once=sharding.updated_at_once,
        of_decays=sharding.count.of_decays,
    )
    kept = [paper.memory(sharding.run, rank) for paper in PAPERS]
    return sum(kept, NO_MEMORY)


def fullest_stage(run: Workload, stages: Sequence[StagePlan]) -> MemoryPlan:
    """Return the memory of a rank of the stage that needs the most on its device."""
    memories = [stage_memory(run, stage) for stage in stages]
    return max(memories, key=lambda memory: memory.needed(on_cpu=run.on_cpu))
