"""Communication of expert parallelism, and the number of tokens that may accumulate on one rank."""

from __future__ import annotations

from typing import NamedTuple

from neox.architecture import BLOCK_OFFSET
from neox.plan.run_plan import RunPlan


class ExpertTraffic(NamedTuple):
    """Communication of one rank with expert parallelism, if tokens are spread evenly over experts.

    Attributes:
        exchanges: Number of all-to-alls per step that move tokens or their gradients.
        sent_bytes: Bytes that a rank sends to others in all of them.
        rows: Number of token rows that the experts of a rank compute per block and micro batch.
        most_rows: The same if all tokens of all ranks are routed to experts of one rank.
    """

    exchanges: int
    sent_bytes: int
    rows: int
    most_rows: int


def expert_traffic(plan: RunPlan) -> ExpertTraffic | None:
    """Return the communication of the stage with the most expert blocks; None without expert parallelism."""
    run = plan.workload
    network = plan.architecture
    if run.layout.ep_size == 1:
        return None
    with_experts = frozenset(network.expert_blocks)
    blocks = 0
    for stage in plan.stages:
        held = 0
        for layer in stage.entries(plan.layers):
            if layer.kind == "block":
                held += layer.index - BLOCK_OFFSET in with_experts
            elif layer.kind == "multi_token":  # its block is like the last one
                held += network.num_layers - 1 in with_experts
        blocks = max(blocks, held)
    passes = 2  # forward and backward; each dispatches rows to their experts and combines the results
    if run.recomputes_blocks:
        passes += 1
    exchanges = 2 * passes * blocks * run.layout.accumulation_steps
    rows = run.tokens * network.experts_per_token
    row_bytes = network.hidden_size * run.bytes_per_number
    sent = rows * row_bytes * (run.layout.ep_size - 1) // run.layout.ep_size
    here = network.num_experts // run.layout.ep_size
    most = run.layout.ep_size * run.tokens * min(network.experts_per_token, here)
    return ExpertTraffic(exchanges, exchanges * sent, rows, most)
