"""Tokens that travel between the ranks that divide experts, and rows that may gather on one of them."""

from __future__ import annotations

from typing import NamedTuple

from neox.architecture import BLOCK_OFFSET
from neox.plan.run_plan import RunPlan


class ExpertTraffic(NamedTuple):
    """What one rank exchanges and keeps for experts that ranks divide, if experts have equal shares of the tokens.

    Attributes:
        exchanges: All-to-alls of one step that move tokens or their gradients.
        sent_bytes: Bytes that a rank sends to others in these.
        rows: Choices of experts by the tokens of one micro batch, and so the rows of a rank's experts in a block.
        most_rows: Rows if all tokens of all ranks choose experts of one rank.
    """

    exchanges: int
    sent_bytes: int
    rows: int
    most_rows: int


def expert_traffic(plan: RunPlan) -> ExpertTraffic | None:
    """Return the traffic of the stage with the most blocks with experts; None if ranks do not divide experts."""
    setting = plan.memory_setting
    network = plan.architecture
    if setting.ep_size == 1:
        return None
    with_experts = frozenset(network.expert_blocks)
    blocks = 0
    for stage in plan.stages:
        held = [layer.index - BLOCK_OFFSET for layer in stage.entries(plan.layers) if layer.kind == "block"]
        blocks = max(blocks, len(with_experts.intersection(held)))
    passes = 2  # forward and backward, in each of which rows travel to their experts and back
    if setting.recompute_chunk and setting.recomputed_part == "full":
        passes += 1
    exchanges = 2 * passes * blocks * setting.accumulation_steps
    rows = setting.tokens * network.experts_per_token
    row_bytes = network.hidden_size * setting.bytes_per_number
    sent = rows * row_bytes * (setting.ep_size - 1) // setting.ep_size
    here = network.num_experts // setting.ep_size
    most = setting.ep_size * setting.tokens * min(network.experts_per_token, here)
    return ExpertTraffic(exchanges, exchanges * sent, rows, most)
