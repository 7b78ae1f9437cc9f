"""Process groups, layers split over tensor ranks, and random streams."""

from neox.parallel.adapter import LowRankAdapter
from neox.parallel.collectives import (
    copy_to_tensor_ranks,
    copy_tokens_to_tensor_ranks,
    gather_last_dim,
    gather_tensor_ranks,
    gather_tokens,
    reduce_over_tensor_ranks,
    reduce_scatter_last_dim,
    reduce_scatter_tokens,
    scatter_last_dim,
    scatter_tokens,
)
from neox.parallel.context_ranks import (
    context_indices,
    context_ranges,
    heads_to_tokens,
    join_context,
    own_context,
    sum_over_context_ranks,
    tokens_to_heads,
    total_of_context_ranks,
)
from neox.parallel.context_regather import gathered_context
from neox.parallel.expert_exchange import (
    Exchange,
    first_own_element,
    gather_experts,
    holds_divided_experts,
    mark_divided_experts,
    own_experts,
)
from neox.parallel.grid import ParallelGrid
from neox.parallel.kept_inputs import KeptInputs
from neox.parallel.layers import (
    ColumnParallelLinear,
    Multiply,
    RowParallelLinear,
    Summand,
    TensorOptions,
    VocabParallelEmbedding,
    mark_decay,
    mark_group,
    mark_hidden,
    mark_lr_factor,
    mark_split,
    shard,
    shard_size,
)
from neox.parallel.rng import RNGTracker, derive_seed, recomputed
from neox.parallel.token_shares import TokenShares, divide_tokens
from neox.plan.ranks.topology import Topology

__all__ = [
    "ColumnParallelLinear",
    "Exchange",
    "KeptInputs",
    "LowRankAdapter",
    "Multiply",
    "ParallelGrid",
    "RNGTracker",
    "RowParallelLinear",
    "Summand",
    "TensorOptions",
    "TokenShares",
    "Topology",
    "VocabParallelEmbedding",
    "context_indices",
    "context_ranges",
    "copy_to_tensor_ranks",
    "copy_tokens_to_tensor_ranks",
    "derive_seed",
    "divide_tokens",
    "first_own_element",
    "gather_experts",
    "gather_last_dim",
    "gather_tensor_ranks",
    "gather_tokens",
    "gathered_context",
    "heads_to_tokens",
    "holds_divided_experts",
    "join_context",
    "mark_decay",
    "mark_divided_experts",
    "mark_group",
    "mark_hidden",
    "mark_lr_factor",
    "mark_split",
    "own_context",
    "own_experts",
    "reduce_over_tensor_ranks",
    "recomputed",
    "reduce_scatter_last_dim",
    "reduce_scatter_tokens",
    "sum_over_context_ranks",
    "tokens_to_heads",
    "total_of_context_ranks",
    "scatter_last_dim",
    "scatter_tokens",
    "shard",
    "shard_size",
]
