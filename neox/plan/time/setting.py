"""What the time of a step depends on: a network's shape and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "core_attn", "half_of_products", "full"]
"""What the backward pass repeats: nothing; scores and weighted values (Megatron-LM's `selective`); every second
product and all elementwise work (torchtitan's `selective`); whole blocks."""


@dataclass(frozen=True, kw_only=True)
class NetworkShape:
    """Sizes of a decoder-only transformer that its products depend on.

    Attributes:
        layers: Number of blocks.
        hidden: Width of the hidden states.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Width of one head.
        mlp_width: Inner width of the MLP; of experts, of all that compute one token together.
        gated: Whether the MLP has a gate, and so three matrices instead of two.
        vocabulary: Rows of the embedding, padding included.
        tied: Whether the head uses the embedding's weight.
        idle_parameters: Elements of experts that one token is not computed with, over all blocks.
        expert_parameters: Elements of all experts, over all blocks.
        experts_per_token: Number of experts per token and block, as the mean over all blocks.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    gated: bool
    vocabulary: int
    tied: bool = False
    idle_parameters: int = 0
    expert_parameters: int = 0
    experts_per_token: float = 0.0

    @property
    def mlp_matrices(self) -> int:
        """Number of matrices of the MLP."""
        return 3 if self.gated else 2

    @property
    def block_parameters(self) -> int:
        """Elements of the matrices of one block that a token is computed with."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + self.mlp_matrices * self.hidden * self.mlp_width

    @property
    def parameters(self) -> int:
        """Elements of all matrices."""
        tables = 1 if self.tied else 2
        active = self.layers * self.block_parameters + tables * self.vocabulary * self.hidden
        return active + self.idle_parameters


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """How a network is trained: degrees, batch, precision, and what is recomputed or overlapped.

    Attributes:
        sequence: Tokens of a sample.
        micro_batch: Samples of a micro batch.
        micro_batches: Micro batches of one data-parallel rank in a step.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        cp: Context-parallel ranks.
        dp: Data-parallel ranks.
        ep: Expert parallel degree.
        schedule: Value of `pipeline_schedule`.
        chunks: Ranges of layers that a stage holds.
        zero_stage: ZeRO stage, 0 to 3.
        keeps_gathered: With ZeRO 3: weights are gathered once a step and kept, not gathered for each pass.
        copies: Size of the groups of data ranks with a second copy of the weights (`zero_hpz_partition_size`), from
            which all passes except the first forward pass of a step gather weights; 1 for none.
        weight_bytes: Bytes per element of gathered weights.
        recompute: What the backward pass repeats.
        fp8: Products of the blocks run in fp8.
        gradient_bytes: Bytes of a gradient's element when it is reduced.
        fused: Elementwise work runs in fused kernels (compiled blocks, or Megatron-LM's own kernels).
        flash: Attention runs in one kernel that keeps no scores.
        sequence_parallel: Norms and residuals are divided over tensor ranks.
        overlaps_tensor: Collectives of tensor ranks run during products (async TP).
        overlaps_gradients: Gradients are reduced during the backward pass.
        context: Kind of context parallelism: keys and values in a ring, overlapped with attention; keys and values
            gathered before attention (`all_gather`); or an exchange of tokens for heads (`ulysses`).
        host_states: Whether optimizer states are in main memory, where the host updates them.
        host_weights: Whether weights are in main memory between uses.
        balanced_context: Each context rank holds an early and a late part of a sample, so that all attend to as many
            tokens. Otherwise the last rank attends to the most, and the others wait for it.
        blocking_handoff: A rank waits while it sends to the next stage (gpt-neox). Otherwise it computes.
        divided_handoff: Each tensor rank sends its share of the hidden states. Otherwise each sends all.
        network: Network bandwidth of one GPU in GB/s where it is not the GPU's usual one; 0 for that.
    """

    sequence: int
    micro_batch: int
    micro_batches: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    zero_stage: int = 0
    keeps_gathered: bool = False
    copies: int = 1
    weight_bytes: int = 2
    recompute: Recompute = "none"
    fp8: bool = False
    gradient_bytes: int = 2
    fused: bool = True
    flash: bool = True
    sequence_parallel: bool = False
    overlaps_tensor: bool = False
    overlaps_gradients: bool = True
    context: Literal["ring", "all_gather", "ulysses"] = "ring"
    host_states: bool = False
    host_weights: bool = False
    balanced_context: bool = True
    blocking_handoff: bool = False
    divided_handoff: bool = True
    network: float = 0.0

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.sequence * self.micro_batch * self.micro_batches * self.dp
