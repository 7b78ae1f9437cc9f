"""What DeepSpeed computes without the corrections of `neox.engine.deepspeed_patches`.

A test that fails shows that DeepSpeed has become right: the correction can go then.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import pytest
import torch.nn.functional as F

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
BF16 = {"bf16": {"enabled": True}}
OFFLOAD = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}

CLIP = 0.1
PLANS = {
    "fp16": {**FP16},
    "stages": {"pp": 2, "no_weight_tying": True, "gradient_clipping": CLIP},
    "tensor ranks": {"mp": 2, **BF16},
    "tied": {"pp": 2, **BF16, **OFFLOAD},
}


class Answer(NamedTuple):
    """What one rank sees of a run of two steps.

    Attributes:
        norm: Norm of the model's gradient in the first step.
        deepspeeds_norm: What DeepSpeed takes for that norm; None if it keeps it for itself.
        given: Norm of this rank's gradients as the optimizer gets them, in the first step.
        embedding: Sum of the embedding's weights in the end.
    """

    norm: float
    deepspeeds_norm: float | None
    given: float
    embedding: float


def with_and_without(plans):
    """On this rank: answers of each plan with the corrections, and without."""
    from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

    corrected = [_run(plan) for plan in plans]
    engine = _start(plans[0])[0]
    assert not is_zero_supported_optimizer(engine.optimizer), "ZeRO knows its own optimizers only"
    _remove_corrections()
    return corrected, [_run(plan) for plan in plans]


def _remove_corrections():
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine as Original

    from neox.engine import build_engine
    from neox.engine.deepspeed_patches import PipelineEngine, PlainEngine, engines

    def backward(self, scores, *args, **kwargs):
        return DeepSpeedEngine.backward(self, scores[0], *args, **kwargs)

    def deepspeeds_json(plan, original=build_engine.runtime_json):
        return {**original(plan), "gradient_clipping": plan.deepspeed["gradient_clipping"]}

    PlainEngine.backward = backward
    engines.UnfusedOptimizer = FP16_UnfusedOptimizer
    tied = {schedule.ReduceTiedGrads: Original._INSTRUCTION_MAP[schedule.ReduceTiedGrads]}
    PipelineEngine._INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, **tied}
    build_engine.runtime_json = deepspeeds_json
    build_engine.clips_itself = lambda plan: False


def _start(plan):
    from neox.engine import initialize_distributed, initialize_engine

    grid, device = initialize_distributed(plan)
    return initialize_engine(plan, grid, device), grid


def _run(plan):
    from neox.engine.weights import weight_layers

    engine, grid = _start(plan)
    given = []

    def observe(optimizer, *_):
        gradients = [p.grad.float() for group in optimizer.param_groups for p in group["params"]]
        given.append(math.sqrt(sum(gradient.square().sum().item() for gradient in gradients)))

    engine.optimizer.register_step_pre_hook(observe)
    data = batches(plan, grid.dp_rank)
    norm = engine.train_batch(data).grad_norm
    deepspeeds_norm = engine.deepspeed_engine.get_global_grad_norm()
    engine.train_batch(data)
    weights = dict(weight_layers(engine.deepspeed_engine.module)).get(0)
    embedding = weights.word_embeddings.weight.detach().float().sum().item() if weights is not None else math.nan
    return Answer(norm, None if deepspeeds_norm is None else float(deepspeeds_norm), given[0], embedding)


def weights_on_their_way(plan):
    """On this rank: how many weights are on their way after an evaluation, with our `forward` and with DeepSpeed's.

    And whether `F.linear` is torch's, with ZeRO 3 and with the engine that follows.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    from neox.engine.deepspeed_patches import PlainEngine

    counts, linear = [], F.linear
    for forward in (PlainEngine.forward, DeepSpeedEngine.forward):
        PlainEngine.forward = forward
        engine, grid = _start(plan)
        data = batches(plan, grid.dp_rank)
        for _ in range(2):
            engine.train_batch(data)
            engine.eval_batch(data)
        states = [parameter.ds_status for parameter in engine.deepspeed_engine.module.parameters()]
        counts.append(states.count(ZeroParamStatus.INFLIGHT))
    with_zero_3 = F.linear is linear
    _start(tiny_plan(2, num_layers=2))
    return counts, (with_zero_3, F.linear is linear)


def test_an_evaluation_leaves_weights_on_their_way():
    """A save after it, or an evaluated average of weights, would read them while they are empty."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    plan = tiny_plan(2, num_layers=2, mtp_num_layers=1, zero_optimization=zero)
    ((ours, deepspeeds), (with_zero_3, afterwards)), _ = run_ranks(2, weights_on_their_way, plan)
    assert ours == 0
    assert deepspeeds > 0
    assert not with_zero_3
    assert afterwards


@functools.cache
def answers():
    return run_ranks(2, with_and_without, [tiny_plan(2, **keys) for keys in PLANS.values()], timeout=200)


def of_plan(name):
    """Answers of both ranks, with the corrections and without."""
    number = list(PLANS).index(name)
    return [rank[0][number] for rank in answers()], [rank[1][number] for rank in answers()]


def test_the_fp16_wrapper_divides_by_a_scale_that_the_loss_was_not_multiplied_with():
    right, wrong = (ranks[0].given for ranks in of_plan("fp16"))
    assert wrong == pytest.approx(right / 256, rel=0.05)


def test_the_norm_of_fp32_leaves_out_parameters_of_later_stages():
    corrected, deepspeeds = of_plan("stages")
    assert math.hypot(*(rank.given for rank in corrected)) == pytest.approx(corrected[0].norm, rel=1e-5)
    assert corrected[0].norm > 2 * CLIP
    clipped = math.hypot(*(rank.given for rank in deepspeeds))
    assert clipped > 1.001 * CLIP


def test_the_norm_of_bf16_leaves_out_parts_of_later_tensor_ranks():
    corrected, deepspeeds = of_plan("tensor ranks")
    assert deepspeeds[0].deepspeeds_norm < 0.99 * corrected[0].norm


def test_copies_of_tied_weights_drift_apart():
    corrected, deepspeeds = of_plan("tied")
    assert corrected[0].embedding == corrected[1].embedding
    assert deepspeeds[0].embedding != deepspeeds[1].embedding
