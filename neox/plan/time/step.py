"""Time of an optimizer step: a sum of named parts, each by the roofline of a GPU (`neox.plan.time.roofline`).

`StepModel` has a method for each part. Whoever models another training system replaces some in a subclass, as
`benchmarks/step_time.py` does for published runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import NamedTuple

from neox.architecture import (
    ACTIVATIONS,
    ADAPTER,
    BLOCKS,
    Architecture,
    Attention,
    block_kinds,
    training_flops_per_token,
)
from neox.config.sections.optimizer_table import MuonParams
from neox.devices import Gpu, family_has
from neox.plan.layout import Workload
from neox.plan.ranks.pipeline_schedules import ranges_per_stage
from neox.plan.time.muon import newton_schulz_work
from neox.plan.time.roofline import all_to_all_seconds, latency_seconds, matmul_seconds, memory_seconds, ring_seconds
from neox.plan.time.simulation import PipelineLength, simulated_length

COMPUTE_OPTIMAL_RATIO = 20.0
"""Tokens for each parameter with which a given compute reaches the lowest loss (arXiv:2203.15556)."""
_HIDDEN_SHARE = 0.85
"""Share of the backward pass behind which the reduction of gradients or the gathering of weights can hide."""


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of one optimizer step on the rank that has the most work, by what they are spent on.

    Attributes:
        products: Matmuls of blocks and head.
        attention: Scores and weighted values.
        elementwise: Norms, activations, residuals and all else that memory bandwidth limits.
        tensor: Collectives of tensor ranks that nothing hides.
        context: Collectives of context ranks that nothing hides.
        experts: All-to-alls of expert parallelism.
        bubble: Waiting for other pipeline stages, hand-offs included.
        gradients: Reduction of gradients and gathering of weights that nothing hides.
        update: The optimizer's step, including copies to and from main memory.
        reference: Forward passes of a reference model, before those of the trained one.
        tokens: Tokens of the step over all ranks.
        ranks: Number of GPUs.
        model_flops: Operations of the network for the step, without recomputation, causal attention counted whole.
        peak_tflops: Peak of one GPU.
    """

    products: float
    attention: float
    elementwise: float
    tensor: float
    context: float
    experts: float
    bubble: float
    gradients: float
    update: float
    reference: float
    tokens: int
    ranks: int
    model_flops: float
    peak_tflops: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(getattr(self, part) for part in STEP_PARTS)

    @property
    def communication(self) -> float:
        """Seconds of collectives that nothing hides, without hand-offs between stages."""
        return self.tensor + self.context + self.experts + self.gradients

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / self.ranks

    @property
    def tflops(self) -> float:
        """Operations of the network per second and GPU, in TFLOP/s."""
        return self.model_flops / self.seconds / self.ranks / 1e12

    @property
    def mfu(self) -> float:
        """Fraction of the GPUs' peak that the network's operations use."""
        return self.tflops / self.peak_tflops


STEP_PARTS = tuple(field.name for field in fields(StepTime))[:10]
"""Names of the parts of a step's time, whose sum it is."""


class PassTime(NamedTuple):
    """Seconds of a block or a head for one micro batch, by the parts of `StepTime`."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return sum(self)

    def plus(self, other: PassTime) -> PassTime:
        """Return the time of both."""
        return PassTime(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def times(self, factor: float) -> PassTime:
        """Return the time of `factor` such passes."""
        return PassTime(*(factor * part for part in self))


class StagePasses(NamedTuple):
    """Seconds of the passes of one micro batch.

    Attributes:
        forward: Of a forward pass, for each stage and range of layers.
        backward: Of a backward pass, for each stage and range of layers.
        handoff: From the end of a pass until its result has arrived on another stage.
    """

    forward: list[list[float]]
    backward: list[list[float]]
    handoff: float


class _Parameters(NamedTuple):
    """Elements that a tensor rank and stage holds: `dense` by every data rank, `experts` shared by expert ranks."""

    dense: float
    experts: float


def unsupported_network(network: Architecture) -> str:
    """Return why the time of a network is not modelled, as a clause; empty if it is."""
    if network.bidirectional or network.score_head or any(kind.attention is None for kind in block_kinds(network)):
        return "times are of decoders with attention in each block only, and this network is another kind"
    return ""


def unsupported_time(run: Workload) -> str:
    """Return why the time of a run is not estimated, as a clause; empty if it is."""
    reason = unsupported_network(run.network)
    if reason:
        return reason
    if run.precision == "fp32" and not run.on_cpu:
        return (
            "times are of bf16 and fp16 only, and precision fp32 takes no tensor cores, whose peak is assumed; "
            "plan with precision: bf16"
        )
    return ""


def tokens_of_step(run: Workload) -> int:
    """Return the tokens of one step over all ranks."""
    layout = run.layout
    samples = layout.micro_batch_size * layout.accumulation_steps * (layout.dp_size // layout.cp_size)
    return run.sequence_length * samples


def ranges_of_stage(run: Workload) -> int:
    """Return the number of ranges of layers that a stage holds."""
    layout = run.layout
    return ranges_per_stage(layout.pipeline_schedule, layout.pp_size, layout.virtual_stages)


@lru_cache(maxsize=64)
def _attention_shares(network: Architecture) -> tuple[tuple[Attention, float], ...]:
    """Return the kinds of attention of a network, and the share of its blocks that have each."""
    shares = []
    for name, blocks in Counter(network.attention).items():
        attention = BLOCKS[name].attention
        assert attention is not None, name  # `unsupported_network`
        shares.append((attention, blocks / network.num_layers))
    return tuple(shares)


class StepModel:
    """Time of an optimizer step of this library on a GPU.

    Args:
        run: The run in its layout.
        gpu: The GPUs.
    """

    def __init__(self, run: Workload, gpu: Gpu) -> None:
        self.run = run
        self.gpu = gpu
        network = run.network
        layout = run.layout
        with_experts = len(network.expert_blocks)
        of_experts = network.experts_per_token * network.expert_width + network.shared_expert_width
        widths = (network.num_layers - with_experts) * network.mlp_width + with_experts * of_experts
        # Inner width of the MLPs and experts that compute a token on this rank, as the mean over blocks.
        self.mlp_width = widths / network.num_layers / layout.tp_size
        self.mlp_matrices = 1 + ACTIVATIONS[network.activation].width_factor
        self.heads = network.num_attention_heads / layout.tp_size
        self.kv_heads = max(1.0, network.num_kv_heads / layout.tp_size)
        self.stage_layers = network.num_layers / layout.pp_size

    def estimate(self, pipeline_length: PipelineLength = simulated_length) -> StepTime:
        """Return the time of a step.

        Args:
            pipeline_length: How the length of a step follows from its passes.

        Raises:
            ConfigError: The schedule does not take this number of micro batches.
        """
        run = self.run
        layout = run.layout
        passes = self.stage_passes()
        length = pipeline_length(
            layout.pipeline_schedule, passes.forward, passes.backward, layout.accumulation_steps, passes.handoff
        )
        modules = run.network.mtp_num_layers  # on the last stage
        micro_batch = self.forward.plus(self.backward).times(self.stage_layers + modules).plus(self.head)
        busy = micro_batch.times(layout.accumulation_steps)
        return StepTime(
            **busy._asdict(),
            bubble=max(0.0, length - busy.total),
            gradients=self.gradients(),
            update=self.update(),
            reference=self.reference(passes),
            tokens=tokens_of_step(run),
            ranks=layout.tp_size * layout.pp_size * layout.dp_size,
            model_flops=self.model_flops(),
            peak_tflops=self.gpu.peak_tflops,
        )

    def model_flops(self) -> float:
        """Return the operations of one step, forward and backward, as a run reports them without recomputation."""
        run = self.run
        length = run.layout.seq_length  # without a soft prompt, which is counted per token of these
        per_token = training_flops_per_token(run.layers, length, predicted=run.config.model.predicted_tokens)
        return float(per_token) * tokens_of_step(run) * length / run.sequence_length

    # -- one block, forward and backward

    @cached_property
    def forward(self) -> PassTime:
        """Time of a block's forward pass for one micro batch, as the mean over blocks."""
        layout = self.run.layout
        all_reduces = 2  # of attention and of the MLP
        if self.run.network.parallel_residual and not layout.sequence_parallel:
            all_reduces = 1  # of both together; the gradients of their inputs are summed one by one
        return PassTime(
            products=self.matmuls(),
            attention=self.attention(),
            elementwise=self.elementwise(),
            tensor=self.tensor_collectives(all_reduces),
            context=self.context_collectives(),
            experts=self.expert_collectives(),
        )

    @cached_property
    def backward(self) -> PassTime:
        """Time of a block's backward pass for one micro batch, with what it recomputes.

        A matmul has two gradients, with frozen weights only that of its input. Fused attention computes five products
        backward for two forward.
        """
        forward = self.forward
        attention = 2 * forward.attention
        if self.run.layout.attention == "flash":
            attention = 2.5 * self.gpu.attention_tflops / self.gpu.attention_backward_tflops * forward.attention
        gradients = PassTime(
            products=(1 + self.run.layers.trained_share) * forward.products,
            attention=attention,
            elementwise=2 * forward.elementwise,
            tensor=self.tensor_collectives(2),
            context=self.context_collectives_backward(),
            experts=forward.experts,
        )
        return gradients.plus(self.recomputed())

    def recomputed(self) -> PassTime:
        """Return the part of a block's backward pass that repeats its forward pass, as the mean over blocks.

        Tiles of an MLP repeat it, however the run recomputes. Flash attention stores no scores to compute again.
        """
        run = self.run
        again = PassTime()
        if run.recomputes_blocks:
            again = self.forward
        elif run.layout.recomputes and run.layout.recomputed_part == "full_attn":
            projections = self.matmuls("attention.") - self.matmuls("attention.dense.")
            again = PassTime(products=projections, attention=self.forward.attention, context=self.forward.context)
        elif run.layout.recomputes and run.layout.attention != "flash":
            again = PassTime(attention=self.forward.attention)
        again = again.times(1 - len(run.layout.no_recompute_blocks) / run.network.num_layers)
        if run.in_tiles and not run.recomputes_blocks:
            again = again.plus(PassTime(products=self.matmuls("mlp."), elementwise=self.forward.elementwise / 2))
        return again

    def matmuls(self, name: str = "") -> float:
        """Return the time of a block's matmuls with weights whose names begin so, without adapters."""
        run = self.run
        fp8 = run.config.training.fp8 is not None
        seconds = 0.0
        for layer, blocks in run.layers.block_types:
            for spec in layer.parameters:
                if not spec.is_matrix or ADAPTER in spec.name or not spec.name.startswith(name):
                    continue
                *_, columns, inner = spec.shard_shape(run.layout.tp_size)
                rows = float(run.tokens)
                matrices = 1.0
                if spec.experts:
                    rows *= spec.active_experts
                    matrices = spec.experts / run.layout.ep_size
                share = blocks / run.network.num_layers
                seconds += share * matmul_seconds(self.gpu, rows, columns, inner, matrices=matrices, fp8=fp8)
        return seconds

    def attention(self) -> float:
        """Return the forward time of scores and weighted values, as the mean over blocks."""
        return sum(share * self._scores(kind) for kind, share in _attention_shares(self.run.network))

    def _scores(self, attention: Attention) -> float:
        """Return the forward time of one kind of attention. Fused attention skips the keys that a mask hides."""
        run = self.run
        network = run.network
        sequence = run.sequence_length
        flops_of_key = 2 * run.tokens * self.heads * (network.head_dim + attention.value_width(network))
        if run.layout.attention == "flash" or not attention.takes_softmax:
            keys = attention.keys_per_query(network, sequence)
            seen = keys - keys**2 / 2 / sequence  # the first queries have fewer keys before them
            narrow = max(1.0, 128 / network.head_dim) ** 0.5
            return flops_of_key * seen * narrow / (self.gpu.attention_tflops * 1e12) + self.gpu.kernel_seconds
        # Two batched matmuls, over a head's width and over keys; softmax and dropout read and write the scores.
        matmul = matmul_seconds(self.gpu, run.tokens * self.heads, sequence, network.head_dim) - self.gpu.kernel_seconds
        matmul *= flops_of_key / (2 * run.tokens * self.heads * network.head_dim)
        scores = run.tokens * sequence * self.heads
        return matmul + memory_seconds(self.gpu, 13 * scores) + 4 * self.gpu.kernel_seconds

    @property
    def fuses_blocks(self) -> bool:
        """Whether the elementwise work of blocks runs in fused kernels."""
        return self.run.compiles_layers

    @property
    def fuses_loss(self) -> bool:
        """Whether the loss runs in fused kernels."""
        return family_has(self.run.family, "triton")

    def elementwise(self) -> float:
        """Return the forward time of norms, residuals, positions and the activation, by the tensors they move."""
        run = self.run
        network = run.network
        layout = run.layout
        hidden = run.tokens * network.hidden_size / run.token_shares
        inner = run.tokens * self.mlp_width
        rotated = run.tokens * (network.num_attention_heads + network.num_kv_heads) * network.head_dim / layout.tp_size
        if self.fuses_blocks:
            elements = 8 * hidden + self.mlp_matrices * inner + 2 * rotated
            kernels = 8
        else:
            elements = 22 * hidden + (self.mlp_matrices + 2) * inner + 8 * rotated
            kernels = 30
        if run.config.training.fp8 is not None:  # each factor of a matmul is scaled and written again
            elements += 3 * hidden + 1.5 * inner
            elements += 1.5 * run.layers.expert_numel / network.num_layers / layout.tp_size / layout.ep_size
        return memory_seconds(self.gpu, 2 * elements) + kernels * self.gpu.kernel_seconds / 2

    def tensor_collectives(self, all_reduces: int) -> float:
        """Return the time of a block's all-reduces over tensor ranks in a pass, or of gathers and scatters instead."""
        size = 2 * self.run.tokens * self.run.network.hidden_size
        return 2 * all_reduces * ring_seconds(self.gpu, size, self.run.layout.tp_size, 1)

    def context_collectives(self) -> float:
        """Return the time of context parallelism's collectives in a block's forward pass."""
        run = self.run
        layout = run.layout
        if layout.cp_size == 1:
            return 0.0
        if run.gathers_keys:
            return self.gathered_keys_seconds()
        # Ulysses: queries, keys and values there, outputs back.
        size = 2 * run.tokens * (2 * self.heads + 2 * self.kv_heads) * run.network.head_dim
        once = ring_seconds(self.gpu, size, layout.cp_size, layout.tp_size)
        return once + latency_seconds(self.gpu, layout.cp_size)

    def gathered_keys_seconds(self) -> float:
        """Return the time in which context ranks get the keys and values of all tokens."""
        run = self.run
        size = 2 * 2 * run.tokens * run.layout.cp_size * self.kv_heads * run.network.head_dim
        return ring_seconds(self.gpu, size, run.layout.cp_size, run.layout.tp_size)

    def context_collectives_backward(self) -> float:
        """Return the time of context parallelism's collectives in a block's backward pass."""
        if self.run.gathers_keys and not self.run.keeps_gathered_keys:
            return 2 * self.forward.context  # gathered again, then their gradients are scattered
        return self.forward.context

    def expert_collectives(self) -> float:
        """Return the time of a block's two all-to-alls (dispatch and combine), as the mean over blocks."""
        network = self.run.network
        layout = self.run.layout
        experts = network.experts_per_token * len(network.expert_blocks) / network.num_layers
        size = 2 * self.run.tokens * experts * network.hidden_size
        return 2 * all_to_all_seconds(self.gpu, size, layout.ep_size, layout.tp_size)

    # -- the head, and passes of a pipeline

    @cached_property
    def head(self) -> PassTime:
        """Time of head and loss for one micro batch, forward and backward.

        Modules of multi-token prediction use the head once more each.
        """
        run = self.run
        tokens = run.tokens * (1 + run.network.mtp_num_layers)
        rows = run.layers.padded_vocab_size / run.layout.tp_size
        matmul = matmul_seconds(self.gpu, tokens, rows, run.network.hidden_size)
        bytes_of_logit = 26  # in bf16 and in fp32, read and written
        if self.fuses_loss:
            bytes_of_logit = 14
        return PassTime(
            products=(2 + run.layers.trains_head) * matmul,
            elementwise=memory_seconds(self.gpu, bytes_of_logit * tokens * rows),
        )

    def handoff(self) -> float:
        """Return the time to send this tensor rank's part of the hidden states of a micro batch to the next stage."""
        layout = self.run.layout
        if layout.pp_size == 1:
            return 0.0
        size = 2 * self.run.tokens * self.run.network.hidden_size / layout.tp_size
        in_host = layout.tp_size * layout.dp_size < self.gpu.per_host
        link = self.gpu.network_gbs
        if in_host:
            link = self.gpu.link_between(2)
        return size / (link * 1e9) + 2e-5

    def stage_passes(self) -> StagePasses:
        """Return the times of all stages' passes of one micro batch; the last range has the head, too."""
        forward = self.forward.total
        backward = self.backward.total
        head = self.head.total
        layout = self.run.layout
        ranges = ranges_of_stage(self.run)
        modules = self.run.network.mtp_num_layers
        blocks = self.stage_layers / ranges
        fronts = [[blocks * forward] * ranges for _ in range(layout.pp_size)]
        backs = [[blocks * backward] * ranges for _ in range(layout.pp_size)]
        last_stage = layout.pp_size - 1
        if layout.pipeline_schedule == "dualpipev":  # its last range is on the first stage
            last_stage = 0
        fronts[last_stage][-1] += head / 3 + modules * forward
        backs[last_stage][-1] += head * 2 / 3 + modules * backward
        return StagePasses(fronts, backs, self.handoff())

    # -- once a step

    def reference(self, passes: StagePasses) -> float:
        """Return the time in which a copy of the first weights computes all micro batches; 0 without one."""
        if not self.run.config.preferences.copies_reference:
            return 0.0
        slowest = max(map(sum, passes.forward)) + passes.handoff
        return slowest * (self.run.layout.accumulation_steps + self.run.layout.pp_size - 1)

    @property
    def overlaps_gradients(self) -> bool:
        """Whether gradients are reduced during the backward pass."""
        run = self.run
        return run.layout.pp_size == 1 and (run.overlaps_reduction or run.reduces_layers)

    def _parameters(self) -> _Parameters:
        """Return the elements that a tensor rank and stage holds, on the stage with the head."""
        run = self.run
        network = run.network
        layout = run.layout
        modules = network.mtp_num_layers  # on the last stage, a block and a projection each
        in_blocks = run.layers.block_matrix_numel - run.layers.expert_numel
        dense = in_blocks / layout.pp_size + modules * (in_blocks / network.num_layers + 2 * network.hidden_size**2)
        dense += run.layers.padded_vocab_size * network.hidden_size
        experts = run.layers.expert_numel * (1 / layout.pp_size + modules / max(1, len(network.expert_blocks)))
        return _Parameters(dense / layout.tp_size, experts / layout.tp_size)

    def gradients(self) -> float:
        """Return the time of reducing gradients and gathering weights that no pass hides."""
        run = self.run
        layout = run.layout
        ranks = layout.dp_size
        if ranks == 1:
            return 0.0
        held = self._parameters()

        def exchange(element: float) -> float:
            if layout.ep_size == 1:
                return ring_seconds(self.gpu, element * sum(held), ranks, layout.tp_size)
            size = element * held.experts / layout.ep_size
            of_experts = ring_seconds(self.gpu, size, ranks // layout.ep_size, layout.tp_size * layout.ep_size)
            return ring_seconds(self.gpu, element * held.dense, ranks, layout.tp_size) + of_experts

        weight_bytes = 2
        if run.config.deepspeed.zero_optimization.zero_quantized_weights:
            weight_bytes = 1
        trained = run.layers.trained_share
        reduce = exchange(run.communicated_bytes * trained)
        hides_backward = _HIDDEN_SHARE * self.stage_layers * self.backward.total
        if layout.zero_stage < 3:
            exposed = reduce
            if self.overlaps_gradients:
                exposed = max(0.0, reduce - hides_backward)
            if layout.zero_stage == 2:  # it holds no full gradients to add to
                exposed *= layout.accumulation_steps
            return exposed + exchange(weight_bytes * trained)

        of_layers = (self.stage_layers - 1) * latency_seconds(self.gpu, ranks)  # each layer has collectives of its own
        gather = exchange(weight_bytes) + of_layers
        if layout.offloads_weights:
            gather += 2 * sum(held) / ranks / (self.gpu.host_link_gbs * 1e9)
        again = gather  # for the backward pass: from the second copy of the weights if there is one
        if layout.hpz_size > 1:
            again = ring_seconds(self.gpu, weight_bytes * sum(held), layout.hpz_size, layout.tp_size) + of_layers
        hides_forward = _HIDDEN_SHARE * self.stage_layers * self.forward.total
        return self.zero3_collectives(gather, again, reduce + of_layers, hides_forward, hides_backward)

    def zero3_collectives(
        self, gather: float, again: float, reduce: float, hides_forward: float, hides_backward: float
    ) -> float:
        """Return the time of ZeRO 3's collectives in a step that no pass hides.

        Args:
            gather: Seconds of gathering all weights of a stage.
            again: Seconds of gathering them once more.
            reduce: Seconds of reducing all gradients.
            hides_forward: Seconds of collectives that the forward pass of a micro batch hides.
            hides_backward: Seconds that the backward pass hides.
        """

        def of_micro_batch(first: float) -> float:
            exposed = max(0.0, first - hides_forward) + max(0.0, again + reduce - hides_backward)
            ends = (first + again + reduce) / max(1.0, self.stage_layers)  # of the first and last block: not hidden
            return exposed + ends

        return of_micro_batch(gather) + (self.run.layout.accumulation_steps - 1) * of_micro_batch(again)

    def update(self) -> float:
        """Return the time of Adam: it reads and writes weight and moments in fp32, reads a gradient, writes 2 bytes.

        If the host updates, gradients are copied to it and new weights are copied back. Muon adds its matmuls.
        """
        run = self.run
        layout = run.layout
        held = self._parameters()
        updated = held.dense + held.experts / layout.ep_size
        if layout.zero_stage:
            updated = sum(held) / layout.dp_size
        updated *= run.layers.trained_share
        moved = 2 * 12 + 4 + 2
        if layout.offloads_states:
            copied = run.communicated_bytes + 2
            seconds = updated * (moved / self.gpu.host_memory_gbs + copied / self.gpu.host_link_gbs) / 1e9
        else:
            seconds = memory_seconds(self.gpu, moved * updated)
        params = run.config.optimizer.optimizer.params
        if isinstance(params, MuonParams):
            seconds += self._newton_schulz(params)
        return seconds

    def _newton_schulz(self, params: MuonParams) -> float:
        """Return the time in which Muon turns momentum into steps.

        Tensor ranks gather their matrices, and each computes the whole step. Data ranks share the matrices between them
        with ZeRO 1 and 2. ZeRO 3 shards each matrix, so that all data ranks gather and compute all of them.
        """
        layout = self.run.layout
        work = newton_schulz_work(self.run.layers, params)
        flops = work.flops / layout.pp_size
        elements = work.elements / layout.pp_size
        gathered = 0.0
        if layout.zero_stage in (1, 2):
            flops = max(flops / layout.dp_size, work.largest)
            elements /= layout.dp_size
        elif layout.zero_stage == 3:  # an all-reduce in fp32
            gathered = 2 * ring_seconds(self.gpu, 4 * elements, layout.dp_size, layout.tp_size)
        gathered += ring_seconds(self.gpu, 4 * elements, layout.tp_size, 1)
        return flops / (self.gpu.matmul_tflops * 1e12) + gathered


def estimate_step(run: Workload, gpu: Gpu, pipeline_length: PipelineLength = simulated_length) -> StepTime:
    """Estimate the time of one optimizer step. Arguments as for `StepModel` and its `estimate`."""
    return StepModel(run, gpu).estimate(pipeline_length)
