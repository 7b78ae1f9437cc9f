"""Memory of weights, gradients and optimizer states on one rank, by the way in which data ranks divide them.

Each class describes what DeepSpeed 0.19 keeps for a ZeRO stage, and one describes its bf16 optimizer, which takes the
place of stages 0 and 1 for some bf16 runs. The formulas use these words:

    held      elements of the weights on this tensor rank and pipeline stage
    trained   those of them that have gradients
    shard     trained / data ranks, which is this rank's part of them
    width     bytes of a weight in training: 4 in fp32, 2 in fp16 and bf16
    gradient  bytes of an accumulated gradient: 4 if bf16 gradients are accumulated in fp32, else width
    master    bytes of a weight, or gradient, as the optimizer sees it: 4, and 2 with bf16 states
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from neox.architecture import REDUCED_RANGE
from neox.config.sections.optimizer_kind import PIECE
from neox.plan.layout import Workload
from neox.plan.memory.activations import ActivationMemory
from neox.plan.memory.parameters import ParameterCount

_FP32 = 4
# Elements that DeepSpeed's engine reduces at once if ZeRO does not reduce.
_ENGINE_BUCKET = 500_000_000
# DeepSpeed's defaults of ZeRO 3: elements gathered at once, and passed before a weight is used again.
_LIVE_PARAMETERS = 1_000_000_000
_REUSE_DISTANCE = 1_000_000_000
# Bytes of an offloaded element that the host updates: its fp32 weight and gradient.
_UPDATED_ON_HOST = _FP32 + _FP32


class Sharding(ABC):
    """What one data rank keeps of weights, gradients and optimizer states.

    Attributes:
        shards_states: Whether each data rank keeps only a shard of the optimizer's states.
    """

    shards_states: ClassVar[bool] = True

    def __init__(self, run: Workload, count: ParameterCount) -> None:
        self.run = run
        self.count = count

    @property
    def shard(self) -> int:
        """Trained elements that this data rank updates if data ranks divide the optimizer's states."""
        return self.count.divided // self.run.layout.dp_size

    @property
    def _gradients_of_all(self) -> int:
        """Bytes of the accumulated gradients of all trained elements: trained x gradient."""
        return self.run.gradient_bytes * self.count.trained

    def weights(self) -> int:
        """Return bytes of weights: held x width."""
        return self.run.bytes_per_number * self.count.held

    @abstractmethod
    def gradients(self) -> int:
        """Return bytes of gradients between the backward pass and the update."""

    def optimizer_states(self) -> int:
        """Return bytes of optimizer states and fp32 copies of weights on the device: none if they are offloaded."""
        if self.run.layout.offloads_states:
            return 0
        return self.all_states()

    def all_states(self) -> int:
        """Return bytes of this rank's optimizer states: trained x (states + master for a copy) / data ranks."""
        return int((self.count.state_bytes + self.run.master_bytes) * self.count.divided) // self.run.layout.dp_size

    def reduction_buckets(self) -> int:
        """Return bytes of the buffers in which gradients are reduced during the backward pass."""
        return 0

    def reduction_after_passes(self) -> int:
        """Return the bytes of a reduction after the backward pass; 0 if gradients are reduced during that pass."""
        return 0

    def held_during_passes(self) -> int:
        """Return bytes that are needed next to the activations: gathered weights, or a second sum of gradients."""
        return 0

    def passes(self, activations: ActivationMemory) -> int:
        """Return the bytes of the forward and backward passes: activations and buffers held at the same time."""
        return activations.peak + self.held_during_passes()

    @abstractmethod
    def update(self) -> int:
        """Return bytes that the update needs next to states and gradients, while there are no activations."""

    @property
    def updated(self) -> int:
        """Elements that the optimizer updates on this rank."""
        return self.shard

    @property
    def updated_at_once(self) -> int:
        """Elements that one call of the optimizer updates on this rank."""
        return self.updated

    def _temporaries(self, updated: int) -> int:
        """Return bytes of the optimizer's temporary tensors: fp32, of at most `PIECE` of the updated elements each."""
        return _FP32 * self.run.config.optimizer.optimizer.kind.temporaries * min(updated, PIECE)

    def exchanged_with_host(self) -> int:
        """Return bytes per trained element that offloading keeps in main memory next to the states.

        They are the updated weights, before they are copied to the GPU: width.
        """
        return self.run.bytes_per_number


class Unsharded(Sharding):
    """ZeRO 0: every data rank keeps everything, and the engine reduces gradients."""

    shards_states = False

    def gradients(self) -> int:
        """Return bytes of gradients: trained x width."""
        return self.run.bytes_per_number * self.count.trained

    def all_states(self) -> int:
        """Return bytes of optimizer states: trained x (states + 4 for an fp32 copy unless training is in fp32)."""
        per_element = self.count.state_bytes
        if self.run.precision != "fp32":
            per_element += _FP32
        return int(per_element * self.count.trained)

    def reduction_after_passes(self) -> int:
        """Return bytes of the engine's bucket, see `_engine_bucket_bytes`."""
        return _engine_bucket_bytes(self.run, self.count)

    @property
    def updated(self) -> int:
        """All trained elements."""
        return self.count.trained

    def update(self) -> int:
        """Return bytes of fp32 gradients, trained x 4 unless training is in fp32, and of temporary tensors."""
        temporaries = self._temporaries(self.count.trained)
        if self.run.precision == "fp32":
            return temporaries
        return _FP32 * self.count.trained + temporaries


class Bf16Optimizer(Sharding):
    """DeepSpeed's BF16_Optimizer: states divided over data ranks, whole gradients, reduced by the engine.

    It serves bf16 with ZeRO 1 and fp32 gradients, and bf16 pipelines with ZeRO 0, unless states are offloaded.
    """

    def gradients(self) -> int:
        """Return bytes of gradients: trained x gradient, and trained x width if bf16 gradients are not released."""
        bf16 = self.run.config.deepspeed.bf16
        if bf16 is None or bf16.immediate_grad_update:
            return self._gradients_of_all
        return self._gradients_of_all + self.run.bytes_per_number * self.count.trained

    def reduction_after_passes(self) -> int:
        """Return bytes of the engine's bucket, see `_engine_bucket_bytes`: of weights that no range of layers has.

        Those are the weights that several layers use: the embedding, if the head or multi-token prediction has it, too.
        """
        if not self.run.reduces_layers:
            return _engine_bucket_bytes(self.run, self.count)
        shared = 0
        if any(entry.tied_to is not None for entry in self.run.layers):
            shared = self.run.layers.word_embeddings.shard_numel(self.run.layout.tp_size)
        return _engine_bucket_bytes(self.run, self.count, shared)

    def held_during_passes(self) -> int:
        """Return bytes of the range of layers whose reduction starts during the backward pass.

        It is a layer, or `REDUCED_RANGE` elements of several.
        """
        if not self.run.reduces_layers:
            return 0
        return _engine_bucket_bytes(self.run, self.count, self._reduced_range)

    @property
    def _reduced_range(self) -> int:
        """Elements that are reduced together."""
        reduced = self.count.trained - self.count.own_experts
        layer = reduced // max(1, self.run.layers.architecture.num_layers)
        return min(reduced, max(layer, min(REDUCED_RANGE, self.run.reduce_bucket)))

    def passes(self, activations: ActivationMemory) -> int:
        """Return bytes of both passes.

        A range starts when its last gradient has come: its layers' activations are freed, and no block is at work. It
        is joined, then converted, and only the converted copy stays until the next range starts:

            backward pass   | head, last layers |s| layers before them |s| first layers |s|     s: a range starts
            activations     | all               | those of the layers before            | none
            gradients       |                   |s| sent copy          |s| sent copy    |s|
        """
        started = self.held_during_passes()
        if started == 0:
            return activations.peak
        reduced = self.count.trained - self.count.own_experts
        rest = activations.kept * (reduced - self._reduced_range) // reduced
        at_first_start = rest + started
        if self._reduced_range == reduced:
            return max(activations.peak, at_first_start)
        sent = self.run.communicated_bytes * self._reduced_range
        return max(activations.peak, at_first_start, rest + activations.block_pass + sent, started + sent)

    def update(self) -> int:
        """Return bytes of the optimizer's temporary tensors."""
        return self._temporaries(self.shard)


class _ReducedByZero(Sharding):
    """ZeRO 1 to 3, which reduce gradients in buckets of their own."""

    def reduction_buckets(self) -> int:
        """Return bytes of the buckets: width x elements of a bucket, twice if reduction overlaps the backward pass.

        GPU memory is reserved whole. A CPU's memory is taken only when it is written to: for trained elements at most.
        """
        run = self.run
        bucket = run.reduce_bucket
        if run.on_cpu:
            bucket = min(bucket, self.count.trained)
        return run.bytes_per_number * bucket * (2 if run.overlaps_reduction else 1)

    def _shard_in_fp32(self, converted: int) -> int:
        """Return bytes of this rank's gradients joined and in fp32, with a copy before conversion or temporaries.

        shard x master + the larger of `converted` bytes and the optimizer's temporary tensors. Nothing is converted
        with bf16 states.
        """
        if self.run.bf16_states:
            converted = 0
        return self.run.master_bytes * self.shard + max(converted, self._temporaries(self.shard))


class Zero1(_ReducedByZero):
    """ZeRO 1: data ranks divide optimizer states, and each keeps all gradients."""

    def gradients(self) -> int:
        """Return bytes of gradients: trained x gradient, and this rank's reduced shard in fp32 if it is offloaded.

        The backward pass makes that shard only if reduction overlaps it; otherwise the update does.
        """
        total = self._gradients_of_all
        if self.run.layout.offloads_states and self.run.fp32_gradients and self.run.overlaps_reduction:
            total += _FP32 * self.shard
        return total

    def held_during_passes(self) -> int:
        """Return the bytes of `_reduced_shard` if the reduction overlaps the backward pass, otherwise 0."""
        if not self.run.overlaps_reduction:
            return 0
        return self._reduced_shard

    def reduction_after_passes(self) -> int:
        """Return the bytes of `_reduced_shard` if the reduction follows the backward pass, otherwise 0."""
        if self.run.overlaps_reduction:
            return 0
        return self._reduced_shard

    @property
    def _reduced_shard(self) -> int:
        """Bytes of the buffer of this rank's reduced gradients: shard x width; 0 if they are offloaded."""
        if self.run.layout.offloads_states:
            return 0
        return self.run.bytes_per_number * self.shard

    def update(self) -> int:
        """Return bytes of the update: this rank's gradients in fp32, less the other ranks' gradients.

        Other ranks' gradients are released before the shard is joined and converted. With offload the host
        updates, and the device makes the reduced shard unless the backward pass did.
        """
        run = self.run
        if run.layout.offloads_states:
            made_here = run.fp32_gradients and not run.overlaps_reduction
            return _FP32 * self.shard if made_here else 0
        converted = 0
        if run.precision != "fp32":
            converted = run.bytes_per_number * self.shard
        released = run.bytes_per_number * (self.count.trained - self.shard)
        return max(0, self._shard_in_fp32(converted) - released)


class Zero2(_ReducedByZero):
    """ZeRO 2: data ranks also divide gradients."""

    def gradients(self) -> int:
        """Return bytes of gradients: shard x gradient. Offloaded ones stay only if they are fp32 sums of bf16 ones."""
        if self.run.layout.offloads_states and not self.run.fp32_gradients:
            return 0
        return self.run.gradient_bytes * self.count.divided // self.run.layout.dp_size

    def held_during_passes(self) -> int:
        """Return bytes of this backward pass's gradients: shard x width, if they are added to earlier or fp32 ones."""
        is_only_sum = self.run.layout.accumulation_steps == 1 and not self.run.fp32_gradients
        if is_only_sum or self.run.layout.offloads_states:
            return 0
        return self.run.bytes_per_number * self.count.divided // self.run.layout.dp_size

    def passes(self, activations: ActivationMemory) -> int:
        """Return bytes of both passes.

        With fp32 sums, a bf16 gradient is held from its layer's backward pass to the end. The rank that owns the shard
        of the last layers has its whole shard after 1 / data ranks of the pass; with expert parallelism, after 1 / the
        number of ranks with the same experts. Activations are freed in the same order. The other types have one buffer
        for all gradients.
        """
        run = self.run
        held = self.held_during_passes()
        if not run.fp32_gradients or held == 0:
            return activations.peak + held
        passed = 1 / run.layout.dp_size
        if self.count.own_experts:
            passed = run.layout.ep_size / run.layout.dp_size
        return max(activations.peak, int(activations.peak * (1 - passed)) + held)

    def update(self) -> int:
        """Return bytes of the update: this rank's gradients joined and in fp32; none if the host updates.

        fp32 sums of bf16 gradients are joined already.
        """
        run = self.run
        if run.layout.offloads_states:
            return 0
        if run.fp32_gradients:
            return self._temporaries(self.shard)
        converted = 0
        if run.gradient_bytes < _FP32:
            converted = run.bytes_per_number * self.shard
        return self._shard_in_fp32(converted)

    def exchanged_with_host(self) -> int:
        """Return bytes of main memory per element: width for updated weights, and width for a sum of gradients."""
        updated_weights = self.run.bytes_per_number
        if self._sums_in_place:
            return updated_weights
        return updated_weights + self.run.bytes_per_number

    @property
    def _sums_in_place(self) -> bool:
        """Whether gradients are added to fp32 sums, or there is only one backward pass in a step."""
        return self.run.fp32_gradients or self.run.layout.accumulation_steps == 1


class Zero3(_ReducedByZero):
    """ZeRO 3: data ranks also divide weights, which are gathered for the layers at work."""

    def weights(self) -> int:
        """Return bytes of weights: whole x width / data ranks, none if they are offloaded; and of the second copy.

        That copy is whole x width / the data ranks that divide it (`hpz_size`). Experts that data ranks divide are
        sharded over those with the same ones, which comes to the same.
        """
        run = self.run
        if run.layout.offloads_weights:
            return 0
        whole = run.bytes_per_number * self.count.whole
        if run.layout.hpz_size == 1:
            return whole // run.layout.dp_size
        return whole // run.layout.dp_size + whole // run.layout.hpz_size

    def gradients(self) -> int:
        """Return bytes of gradients: shard x gradient; none if they are offloaded."""
        if self.run.layout.offloads_states:
            return 0
        return self.run.gradient_bytes * self.count.divided // self.run.layout.dp_size

    def held_during_passes(self) -> int:
        """Return bytes of the weights of layers at work: width x the smaller of held and gathered elements."""
        return self._gathered(self.count.held)

    def passes(self, activations: ActivationMemory) -> int:
        """Return bytes of both passes: the backward pass of blocks runs without the weights that it has used up."""
        head = activations.kept + activations.head_pass + self.held_during_passes()
        blocks = activations.kept + activations.block_pass + self._gathered(self.count.held - self.count.used_up)
        return max(head, blocks, activations.embedding_pass)

    def _gathered(self, used: int) -> int:
        """Return bytes of the gathered weights, if a rank has a use for so many elements.

        Nothing is gathered by one data rank, unless it copies offloaded weights to a GPU, and no experts by a rank that
        is the only one with them.
        """
        run = self.run
        layout = run.layout
        copies_from_host = layout.offloads_weights and not run.on_cpu
        if layout.dp_size == 1 and not copies_from_host:
            return 0
        if 1 < layout.ep_size == layout.dp_size and not copies_from_host:
            used -= (self.count.whole - self.count.held) // (layout.ep_size - 1)
        return run.bytes_per_number * min(used, _gathered_at_once(run))

    def update(self) -> int:
        """Return bytes of the update: fp32 gradients and temporaries of one sub-group; none if the host updates.

        Gradients of bf16 states are updated with as they are.
        """
        if self.run.layout.offloads_states:
            return 0
        temporaries = self._temporaries(self.updated_at_once)
        if self.run.bf16_states:
            return temporaries
        return _FP32 * self.updated_at_once + temporaries

    @property
    def updated_at_once(self) -> int:
        """Elements of one sub-group."""
        return min(self.shard, self.run.config.deepspeed.zero_optimization.updated_at_once)

    def exchanged_with_host(self) -> int:
        """Return bytes of main memory per trained element: its accumulated gradient."""
        return self.run.gradient_bytes


def _engine_bucket_bytes(run: Workload, count: ParameterCount, largest: int = _ENGINE_BUCKET) -> int:
    """Return bytes of a bucket in which DeepSpeed's engine reduces accumulated gradients.

    Elements of a bucket x (gradient + bytes of the communicated type, if that is another one); none for one data rank.
    Experts that data ranks divide are averaged one by one, in place.
    """
    if run.layout.dp_size == 1:
        return 0
    per_element = run.gradient_bytes
    if run.communicated_bytes != run.gradient_bytes:
        per_element += run.communicated_bytes
    return per_element * min(count.trained - count.own_experts, largest)


def _gathered_at_once(run: Workload) -> int:
    """Return the elements that ZeRO 3 gathers in advance, or keeps between two uses if they are more.

    A weight is kept until the backward pass if the layers that come before that, each once in the forward and once in
    the backward pass, have fewer elements than the distance of reuse. The limit of live weights does not release it.
    """
    zero = run.config.deepspeed.zero_optimization
    live = zero.stage3_max_live_parameters
    if live is None:
        live = _LIVE_PARAMETERS
    reuse = zero.stage3_max_reuse_distance
    if reuse is None:
        reuse = _REUSE_DISTANCE
    return max(live, reuse // 2)


_STAGES: Mapping[int, type[Sharding]] = MappingProxyType({0: Unsharded, 1: Zero1, 2: Zero2, 3: Zero3})


def sharding_of(run: Workload) -> type[Sharding]:
    """Return how the data ranks of a run divide weights, gradients and states."""
    if run.precision == "bf16" and not run.layout.offloads_states:
        accumulates_in_fp32 = run.layout.zero_stage == 1 and run.fp32_gradients
        is_pipeline = run.layout.zero_stage == 0 and run.layout.pp_size > 1
        if accumulates_in_fp32 or is_pipeline:
            return Bf16Optimizer
    return _STAGES[run.layout.zero_stage]


def host_bytes(sharding: Sharding) -> int:
    """Return bytes in main memory of what a rank offloads: states, what it exchanges with the device, and weights.

    shard x (states + 4 for the fp32 weight + 4 for its gradient + what is exchanged) + whole x width / data ranks. What
    is in files does not count, but for the states of one sub-group.
    """
    run = sharding.run
    zero = run.config.deepspeed.zero_optimization
    count = sharding.count
    if not run.layout.offloads_states:
        return 0
    of_states = _UPDATED_ON_HOST + count.state_bytes
    exchanged = sharding.exchanged_with_host()
    weights = 0
    if run.layout.offloads_weights and zero.weights_directory is None:
        weights = run.bytes_per_number * count.whole
    if zero.states_directory is not None:
        sub_group = int(of_states) * min(sharding.shard, zero.updated_at_once)
        return int(exchanged * count.divided + weights) // run.layout.dp_size + sub_group
    return int((of_states + exchanged) * count.divided + weights) // run.layout.dp_size


def file_bytes(sharding: Sharding) -> int:
    """Return bytes on a local disk: shard x (states + 4 + 4) and whole x width / data ranks, if in files."""
    run = sharding.run
    zero = run.config.deepspeed.zero_optimization
    count = sharding.count
    total: float = 0
    if zero.states_directory is not None:
        total += (_UPDATED_ON_HOST + count.state_bytes) * count.divided
    if zero.weights_directory is not None:
        total += run.bytes_per_number * count.whole
    return int(total) // run.layout.dp_size


def copied_bytes(sharding: Sharding, data_rank: int, of_features: int) -> int:
    """Return bytes in main memory of the copies that a background save writes: all states, whole x width.

    The first data rank saves what all of them hold, and what features store.
    """
    run = sharding.run
    if not run.config.checkpoint.async_save:
        return 0
    total = 0
    if not run.config.checkpoint.no_save_optim and (data_rank == 0 or sharding.shards_states):
        total += sharding.all_states()
    if data_rank == 0:
        total += run.bytes_per_number * sharding.count.whole + of_features
    return total
