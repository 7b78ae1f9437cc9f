"""Facts of a network that times depend on, and how training systems differ where a configuration does not say it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from neox.architecture import ACTIVATIONS, BLOCK_OFFSET, BLOCKS, Architecture, Attention, ParameterSpec, block_kinds
from neox.config.sections.optimizer_table import MuonParams
from neox.plan.layout import Workload
from neox.plan.ranks.pipeline_schedules import ranges_per_stage

Recompute = Literal["none", "core_attn", "half_of_products", "full"]
"""What the backward pass repeats: nothing; scores and weighted values (Megatron-LM's `selective`); every second
product and all elementwise work (torchtitan's `selective`); whole blocks."""


@dataclass(frozen=True, kw_only=True)
class TrainingSystem:
    """How a system trains where systems differ. The defaults are this project's; benchmarks time others.

    Attributes:
        keeps_gathered: With ZeRO 3: weights are gathered once a step and kept, not gathered for each pass.
        overlaps_tensor: Collectives of tensor ranks run during products (async TP).
        in_ring: Context ranks exchange keys and values in a ring, overlapped with attention. Otherwise they do as
            `context_parallel_kind` says.
        balanced_context: Each context rank holds an early and a late part of a sample, so that all attend to as many
            tokens. Otherwise the last rank attends to the most, and the others wait for it.
        blocking_handoff: A rank waits while it sends to the next stage (gpt-neox). Otherwise it computes.
        divided_handoff: Each tensor rank sends its share of the hidden states. Otherwise each sends all.
        network: Network bandwidth of one GPU in GB/s where it is not the GPU's usual one; 0 for that.
        fused: Whether elementwise work runs in fused kernels; None: in compiled layers.
        overlaps_gradients: Whether gradients are reduced during the backward pass; None: as `overlap_comm` says,
            without pipeline stages.
        recomputes_half: Recomputation repeats every second product, not the part that the layout says.
    """

    keeps_gathered: bool = False
    overlaps_tensor: bool = False
    in_ring: bool = False
    balanced_context: bool = True
    blocking_handoff: bool = False
    divided_handoff: bool = True
    network: float = 0.0
    fused: bool | None = None
    overlaps_gradients: bool | None = None
    recomputes_half: bool = False

    def fuses(self, run: Workload) -> bool:
        """Return whether elementwise work runs in fused kernels."""
        return run.compiles_layers if self.fused is None else self.fused

    def overlaps(self, run: Workload) -> bool:
        """Return whether gradients are reduced during the backward pass."""
        if self.overlaps_gradients is not None:
            return self.overlaps_gradients
        return run.layout.pp_size == 1 and (run.overlaps_reduction or run.reduces_layers)

    def recompute(self, run: Workload) -> Recompute:
        """Return what the backward pass repeats."""
        if not run.layout.recomputes:
            return "none"
        if self.recomputes_half:
            return "half_of_products"
        return "full" if run.recomputes_blocks else "core_attn"


OURS = TrainingSystem()


def why_no_order(network: Architecture) -> str:
    """Return why not even the order of layouts is estimated for a network, as a clause; empty if it is."""
    if network.bidirectional or network.score_head or any(kind.attention is None for kind in block_kinds(network)):
        return "times are of decoders with attention in each block only, and this network is another kind"
    return ""


def why_no_estimate(run: Workload) -> str:
    """Return why the time of a run is not estimated, as a clause; empty if it is."""
    reason = why_no_order(run.network)
    if reason:
        return reason
    if run.precision == "fp32" and not run.on_cpu:
        return (
            "times are of bf16 and fp16 only, and precision fp32 takes no tensor cores, whose peak is assumed; "
            "plan with precision: bf16"
        )
    return ""


def active_mlp_width(network: Architecture) -> int:
    """Return the inner width of all MLPs and experts that compute a token in a block, as the mean over blocks."""
    with_experts = len(network.expert_blocks)
    of_experts = network.experts_per_token * network.expert_width + network.shared_expert_width
    total = (network.num_layers - with_experts) * network.mlp_width + with_experts * of_experts
    return total // network.num_layers


def mlp_matrices(network: Architecture) -> int:
    """Return the number of matrices of an MLP: three with a gate."""
    return 3 if ACTIVATIONS[network.activation].width_factor > 1 else 2


class SharedAttention(NamedTuple):
    """A kind of attention, its matrices, and the share of the network's blocks that have it."""

    attention: Attention
    matrices: tuple[ParameterSpec, ...]
    share: float


@lru_cache(maxsize=64)
def attention_of_blocks(network: Architecture) -> tuple[SharedAttention, ...]:
    """Return the kinds of attention of a network."""
    found = []
    for kind, blocks in Counter(network.attention).items():
        attention = BLOCKS[kind].attention
        assert attention is not None, kind  # `why_no_estimate`
        matrices = tuple(spec for spec in attention.parameters(network) if spec.is_matrix)
        found.append(SharedAttention(attention, matrices, blocks / network.num_layers))
    return tuple(found)


def experts_per_token(network: Architecture) -> float:
    """Return the number of experts per token and block, as the mean over all blocks."""
    return network.experts_per_token * len(network.expert_blocks) / network.num_layers


class MuonWork(NamedTuple):
    """What Muon computes to turn the momentum of matrices into their steps.

    Attributes:
        operations: Operations for all matrices of blocks.
        largest: Those for the matrix that takes the most.
        elements: Elements of these matrices.
    """

    operations: float
    largest: float
    elements: float


def muon_work(run: Workload, params: MuonParams) -> MuonWork:
    """Return what Muon computes for the whole network.

    A Newton-Schulz iteration of a matrix with sides s <= l has three products: s l s, s s s and s s l.
    """
    network = run.network
    operations = 0.0
    largest = 0.0
    elements = 0.0
    kinds = [*zip(network.attention, network.mlp, strict=True)]
    for kind, blocks in Counter(kinds).items():
        layer = run.layers[BLOCK_OFFSET + kinds.index(kind)]
        for spec in layer.parameters:
            if not layer.is_hidden(spec):
                continue
            elements += blocks * spec.numel
            of_one = replace(spec, shape=spec.shape[-2:], experts=0)
            for matrix in of_one.matrices(split=params.split_fused):
                count = 3 if matrix.turns else 1
                short, long = sorted((matrix.rows // count, matrix.columns))
                once = params.ns_steps * (4 * short**2 * long + 2 * short**3)
                operations += blocks * max(1, spec.experts) * count * once
                largest = max(largest, once)
    return MuonWork(operations, largest, elements)


def expert_parameters(run: Workload) -> int:
    """Return the elements of all experts, over all blocks, which have equally many."""
    blocks = run.network.expert_blocks
    if not blocks:
        return 0
    layer = run.layers[BLOCK_OFFSET + min(blocks)]
    return len(blocks) * sum(spec.numel for spec in layer.parameters if spec.experts)


def held_parameters(run: Workload) -> int:
    """Return the elements of the matrices of all blocks, with experts that a token is not computed with."""
    return run.layers.block_matrix_numel


def ranges_of_stage(run: Workload) -> int:
    """Return the number of ranges of layers that a stage holds."""
    layout = run.layout
    return ranges_per_stage(layout.pipeline_schedule, layout.pp_size, layout.virtual_stages)


def tokens_of_step(run: Workload) -> int:
    """Return the tokens of one step over all ranks."""
    layout = run.layout
    samples = layout.micro_batch_size * layout.accumulation_steps * (layout.dp_size // layout.cp_size)
    return run.sequence_length * samples
