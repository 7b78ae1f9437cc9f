"""Memory of blocks that are no plain attention."""

from __future__ import annotations

from tests.plans import small_plan


def test_gates_and_masks_take_memory() -> None:
    plain = small_plan().memory.activations
    assert small_plan(attention_config=["gmlp", "global"]).memory.activations > plain
    amlp, gmlp = (small_plan(attention_config=[kind, kind]).memory.activations for kind in ("amlp", "gmlp"))
    assert amlp > gmlp


def test_only_kernels_without_blocks_of_pairs_take_a_mask_of_all_pairs() -> None:
    blocks = {"attention_config": ["local", "local"], "sparsity_config": {"block": 2}}
    dropping = {"attention_dropout": 0.1}
    flash = small_plan(attention_config=["flash", "flash"]).memory.activations
    assert small_plan(**blocks).memory.activations == flash
    window = {"attention_config": ["flash", "flash"], "sliding_window_width": 4}
    assert small_plan(**window).memory.activations == flash
    dropped = small_plan(attention_config=["flash", "flash"], **dropping).memory.activations
    assert small_plan(**window, **dropping).memory.activations > dropped
    assert small_plan(**blocks, **dropping).memory.activations > small_plan(**window, **dropping).memory.activations
