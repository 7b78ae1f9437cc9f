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
    setting = plan.memory_setting
    network = plan.architecture
    if setting.ep_size == 1:
        return None
    with_experts = frozenset(network.expert_blocks)
    blocks = 0
    for stage in plan.stages:
        held = [layer.index - BLOCK_OFFSET for layer in stage.entries(plan.layers) if layer.kind == "block"]
        blocks = max(blocks, len(with_experts.intersection(held)))
    passes = 2  # forward and backward; each dispatches rows to their experts and combines the results
    if setting.recompute_chunk and setting.recomputed_part == "full":
        passes += 1
    exchanges = 2 * passes * blocks * setting.accumulation_steps
    rows = setting.tokens * network.experts_per_token
    row_bytes = network.hidden_size * setting.bytes_per_number
    sent = rows * row_bytes * (setting.ep_size - 1) // setting.ep_size
    here = network.num_experts // setting.ep_size
    most = setting.ep_size * setting.tokens * min(network.experts_per_token, here)
    return ExpertTraffic(exchanges, exchanges * sent, rows, most)
