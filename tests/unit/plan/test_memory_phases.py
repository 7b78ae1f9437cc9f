"""What is held for a time: head and loss, the update's copies, buffers of reductions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neox.config.sections.optimizer_table import PIECE
from neox.model.cross_entropy import CHUNK_ELEMENTS
from neox.plan.fit import host_device, memory_on
from neox.plan.memory.activations import _CPU_LOSS_CHUNK, _LOSS_CHUNK
from neox.plan.memory.estimate import reduction_bytes, stage_memory, state_bytes, step_bytes
from neox.plan.memory.setting import memory_setting
from tests.plans import SIZES, plan_of, small_plan

BF16 = {"bf16": {"enabled": True}}


def setting_of(plan, **changes):
    return replace(memory_setting(plan.config, plan.grid, plan.batch, plan.precision, plan.attention), **changes)


def test_chunks_are_the_heads():
    assert (CHUNK_ELEMENTS["cuda"], CHUNK_ELEMENTS["cpu"]) == (_LOSS_CHUNK, _CPU_LOSS_CHUNK)


def test_whole_logits_are_never_held():
    """A vocabulary beside which the rest is small: the estimate does not grow with tokens x vocabulary."""
    plan = plan_of(
        1,
        50_000,
        **{
            **SIZES,
            **BF16,
            "zero_optimization": {"stage": 1},
            "seq_length": 2048,
            "attention_config": [[["flash"], "all"]],
        },
    )
    small, large = (
        stage_memory(plan.layers, plan.stages[0], setting_of(plan, micro=micro)).activations for micro in (8, 64)
    )
    assert large - small < 56 * 2048 * plan.padded_vocab_size
    weight = plan.padded_vocab_size * 64
    assert small > (4 + 2) * weight  # the head's gradient in fp32, then in bf16


@pytest.mark.parametrize(
    ("keys", "per_parameter"),
    [
        ({**BF16, "zero_optimization": {"stage": 1}}, 2 + 4 + 12),
        ({**BF16, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True, "immediate_grad_update": False}}, 20),
        ({**BF16, "pipe_parallel_size": 2}, 2 + 2 + 12),
        (BF16, 2 + 2 + 12),
        ({}, 16),
    ],
)
def test_bytes_of_a_parameter(keys, per_parameter):
    plan = small_plan(2 if "pipe_parallel_size" in keys else 1, **keys)
    assert sum(state_bytes(1000, setting_of(plan), 8)) == 1000 * per_parameter


def test_the_update_needs_gradients_in_fp32():
    plan = small_plan(2, fp16={"enabled": True}, zero_optimization={"stage": 1})
    assert step_bytes(1000, setting_of(plan, zero=2)) == (4 + 2) * 500
    assert step_bytes(1000, setting_of(plan)) == (4 + 2) * 500 - 2 * 500  # the other rank's part is released
    assert step_bytes(1000, setting_of(plan, zero=0)) == 4000
    assert step_bytes(1000, setting_of(plan, zero=3, sub_group=100)) == 400
    assert step_bytes(1000, setting_of(plan, precision="bf16", zero=1, fp32_gradients=True)) == 0


def test_the_update_needs_the_optimizers_temporary_tensors():
    """Of what a rank updates at once; two for MADGRAD."""
    plan = small_plan(2, fp16={"enabled": True}, optimizer={"type": "madgrad_wd"}, zero_optimization={"stage": 1})
    assert step_bytes(1000, setting_of(plan, precision="fp32", zero=0)) == 8 * 1000
    assert step_bytes(10**9, setting_of(plan, precision="fp32", zero=0)) == 8 * PIECE
    assert step_bytes(1000, setting_of(plan, zero=0)) == (4 + 8) * 1000
    assert step_bytes(1000, setting_of(plan, zero=2)) == (4 + 8) * 500
    assert step_bytes(1000, setting_of(plan, zero=3, sub_group=100)) == (4 + 8) * 100
    assert step_bytes(1000, setting_of(plan, precision="bf16", zero=1, fp32_gradients=True)) == 8 * 500


def test_the_engines_reduction_joins_gradients_and_converts_them():
    half = {"precision": "bf16", "communicated": 2}
    setting = setting_of(small_plan(2), precision="fp32", communicated=4)
    assert reduction_bytes(1000, setting) == 4 * 1000
    assert reduction_bytes(10**9, setting) == 4 * 500_000_000  # one bucket
    assert reduction_bytes(1000, replace(setting, zero=1)) == 0  # by ZeRO, in its buckets
    assert reduction_bytes(1000, replace(setting, dp_size=1)) == 0
    assert reduction_bytes(1000, replace(setting, **half)) == 2 * 1000
    accumulated = replace(setting, **half, zero=1, fp32_gradients=True)
    assert reduction_bytes(1000, accumulated) == (4 + 2) * 1000
    assert reduction_bytes(1000, replace(accumulated, communicated=4)) == 4 * 1000
    assert reduction_bytes(1000, replace(accumulated, offload=1)) == 0


def test_zero_2_holds_the_sum_of_gradients_beside_those_of_a_backward_pass():
    plan = plan_of(2, **{**SIZES, "train_micro_batch_size_per_gpu": 64}, zero_optimization={"stage": 2})
    one, two = (
        stage_memory(plan.layers, plan.stages[0], setting_of(plan, accumulation=n, fp32_gradients=False)).total
        for n in (1, 2)
    )
    size = setting_of(plan).bytes_per_number
    assert two - one == size * plan.layers.numel // 2


def test_zero_3_keeps_weights_that_are_used_again_soon():
    held = {}
    for live, reuse in ((1, 1), (1, None), (None, 1)):
        keys = {"stage": 3, "stage3_max_live_parameters": live, "stage3_max_reuse_distance": reuse}
        zero = {key: value for key, value in keys.items() if value is not None}
        held[live, reuse] = small_plan(2, zero_optimization=zero).memory.activations
    assert held[1, 1] < held[1, None] == held[None, 1]


def test_offloaded_weights_come_to_a_lone_gpu():
    """One rank gathers nothing, but copies what is in main memory; a CPU uses it where it is."""
    cpu = {"device": "cpu"}
    zero = {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    plan = small_plan(zero_optimization=zero, precision="bf16")
    resident = small_plan(zero_optimization={**zero, "offload_param": None}, precision="bf16")
    assert plan.memory.activations - resident.memory.activations == 2 * plan.layers.numel
    here = host_device(plan, [0], "here", None, training=True)
    assert memory_on(plan, here).activations == memory_on(resident, here).activations


def test_what_is_in_files_leaves_main_memory():
    """But for the states of one sub-group, and gradients as they are accumulated."""
    cpu, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}
    zero = {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu, "sub_group_size": 100}
    in_memory, states, everything = (
        small_plan(2, zero_optimization={**zero, **blocks}, precision="bf16")
        for blocks in ({}, {"offload_optimizer": nvme}, {"offload_optimizer": nvme, "offload_param": nvme})
    )
    count = in_memory.layers.numel // 2
    assert (in_memory.memory.files, states.memory.files, everything.memory.files) == (0, 16 * count, 18 * count)
    assert in_memory.memory.host == (16 + 4 + 2) * count
    assert states.memory.host == (4 + 2) * count + 16 * 100
    assert everything.memory.host == 4 * count + 16 * 100
    assert in_memory.memory.total == everything.memory.total
    assert everything.deepspeed["zero_optimization"]["offload_param"]["device"] == "cpu", "files are ours"


def test_overlapped_reductions_have_two_buffers():
    keys = {"fp16": {"enabled": True}}
    plain, overlapped = (
        small_plan(2, **keys, zero_optimization={"stage": 2, "reduce_bucket_size": 1000, "overlap_comm": on})
        for on in (False, True)
    )
    assert overlapped.memory.gradients - plain.memory.gradients == 2 * 1000
