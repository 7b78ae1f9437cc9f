"""Memory of weights, gradients and states: how it changes with ranks, ZeRO stages, buffers and offload."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from neox.architecture import LOSS_CHUNK
from neox.config.sections.optimizer_kind import PIECE
from neox.errors import ConfigError
from neox.plan import format_plan
from neox.plan.devices.device import host_device, memory_on
from neox.plan.memory import stage_memory
from neox.plan.memory.activations import ActivationMemory
from neox.plan.memory.checkpoint_size import checkpoint_bytes
from neox.plan.memory.parameters import count_parameters
from neox.plan.memory.zero import Bf16Optimizer, Unsharded, Zero1, Zero2, Zero3, sharding_of
from tests.plans import SIZES, plan_of, small_plan

BF16 = {"precision": "bf16"}
BF16_STATES = {**BF16, "bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/nvme"}
# A small micro batch in a wide network, so that states and not activations are the most.
WIDE = {**SIZES, "hidden_size": 512, "train_micro_batch_size_per_gpu": 1}


def memory_of(plan, **changes):
    return stage_memory(plan.workload.with_layout(**changes), plan.stages[0])


def sharding(plan, **changes):
    run = plan.workload.with_layout(**changes)
    return sharding_of(run)(run, count_parameters(run, plan.stages[0]))


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({}, Unsharded),
        (BF16, Unsharded),
        ({**BF16, "pipe_parallel_size": 2}, Bf16Optimizer),
        ({**BF16, "zero_optimization": {"stage": 1}}, Bf16Optimizer),
        ({**BF16, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "bf16"}}, Zero1),
        ({**BF16, "zero_optimization": {"stage": 1, "offload_optimizer": CPU}}, Zero1),
        ({**BF16_STATES, "zero_optimization": {"stage": 1}}, Zero1),
        ({"zero_optimization": {"stage": 1}}, Zero1),
        ({**BF16, "zero_optimization": {"stage": 2}}, Zero2),
        ({**BF16, "zero_optimization": {"stage": 3}}, Zero3),
    ],
)
def test_the_kind_of_sharding_is_the_optimizer_that_deepspeed_chooses(keys, kind):
    assert sharding_of(small_plan(2, **keys).workload) is kind


@pytest.mark.parametrize(
    ("keys", "per_parameter"),
    [
        ({}, 4 + 4 + 8),
        (BF16, 2 + 2 + 4 + 8),
        ({**BF16, "pipe_parallel_size": 2}, 2 + 2 + 4 + 8),
        ({**BF16, "zero_optimization": {"stage": 1}}, 2 + 4 + 4 + 8),
        ({**BF16, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True, "immediate_grad_update": False}}, 20),
        *(({**BF16_STATES, "zero_optimization": {"stage": stage}}, 2 + 2 + 2 + 4) for stage in (1, 2, 3)),
    ],
)
def test_adam_takes_the_documented_bytes_per_parameter(keys, per_parameter):
    plan = small_plan(2 if "pipe_parallel_size" in keys else 1, **keys)
    held = sharding(plan)
    total = held.weights() + held.gradients() + held.optimizer_states()
    assert total == held.count.trained * per_parameter


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_each_zero_stage_needs_less(precision):
    totals = []
    for stage in range(4):
        held = sharding(plan_of(8, **WIDE, precision=precision, zero_optimization={"stage": stage}))
        totals.append(held.weights() + held.gradients() + held.optimizer_states())
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[1] > totals[2] > totals[3]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", [{}, {"offload_optimizer": CPU}])
def test_more_data_ranks_never_need_more(stage, offload):
    plan = plan_of(1, **WIDE, **BF16, zero_optimization={"stage": stage, **offload})
    memories = [memory_of(plan, dp_size=2**n) for n in range(1, 6)]
    for fewer, more in pairwise(memories):
        assert more.total <= fewer.total
        assert more.host <= fewer.host
    assert memories[-1].total + memories[-1].host < memories[0].total + memories[0].host


def test_data_ranks_hold_each_state_once():
    one = plan_of(1, **WIDE, **BF16, zero_optimization={"stage": 3})
    for ranks in (2, 4, 8):
        of_rank = memory_of(one, dp_size=ranks)
        assert of_rank.optimizer * ranks == one.memory.optimizer
        assert of_rank.weights * ranks == one.memory.weights


def test_bf16_stages_with_zero_0_need_less_than_with_zero_1():
    """Both divide states; ZeRO 0 accumulates in bf16."""
    keys = {**WIDE, **BF16, "pipe_parallel_size": 2}
    none, one = (sharding(plan_of(4, **keys, zero_optimization={"stage": stage})) for stage in (0, 1))
    assert none.optimizer_states() == one.optimizer_states()
    assert 2 * none.gradients() == one.gradients()


class TestUpdate:
    """What is needed while there are no activations."""

    def test_half_precision_gradients_are_converted(self):
        zero = {"zero_optimization": {"stage": 2}}
        half = sharding(plan_of(2, **WIDE, precision="fp16", **zero))
        full = sharding(plan_of(2, **WIDE, precision="fp32", **zero))
        assert half.update() > full.update() == 4 * half.shard

    def test_zero_1_releases_other_ranks_gradients_first(self):
        plan = plan_of(8, **WIDE, fp16={"enabled": True}, zero_optimization={"stage": 2})
        assert sharding(plan, zero_stage=1).update() < sharding(plan).update()

    def test_zero_3_updates_a_sub_group_at_once(self):
        of_size = {}
        for size in (1000, 10**9):
            zero = {"stage": 3, "sub_group_size": size}
            of_size[size] = sharding(plan_of(2, **WIDE, **BF16, zero_optimization=zero)).update()
        assert of_size[1000] < of_size[10**9]

    def test_temporary_tensors_are_no_larger_than_a_piece(self):
        plan = small_plan(optimizer={"type": "madgrad_wd"})
        held = sharding(plan)
        huge = type(held)(held.run, replace(held.count, trained=100 * PIECE))
        assert 0 < held.update() <= 8 * held.count.trained
        assert huge.update() == 8 * PIECE  # two tensors in fp32

    def test_the_host_updates_what_is_offloaded(self):
        for stage in (2, 3):
            zero = {"stage": stage, "offload_optimizer": CPU}
            assert sharding(plan_of(2, **WIDE, **BF16, zero_optimization=zero)).update() == 0


def test_second_copies_of_weights_take_memory_in_each_group() -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 2}
    plan = plan_of(8, **WIDE, **BF16, zero_optimization=zero)
    held = 2 * plan.layers.numel
    assert plan.memory.weights == held // 8 + held // 2
    assert plan.deepspeed["zero_optimization"]["zero_hpz_partition_size"] == 2
    fewer = memory_of(plan, hpz_size=4)
    assert fewer.weights == held // 8 + held // 4
    assert fewer.optimizer == plan.memory.optimizer


def test_groups_of_second_copies_divide_the_data_ranks() -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 4}
    with pytest.raises(ConfigError) as caught:
        plan_of(6, **WIDE, **BF16, zero_optimization=zero)
    assert [problem.keys[0] for problem in caught.value.problems] == ["zero_optimization.zero_hpz_partition_size"]


class TestReduction:
    """Buffers in which gradients are reduced."""

    def test_the_engine_reduces_only_if_zero_does_not(self):
        for keys, reduces in (
            ({}, True),
            ({**BF16, "zero_optimization": {"stage": 1, "overlap_comm": False}}, True),
            ({"zero_optimization": {"stage": 2}}, False),
            ({**BF16, "zero_optimization": {"stage": 3}}, False),
        ):
            held = sharding(small_plan(2, **keys))
            assert (held.reduction_after_passes() > 0) is reduces
            assert (held.reduction_buckets() > 0) is not reduces
            assert sharding(small_plan(1, **keys)).reduction_after_passes() == 0

    @pytest.mark.parametrize("tied", [False, True])
    def test_layers_are_reduced_in_turn_and_then_what_they_share(self, tied: bool):
        zero = {"stage": 1, "reduce_bucket_size": 1}
        plan = small_plan(2, **BF16, zero_optimization=zero, no_weight_tying=not tied)
        held = sharding(plan)
        shared = plan.layers.word_embeddings.shard_numel(1) if tied else 0
        assert held.reduction_after_passes() == (4 + 2) * shared
        blocks = plan.architecture.num_layers
        assert held.held_during_passes() == (4 + 2) * (held.count.trained // blocks)

    def test_zero_1_copies_its_shard_of_reduced_gradients(self):
        for overlaps in (False, True):
            zero = {"stage": 1, "overlap_comm": overlaps}
            held = sharding(small_plan(2, fp16={"enabled": True}, zero_optimization=zero))
            copied = [held.reduction_after_passes(), held.held_during_passes()]
            assert copied == [0, 2 * held.shard] if overlaps else [2 * held.shard, 0]
            host = sharding(plan_of(2, **WIDE, zero_optimization={**zero, "offload_optimizer": CPU}))
            assert host.reduction_after_passes() == host.held_during_passes() == 0

    def test_another_communicated_type_is_a_copy(self):
        plain = sharding(small_plan(2, **BF16))
        converted = sharding(small_plan(2, **BF16, fp32_allreduce=True))
        assert converted.reduction_after_passes() == 3 * plain.reduction_after_passes()  # 2 bytes, and 4 for the copy

    def test_overlapped_reductions_have_two_buffers(self):
        zero = {"stage": 2, "reduce_bucket_size": 1000}
        plain, overlapped = (
            small_plan(2, fp16={"enabled": True}, zero_optimization={**zero, "overlap_comm": on})
            for on in (False, True)
        )
        assert overlapped.memory.gradients - plain.memory.gradients == 2 * 1000

    def test_a_cpu_touches_only_what_it_uses_of_a_bucket(self):
        plan = small_plan(2, zero_optimization={"stage": 1})
        run = plan.workload_on("cpu")
        held = sharding_of(run)(run, count_parameters(run, plan.stages[0]))
        assert held.reduction_buckets() == 4 * plan.layers.numel
        assert sharding(plan).reduction_buckets() > 4 * plan.layers.numel


def test_whole_logits_are_never_held():
    """With a vocabulary next to which the rest is small, the estimate does not grow with tokens x vocabulary."""
    keys = {"zero_optimization": {"stage": 1}, "seq_length": 2048, "attention_config": [[["flash"], "all"]]}
    plan = plan_of(1, 50_000, **{**SIZES, **BF16, **keys})
    small, large = (memory_of(plan, micro_batch_size=samples).activations for samples in (8, 64))
    more_tokens = 56 * 2048
    assert large - small < more_tokens * plan.padded_vocab_size
    assert large > 2 * LOSS_CHUNK["accelerator"]


def peak_of(activations: int) -> ActivationMemory:
    return ActivationMemory(activations, 0, 0)


def test_zero_2_holds_the_sum_of_gradients_next_to_those_of_a_backward_pass():
    keys = {**SIZES, "train_micro_batch_size_per_gpu": 64, "zero_optimization": {"stage": 2}}
    one, two = (sharding(plan_of(2, **keys, gradient_accumulation_steps=n)) for n in (1, 2))
    assert one.held_during_passes() == 0
    assert two.held_during_passes() == two.gradients()
    assert two.passes(peak_of(1000)) == 1000 + two.gradients()


def test_bf16_gradients_are_held_until_they_are_added_to_fp32_sums():
    for ranks in (2, 8):
        held = sharding(plan_of(ranks, **WIDE, **BF16, zero_optimization={"stage": 2}))
        assert held.held_during_passes() == held.gradients() // 2
        assert held.update() == 0
        many = 10**12  # activations are released while the gradients come
        assert held.passes(peak_of(many)) == many
        few = ranks * held.shard
        assert held.passes(peak_of(few)) == few * (ranks - 1) // ranks + 2 * held.shard


def test_zero_3_keeps_weights_that_are_used_again_soon():
    held = {}
    for live, reuse in ((1, 1), (1, None), (None, 1)):
        keys = {"stage": 3, "stage3_max_live_parameters": live, "stage3_max_reuse_distance": reuse}
        zero = {key: value for key, value in keys.items() if value is not None}
        held[live, reuse] = small_plan(2, zero_optimization=zero).memory.activations
    assert held[1, 1] < held[1, None] == held[None, 1]


class TestOffload:
    """What leaves the device, and where it is then."""

    def test_weights_come_to_a_lone_gpu(self):
        """One rank gathers nothing, but copies what is in main memory; a CPU uses it where it is."""
        zero = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}
        plan = small_plan(zero_optimization=zero, precision="bf16")
        resident = small_plan(zero_optimization={**zero, "offload_param": None}, precision="bf16")
        assert plan.memory.activations - resident.memory.activations == 2 * plan.layers.numel
        here = host_device(plan, [0], "here", None, training=True)
        assert memory_on(plan, here).activations == memory_on(resident, here).activations

    def test_files_take_what_main_memory_held(self):
        """Apart from the states of one sub-group, and gradients as they are accumulated."""
        zero = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "sub_group_size": 100}
        in_memory, states, everything = (
            small_plan(2, zero_optimization={**zero, **blocks}, precision="bf16").memory
            for blocks in ({}, {"offload_optimizer": NVME}, {"offload_optimizer": NVME, "offload_param": NVME})
        )
        assert in_memory.files < states.files < everything.files
        assert in_memory.host > states.host > everything.host
        of_sub_group = 16 * 100
        for offloaded in (states, everything):
            assert offloaded.host + offloaded.files == in_memory.host + of_sub_group
            assert offloaded.total == in_memory.total


@pytest.mark.parametrize(("stage", "divisor"), [(0, 1), (1, 2), (2, 2), (3, 2)])
def test_an_average_of_weights_counts_where_it_is_kept(stage, divisor):
    def planned(**keys):
        return plan_of(2, **WIDE, zero_optimization={"stage": stage}, save="runs/x", async_save=True, **keys)

    without = planned()
    size = 4 * without.layers.numel // divisor
    here = planned(ema_decay=0.99)
    assert here.memory.optimizer - without.memory.optimizer == size
    assert here.memory.copies - without.memory.copies == size
    on_host = planned(ema_decay=0.99, ema_device="cpu")
    assert on_host.memory.optimizer == without.memory.optimizer
    assert on_host.memory.host - without.memory.host == size
    assert checkpoint_bytes(here) - checkpoint_bytes(without) == 4 * without.layers.numel
    assert any(line.startswith("average ") and "0.99" in line for line in format_plan(here).splitlines())


def test_expert_ranks_hold_each_expert_and_its_states_once():
    keys = {**WIDE, "moe_num_experts": 8, "moe_top_k": 2, "moe_router_type": "topk"}
    plans = {}
    for degree in (1, 2, 4):
        zero = {"zero_optimization": {"stage": 2}, "expert_model_parallel_size": degree}
        plans[degree] = plan_of(4, **keys, **zero)
    layers = plans[1].layers
    experts = sum(spec.numel for spec in layers.parameters if spec.experts)
    for degree, plan in plans.items():
        found = memory_of(plan)
        held = sharding(plan).count.held
        assert held == layers.numel - experts + experts // degree
        assert found.optimizer == memory_of(plans[1]).optimizer, "data ranks divide the states of all experts anyway"
