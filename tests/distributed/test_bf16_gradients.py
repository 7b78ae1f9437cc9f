"""Accumulation of bf16 gradients as soon as they are there: DeepSpeed's own numbers, with less memory."""

import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

LAYOUTS = {"two data ranks": {"zero": 1}, "two stages": {"pp": 2}, "two stages, ZeRO 1": {"pp": 2, "zero": 1}}


def runs(plans, deepspeeds_own=False):
    """Of each plan: loss and norm of each step, bytes of gradients after its backward passes, final weights."""
    return [_run(plan, deepspeeds_own) for plan in plans]


def _run(plan, deepspeeds_own):
    from neox.engine import initialize_distributed, initialize_engine

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    wrapper = engine.deepspeed_engine.optimizer
    if deepspeeds_own:
        wrapper.__class__ = BF16_Optimizer
    kept = []
    parameters = list(engine.deepspeed_engine.module.parameters())
    engine.optimizer.register_step_pre_hook(
        lambda *_: kept.append(sum(p.grad.numel() * p.grad.element_size() for p in parameters if p.grad is not None))
    )
    data = batches(plan, grid.dp_rank)
    curve = [(r.loss, r.grad_norm) for r in (engine.train_batch(data) for _ in range(4))]
    return curve, kept, [p.detach().float().numpy().copy() for p in parameters]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if "stages," in name else pytest.mark.slow) for name in LAYOUTS]
)
def test_curves_are_deepspeeds(layout):
    keys = {**LAYOUTS[layout], "train_batch_size": 4, "gradient_clipping": 0.5}
    plans = [tiny_plan(2, **keys, bf16={"enabled": True, "immediate_grad_update": on}) for on in (True, False)]
    ours = run_ranks(2, runs, plans)
    deepspeeds = run_ranks(2, runs, plans[1:], True)
    for (immediate, late), (original,) in zip(ours, deepspeeds, strict=True):
        # With ZeRO 0 gradients are accumulated in bf16, and DeepSpeed rounds the clipping factor to it.
        bound = 0 if keys.get("zero") else 2e-3
        for curve, _, weights in (immediate, late):
            torch.testing.assert_close(torch.tensor(curve), torch.tensor(original[0]), rtol=bound, atol=0)
            for mine, theirs in zip(weights, original[2], strict=True) if bound == 0 else ():
                assert (mine == theirs).all()
        assert immediate[0] == late[0]
        assert set(immediate[1]) == {0}
        assert min(late[1]) > 0
        assert any(norm > 0.5 for _, norm in original[0])  # some steps were clipped


NETWORKS = {
    "untied": {"no_weight_tying": True},
    "tied": {"no_weight_tying": False},
    "recomputed": {"checkpoint_activations": True, "checkpoint_num_layers": 1},
    "adapters": {"lora": {"r": 4, "alpha": 8, "target": ["query_key_value", "dense"]}},
    "experts of all ranks": {"moe_num_experts": 4, "moe_top_k": 2, "moe_ffn_hidden_size": 24},
    "divided experts": {"moe_num_experts": 4, "moe_top_k": 2, "expert_model_parallel_size": 2},
    "sent in fp32": {"communication_data_type": "fp32"},
}


def overlapped(plans):
    """Of each plan: (loss, norm) of each step, and the events of the last one: gradients that arrive, ranges."""
    from neox.engine.deepspeed_patches.range_reduction import LayerReduction, RangeReduction

    events = []
    start, arrived = RangeReduction.start, LayerReduction.gradient_arrived

    def recorded_start(reduction, chunk):
        events.append(chunk)
        start(reduction, chunk)

    def recorded_arrival(reduction, parameter):
        events.append("gradient")
        arrived(reduction, parameter)

    RangeReduction.start = recorded_start  # this process ends with the test
    LayerReduction.gradient_arrived = recorded_arrival
    return [_overlapped(plan, events) for plan in plans]


def _overlapped(plan, events):
    from neox.engine import initialize_distributed, initialize_engine

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    data = batches(plan, grid.dp_rank)
    curve = []
    for _ in range(3):
        events.clear()
        result = engine.train_batch(data)
        curve.append((result.loss, result.grad_norm))
    return curve, list(events)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ["tied"]),
        pytest.param(2, list(NETWORKS), marks=pytest.mark.slow),
        pytest.param(4, list(NETWORKS), marks=pytest.mark.slow),
    ],
)
def test_reduction_begins_before_the_backward_pass_ends(ranks, names):
    """Which changes no number, but that sums of more than two ranks are in another order."""
    keys = {"train_batch_size": 2 * ranks, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    plans = []
    for network in map(NETWORKS.get, names):
        for overlap in (True, False):
            zero = {"stage": 1, "overlap_comm": overlap, "reduce_bucket_size": 1}
            plans.append(tiny_plan(ranks, **keys, **network, zero_optimization=zero))
    for rank in run_ranks(ranks, overlapped, plans):
        for name, (during, events), (after, none) in zip(names, rank[::2], rank[1::2], strict=True):
            assert none == [], name
            begun = [event for event in events if event != "gradient"]
            assert begun == sorted(begun), name
            assert len(begun) > 3, name
            last_gradient = max(place for place, event in enumerate(events) if event == "gradient")
            during_backward = [event for event in events[:last_gradient] if event != "gradient"]
            assert len(during_backward) >= len(begun) - 1, (name, events)
            assert events.index(0) > events.count("gradient") / 2, name  # not in the first micro batch
            bound = 0 if ranks == 2 else 2e-3
            torch.testing.assert_close(torch.tensor(during), torch.tensor(after), rtol=bound, atol=0, msg=name)


@pytest.mark.slow
def test_four_ranks_train_as_one_with_sums_in_fp32():
    """The same micro batches; gradients of a step are added up in fp32 in another order, while layers are reduced."""
    keys = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    keys |= {"communication_data_type": "fp32", "zero_optimization": {"stage": 1, "reduce_bucket_size": 1}}
    for network in map(NETWORKS.get, ("tied", "untied", "adapters")):
        (alone, _), *_ = run_ranks(1, overlapped, [tiny_plan(1, **keys, **network)])[0]
        for ((together, events),) in run_ranks(4, overlapped, [tiny_plan(4, **keys, **network)]):
            assert "gradient" in events
            torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=1e-5, atol=0)
