"""How often a step makes the host wait for the device: counted on a CPU at the operations that would wait on a GPU."""

from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

READS = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy}
SCALARS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class Scalars(TorchDispatchMode):
    """Counts operations whose results the host needs: item, bool, float, if and indexing by a mask."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += func in SCALARS
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Counts copies of whole tensors to the host."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += func in READS
        return func(*args, **(kwargs or {}))


def waits(plans):
    """On this rank, of each plan: the waits of one step, after some that warm up."""
    return [_waits(plan) for plan in plans]


def _waits(plan):
    from deepspeed.accelerator import get_accelerator

    from neox.engine import initialize_distributed, initialize_engine

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    data = batches(plan, grid.dp_rank)
    for _ in range(3):  # DeepSpeed's timers begin to wait at the third step
        engine.train_batch(data)
    counts = Counter()
    get_accelerator().synchronize = lambda *_: counts.update(["synchronize"])
    with Scalars(counts), Copies(counts):
        result = engine.train_batch(data)
    assert result.loss > 0
    assert result.grad_norm > 0
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_waits_once(precision):
    """For the norm, which protects the weights. A step with more micro batches does not wait more often."""
    stage = 0 if precision == "fp32" else 1
    plans = [tiny_plan(1, zero=stage, precision=precision, train_batch_size=size) for size in (1, 4)]
    for counts in run_ranks(1, waits, plans)[0]:
        assert sum(counts.values()) == 1, counts


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_stages_wait_once(zero):
    plans = [tiny_plan(2, pp=2, zero=zero, precision="bf16", train_batch_size=size) for size in (2, 4)]
    for rank in run_ranks(2, waits, plans):
        for counts in rank:
            assert sum(counts.values()) == 1, counts


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "zero"), [("bf16", 0), ("bf16", 2), ("fp16", 0), ("fp16", 1), ("fp32", 3)])
def test_no_micro_batch_waits(precision, zero):
    """Where DeepSpeed's own wrappers wait, they do so between the last backward pass and the update."""
    keys = {"zero": zero, "precision": precision} | (
        {"fp16": {"initial_scale_power": 8}} if precision == "fp16" else {}
    )
    plans = [tiny_plan(2, **keys, train_batch_size=size) for size in (2, 8)]  # no step is skipped
    for rank in run_ranks(2, waits, plans):
        one, four = rank
        assert one == four
        assert sum(one.values()) <= 12, one
