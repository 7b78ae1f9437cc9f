"""Memory of blocks that are no plain attention."""

from __future__ import annotations

from tests.plans import small_plan


def test_gates_and_masks_take_memory() -> None:
    plain = small_plan().memory.activations
    assert small_plan(attention_config=["gmlp", "global"]).memory.activations > plain
    amlp, gmlp = (small_plan(attention_config=[kind, kind]).memory.activations for kind in ("amlp", "gmlp"))
    assert amlp > gmlp
    flash = small_plan(attention_config=["flash", "flash"]).memory.activations
    assert small_plan(attention_config=["local", "local"], sparsity_config={"block": 2}).memory.activations > flash
