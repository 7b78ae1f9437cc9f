"""Whether a training fits on its devices, and the nearest settings that do."""

from __future__ import annotations

import pytest

from neox.plan import format_plan, gpu_device, host_device, memory_problem, plan_as_dict
from neox.plan.devices.device import (
    GIB,
    PROCESS_BYTES,
    gib,
    host_problem,
    memory_on,
    rank_bytes,
    rank_memory,
    usable_bytes,
)
from neox.plan.memory import fullest_stage
from neox.plan.search.fit import check_fit, flash_advice
from tests.plans import SIZES, plan_of
from tests.unit.plan.shipped import shipped


class TestNearestSettings:
    @pytest.mark.parametrize(
        ("name", "world", "gib"),
        [
            ("13B", 8, 24),
            ("13B", 8, 12),
            ("6-7B", 8, 24),
            ("pythia/160M", 1, 8),
            ("20B", 8, 24),
            ("175B", 96, 12),
            ("6-7B", 1, 40),
        ],
    )
    def test_what_is_proposed_resolves_and_fits(self, name, world, gib):
        plan = shipped(name, world)
        fit = check_fit(plan, gpu_device(plan, gib * GIB))
        assert not fit.fits
        assert fit.memory_then is not None
        overrides = [f"{key}={value}" for key, value in fit.changes]
        changed = shipped(name, fit.world, *overrides)
        assert changed.memory.total == fit.memory_then.total <= usable_bytes(gib * GIB)
        assert changed.batch.train_batch_size >= plan.batch.train_batch_size

    def test_offload_is_the_last_resort_of_one_gpu(self):
        plan = shipped("6-7B", 1)
        changes = dict(check_fit(plan, gpu_device(plan)).changes)
        assert changes["zero_optimization.offload_optimizer.device"] == "cpu"
        problem = memory_problem(plan, gpu_device(plan), training=True)
        for key, value in changes.items():
            assert f"--set {key}={value}" in problem.text

    def test_some_runs_fit_nowhere(self):
        plan = shipped("175B", 96)
        device = gpu_device(plan, 3 * GIB)
        fit = check_fit(plan, device)
        assert (fit.fits, fit.changes, fit.memory_then) == (False, (), None)
        assert memory_problem(plan, device, training=True)
        assert memory_problem(shipped("20B", 96), gpu_device(plan), training=True) is None

    def test_more_ranks_do_not_help_a_full_host(self):
        plan = plan_of(**{**SIZES, "hidden_size": 8192})
        device = host_device(plan, [0], "here", GIB, training=True)
        assert check_fit(plan, device).world == 1
        for training in (True, False):
            problem = memory_problem(plan, device, training=training)
            assert "more hosts" in problem.text
            assert "more ranks" not in problem.text


FUSED = {**SIZES, "seq_length": 256, "scaled_upper_triang_masked_softmax_fusion": True}


@pytest.mark.parametrize(
    ("keys", "recommended"),
    [
        ({"precision": "bf16"}, True),
        ({"precision": "fp32"}, False),
        ({"precision": "bf16", "pos_emb": "rpe"}, False),
        ({"precision": "bf16", "attention_config": [[["flash"], "all"]]}, False),
    ],
)
def test_flash_is_recommended_in_place_of_the_fused_softmax(keys, recommended):
    plan = plan_of(**{**FUSED, **keys})
    advice = list(flash_advice(plan, gpu_device(plan)))
    assert bool(advice) is recommended
    assert not list(flash_advice(plan, host_device(plan, [0], "here", GIB, training=True)))


def test_flash_may_make_recomputation_unnecessary():
    plan = shipped("20B", 96, "gpu_type=a100-80")
    (advice,) = flash_advice(plan, gpu_device(plan))
    assert "checkpoint_activations" in advice
    assert advice in plan_as_dict(plan)["notes"]
    small = gpu_device(plan, 12 * GIB)
    assert all("checkpoint_activations" not in line for line in flash_advice(plan, small))


def test_flash_that_saves_nothing_is_not_proposed():
    plan = shipped("20B", 8, "checkpoint_activations=true")
    total = plan.memory.total
    assert gib(memory_with_flash(plan)) == gib(total)
    assert list(flash_advice(plan, gpu_device(plan))) == []


def memory_with_flash(plan):
    return fullest_stage(plan.workload.with_layout(attention="flash"), plan.stages).total


def test_tensor_ranks_may_divide_tokens_where_memory_is_short():
    plan = shipped("13B", 8, "checkpoint_activations=true", "train_micro_batch_size_per_gpu=1")
    found = set()
    for size in range(14, 40):
        found |= set(check_fit(plan, gpu_device(plan, size * GIB)).changes)
    assert ("sequence_parallel", "true") in found
    fixed = shipped("13B", 8, "partition_activations=true", "train_micro_batch_size_per_gpu=1")
    for size in range(14, 40, 5):
        assert "sequence_parallel" not in dict(check_fit(fixed, gpu_device(fixed, size * GIB)).changes)


class TestHosts:
    def test_ranks_share_the_memory_of_their_host(self):
        keys = {**SIZES, "hidden_size": 1024, "pipe_parallel_size": 2}
        plan = plan_of(2, **keys)
        needs = [rank_bytes(plan, rank, training=True) for rank in (0, 1)]
        assert max(needs) > min(needs)
        enough = sum(needs) + 2 * PROCESS_BYTES + 2**20
        for ranks, available, fits in (((0, 1), enough, True), ((0, 1), enough - 2**24, False), ((1,), enough, True)):
            device = host_device(plan, ranks, "here", available, training=True)
            assert (memory_problem(plan, device, training=True) is None) is fits
        assert memory_problem(plan, host_device(plan, (0, 1), "here", None, training=True), training=True) is None
        given = plan_of(2, **keys, host_memory_gib=0.6)
        device = host_device(given, (0, 1), "here", enough, training=True)
        assert device.size == int(0.6 * GIB)
        assert memory_problem(given, device, training=True)

    def test_a_cpu_holds_few_logits(self):
        plan = plan_of(**{**SIZES, "seq_length": 512, "make_vocab_size_divisible_by": 50_000})
        logits = 4 * plan.batch.train_micro_batch_size_per_gpu * 512 * plan.padded_vocab_size
        there = memory_on(plan, host_device(plan, [0], "here", GIB, training=True))
        assert there.activations < logits < plan.memory.activations
        assert there.weights == plan.memory.weights

    def test_offloaded_states_need_main_memory_of_gpu_hosts(self):
        zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
        plans = [
            plan_of(4, **{**SIZES, "hidden_size": 1024, "zero_optimization": block})
            for block in ({"stage": 3}, zero, {**zero, "offload_param": {"device": "cpu"}})
        ]
        resident, optimizer, everything = (plan.memory for plan in plans)
        assert resident.host == optimizer.optimizer == everything.optimizer == everything.weights == 0
        assert everything.total < optimizer.total < resident.total
        assert everything.host - optimizer.host == resident.weights
        enough = 4 * (optimizer.host + PROCESS_BYTES)
        assert host_problem(plans[0], range(4), "worker", 0) is None
        assert host_problem(plans[1], range(4), "worker", enough) is None
        assert "offload" in host_problem(plans[1], range(4), "worker", enough - 1)
        there = host_device(plans[1], [0], "here", 2**40, training=True)
        assert memory_on(plans[1], there).needed(on_cpu=True) > optimizer.host

    def test_a_plan_counts_with_the_main_memory_of_each_gpu(self):
        """Of a kind it is its share of its usual host; `host_memory_gib` is that of a host, which its ranks share."""
        offload = "zero_optimization={stage: 3, offload_optimizer: {device: cpu}, offload_param: {device: cpu}}"
        one_gpu = [offload, "pipe_parallel_size=1", "model_parallel_size=1", "checkpoint_activations=true"]
        plan = shipped("20B", 1, *one_gpu, "gpu_type=h100")
        device = gpu_device(plan)
        assert device.main_memory.assumed
        assert device.main_memory.size == 2048 // 8 * GIB - PROCESS_BYTES
        assert plan.memory.total < device.usable
        assert plan.memory.main_memory > device.main_memory.size
        problem = memory_problem(plan, device, training=True)
        assert problem.key == "host_memory_gib"
        assert not plan_as_dict(plan, device)["memory"]["fits"]
        assert device.main_memory.source in format_plan(plan, device)
        fit = check_fit(plan, device)
        assert fit.memory_then.main_memory <= device.main_memory.size
        changed = [f"{key}={value}" for key, value in fit.changes]
        wider = shipped("20B", fit.world, *one_gpu, "gpu_type=h100", *changed)
        assert gpu_device(wider).holds(wider.memory)

        one_of_two = plan_of(2, **SIZES, save="checkpoints", async_save=True, host_memory_gib=0.501)
        assert one_of_two.memory.copies > gpu_device(one_of_two).main_memory.size
        assert check_fit(one_of_two, gpu_device(one_of_two)).fits, "only the first data rank has this copy"

        given = shipped("20B", 1, *one_gpu, "host_memory_gib=512")
        assert not gpu_device(given).main_memory.assumed
        assert memory_problem(given, gpu_device(given), training=True) is None
        assert memory_problem(given, gpu_device(given, ranks_of_host=2), training=True)
        assert gpu_device(plan_of(1, **SIZES)).main_memory is None, "no kind, and nothing given"
        assert gpu_device(plan_of(2, **SIZES), available=6 * GIB).main_memory.size == 3 * GIB - PROCESS_BYTES

    def test_stages_of_a_host_share_its_main_memory_unequally(self):
        """Embedding and head are in the first and last stage: what the host check of a launch admits, the plan does."""
        offload = "zero_optimization={stage: 1, offload_optimizer: {device: cpu}}"
        plan = shipped("pythia/1B", 4, "pipe_parallel_size=4", "model_parallel_size=1", offload)
        offloaded = [rank_memory(plan, rank, on_cpu=False).host for rank in range(4)]
        needed = sum(offloaded) + 4 * PROCESS_BYTES
        assert 4 * max(offloaded) > 1.1 * sum(offloaded)
        for available, is_enough in ((needed + 8, True), (needed - 8, False)):
            device = gpu_device(plan, 80 * GIB, ranks_of_host=4, available=available)
            assert check_fit(plan, device).fits is is_enough
            assert (memory_problem(plan, device, training=True) is None) is is_enough
            assert (host_problem(plan, range(4), "node1", available) is None) is is_enough

    def test_background_saves_need_main_memory(self):
        """Weights on the first data rank, and each rank's part of the states; the whole states with ZeRO 0."""
        for stage, parts in ((0, 1), (1, 2)):
            keys = {**SIZES, "precision": "bf16", "zero_optimization": {"stage": stage}, "save": "checkpoints"}
            plain, copying, weights = (
                plan_of(2, **keys, **other)
                for other in ({}, {"async_save": True}, {"async_save": True, "no_save_optim": True})
            )
            count = plain.layers.numel
            assert (plain.memory.copies, weights.memory.copies) == (0, 2 * count)
            assert copying.memory.copies == 2 * count + 12 * count // parts
            second = rank_memory(copying, 1, on_cpu=False)
            assert second.copies == (0 if stage == 0 else 12 * count // parts)
            needed = copying.memory.copies + second.copies + 2 * PROCESS_BYTES
            assert host_problem(copying, range(2), "worker", needed) is None
            assert "async_save" in host_problem(copying, range(2), "worker", needed - 1)
            cpu = host_device(copying, range(2), "here", None, training=True)
            on_cpus = memory_on(copying, cpu)
            assert on_cpus.needed(on_cpu=True) == on_cpus.total + copying.memory.copies
