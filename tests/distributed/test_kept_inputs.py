"""Inputs of recomputed blocks that are divided over tensor ranks: the same training, with less kept."""

import torch

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import tiny_plan, train_curves


def curves_and_bytes(plans):
    from neox.engine import initialize_distributed
    from neox.parallel import KeptInputs

    curves = train_curves(plans, 3)
    grid, _ = initialize_distributed(plans[0])
    x = torch.randn(2, 3, 8)
    kept = KeptInputs(grid, divided=True)
    packed = kept.pack(x)
    assert torch.equal(kept.unpack(packed), x)
    return curves, packed[1].untyped_storage().nbytes(), x.untyped_storage().nbytes()


def test_divided_inputs_change_nothing_but_memory():
    shared = {"mp": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1, "checkpoint_activations": True}
    keys = [shared, {**shared, "partition_activations": True}]
    keys.append({**shared, "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}})
    for (whole, divided, on_cpu), part, all_bytes in run_ranks(2, curves_and_bytes, [tiny_plan(2, **k) for k in keys]):
        assert whole == divided == on_cpu
        assert 2 * part == all_bytes
