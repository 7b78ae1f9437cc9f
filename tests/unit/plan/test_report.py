"""The plan for people and programs: memory against a GPU, what would fit, figures, and where each value came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neox.config import NeoXConfig
from neox.plan import config_from_files, format_plan, gpu_device, host_device, memory_problem, plan_as_dict, resolve
from neox.plan.device import GIB, PROCESS_BYTES, host_problem, memory_on, rank_bytes, rank_memory, usable_bytes
from neox.plan.fit import check_fit
from neox.plan.report import figures, imbalance, memory_with, stage_ranks

CONFIGS = Path(__file__).parents[3] / "configs"


def shipped(name, world, *overrides):
    return resolve(config_from_files([name], conf_dir=CONFIGS, overrides=overrides), world, 50277)


class TestJson:
    def test_20b(self):
        plan = shipped("20B", 96, "global_num_gpus=96")
        found = json.loads(json.dumps(plan_as_dict(plan)))
        assert found["grid"] == {"pp": 4, "mp": 2, "dp": 12, "world": 96}
        assert found["batch"] == {
            "train_batch_size": 1536,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 32,
        }
        assert [stage["layers"] for stage in found["stages"]] == [13, 11, 11, 14]
        assert sum(stage["parameters"] for stage in found["stages"]) == found["parameters"] == 20_554_567_680
        assert found["stages"][1]["ranks"] == [24, 47]
        assert found["stages"][0]["contents"] == "embedding, 11 blocks"
        assert found["stages"][3]["contents"] == "11 blocks, norm, head"
        assert found["deepspeed"] == json.loads(json.dumps(plan.deepspeed))
        assert found["memory"]["fits"] is True

    def test_every_value_says_where_it_came_from(self):
        found = plan_as_dict(shipped("20B", 96, "global_num_gpus=96", "optimizer.params.lr=1e-4"))
        assert found["values"]["hidden_size"]["from"].endswith("20B.yml:13")
        assert found["values"]["seed"] == {"value": 1234, "from": "default"}
        assert found["derived"]["world"] == {"value": 96, "from": "--set"}
        assert found["derived"]["dp"] == {"value": 12, "from": "world 96 / (pp 4 x mp 2)"}
        assert "4 x 32 x dp 12" in found["derived"]["train_batch_size"]["from"]
        assert "20B.yml:" in found["derived"]["precision"]["from"]
        sources = found["deepspeed_from"]
        assert sources["optimizer.params.lr"] == "--set"
        assert "20B.yml:" in sources["zero_optimization.stage"]
        assert "dp 12" in sources["train_batch_size"]
        assert set(found["values"]) >= {"num_layers", "launcher", "save", "fp16"}

    def test_tied_copies_are_counted_where_they_are_held(self, tiny):
        plan = resolve(NeoXConfig.from_flat({**tiny, "pipe_parallel_size": 2}), 2, 100)
        embedding = plan.layers[0].numel
        assert sum(stage.parameters for stage in plan.stages) == plan.layers.numel + embedding


class TestText:
    def test_20b(self):
        text = format_plan(shipped("20B", 96), verbose=True)
        for expected in (
            "96 ranks = 4 pipeline stages x 12 data x 2 tensor",
            "20,554,567,680 parameters",
            "ranks 24-47, 12 tensor groups of 2 in a row",
            "fits on a GPU of 80.0 GiB",
            "pipeline bubble 8.6 %",
            "3,145,728 tokens",
            "with recompute",
            "hidden_size = 6144: ",
            '"train_batch_size": 1536',
        ):
            assert expected in text, expected

    def test_flash_is_recommended_in_place_of_the_fused_softmax(self, tiny):
        plan = shipped("20B", 96)
        assert '[["flash"], "all"]' in format_plan(plan)
        assert any("without checkpoint_activations, which fits" in note for note in plan_as_dict(plan)["notes"])
        keys = {**tiny, "scaled_upper_triang_masked_softmax_fusion": True}
        for other, recommended in (
            ({"precision": "bf16"}, True),
            ({"precision": "fp32"}, False),
            ({"precision": "bf16", "pos_emb": "rpe"}, False),
            ({"precision": "bf16", "attention_config": [[["flash"], "all"]]}, False),
        ):
            plan = resolve(NeoXConfig.from_flat({**keys, **other}), 1, 100)
            assert ("without keeping scores" in format_plan(plan)) == recommended, other

    def test_thousands_of_ranks(self):
        plan = shipped("20B", 4096)
        assert "4,096 ranks = 4 pipeline stages x 512 data x 2 tensor" in format_plan(plan)
        assert plan_as_dict(plan)["stages"][3]["ranks"] == [3072, 4095]


def problem_of(plan, gib):
    """Why a plan does not train on GPUs of this size."""
    return memory_problem(plan, gpu_device(plan, gib * GIB), training=True)


class TestBrief:
    def test_fits_on_one_screen(self):
        plan = shipped("20B", 96)
        brief, whole = format_plan(plan).splitlines(), format_plan(plan, verbose=True).splitlines()
        assert len([line for line in brief if line not in whole]) == 0
        assert len(brief) - len(plan_as_dict(plan)["notes"]) <= 24
        for expected in ("3,145,728 tokens", "days at", "dp = 12: world 96", "13, 11, 11, 14 layers"):
            assert expected in "\n".join(brief), expected

    @pytest.mark.parametrize(
        ("steps", "unit"), [(1, "0.1 seconds"), (1000, " seconds"), (100_000, " minutes"), (10**8, " days")]
    )
    def test_times_are_in_units_that_suit_them(self, tiny, steps, unit):
        plan = resolve(NeoXConfig.from_flat({**tiny, "train_iters": steps, "peak_theoretical_tflops": 0.1}), 1, 100)
        run = next(line for line in format_plan(plan).splitlines() if line.startswith("run"))
        assert unit in run

    def test_nothing_is_assumed_of_cpus(self, tiny):
        plan = resolve(NeoXConfig.from_flat(tiny), 1, 100)
        text = format_plan(plan, host_device(plan, [0], "here", 4 * GIB, training=True))
        assert "fits on here with 4.0 GiB" in text
        assert "MFU" not in text
        assert "GPU" not in text
        known = resolve(NeoXConfig.from_flat({**tiny, "peak_theoretical_tflops": 0.1}), 1, 100)
        assert "MFU of 0 TFLOP/s" in format_plan(known, host_device(known, [0], "here", 4 * GIB, training=True))


class TestHosts:
    def test_ranks_share_the_memory_of_their_host(self, tiny):
        keys = {**tiny, "hidden_size": 1024, "pipe_parallel_size": 2}
        plan = resolve(NeoXConfig.from_flat(keys), 2, 100)
        needs = [rank_bytes(plan, rank, training=True) for rank in (0, 1)]
        assert max(needs) > min(needs)
        enough = sum(needs) + 2 * PROCESS_BYTES + 2**20
        for ranks, available, fits in (((0, 1), enough, True), ((0, 1), enough - 2**24, False), ((1,), enough, True)):
            device = host_device(plan, ranks, "here", available, training=True)
            assert (memory_problem(plan, device, training=True) is None) is fits
        assert memory_problem(plan, host_device(plan, (0, 1), "here", None, training=True), training=True) is None
        given = resolve(NeoXConfig.from_flat({**keys, "host_memory_gib": 0.6}), 2, 100)
        problem = memory_problem(given, host_device(given, (0, 1), "here", enough, training=True), training=True)
        assert "which 2 ranks share" in problem

    def test_a_cpu_holds_few_logits(self, tiny):
        keys = {**tiny, "seq_length": 512, "make_vocab_size_divisible_by": 50_000}
        plan = resolve(NeoXConfig.from_flat(keys), 1, 100)
        logits = 4 * plan.batch.train_micro_batch_size_per_gpu * 512 * plan.padded_vocab_size
        there = memory_on(plan, host_device(plan, [0], "here", GIB, training=True))
        assert there.activations < logits < plan.memory.activations
        assert there.weights == plan.memory.weights

    def test_offloaded_states_need_main_memory_of_gpu_hosts(self, tiny):
        zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
        plans = [
            resolve(NeoXConfig.from_flat({**tiny, "hidden_size": 1024, "zero_optimization": block}), 4, 100)
            for block in ({"stage": 3}, zero, {**zero, "offload_param": {"device": "cpu"}})
        ]
        resident, optimizer, everything = (plan.memory for plan in plans)
        assert resident.host == optimizer.optimizer == everything.optimizer == everything.weights == 0
        assert everything.total < optimizer.total < resident.total
        assert everything.host - optimizer.host == resident.weights
        enough = 4 * (optimizer.host + PROCESS_BYTES)
        assert host_problem(plans[0], range(4), "worker", 0) is None
        assert host_problem(plans[1], range(4), "worker", enough) is None
        assert "worker: 4 ranks offload" in str(host_problem(plans[1], range(4), "worker", enough - 1))
        there = host_device(plans[1], [0], "here", 2**40, training=True)
        assert memory_on(plans[1], there).needed(on_cpu=True) > optimizer.host

    def test_background_saves_need_main_memory(self, tiny):
        """Weights on the first data rank, and each rank's part of the states; the whole states with ZeRO 0."""
        for stage, parts in ((0, 1), (1, 2)):
            keys = {**tiny, "precision": "bf16", "zero_optimization": {"stage": stage}, "save": "checkpoints"}
            plain, copying, weights = (
                resolve(NeoXConfig.from_flat({**keys, **other}), 2, 100)
                for other in ({}, {"async_save": True}, {"async_save": True, "no_save_optim": True})
            )
            count = plain.layers.numel
            assert (plain.memory.copies, weights.memory.copies) == (0, 2 * count)
            assert copying.memory.copies == 2 * count + 12 * count // parts
            second = rank_memory(copying, 1, on_cpu=False)
            assert second.copies == (0 if stage == 0 else 12 * count // parts)
            needed = copying.memory.copies + second.copies + 2 * PROCESS_BYTES
            assert host_problem(copying, range(2), "worker", needed) is None
            assert "async_save" in str(host_problem(copying, range(2), "worker", needed - 1))
            assert "async_save" in format_plan(copying)
            cpu = host_device(copying, range(2), "here", None, training=True)
            on_cpus = memory_on(copying, cpu)
            assert on_cpus.needed(on_cpu=True) == on_cpus.total + copying.memory.copies

    def test_the_way_out_of_a_host_is_not_more_ranks(self, tiny):
        plan = resolve(NeoXConfig.from_flat({**tiny, "hidden_size": 8192}), 1, 100)
        device = host_device(plan, [0], "here", GIB, training=True)
        for training in (True, False):
            problem = memory_problem(plan, device, training=training)
            assert "more hosts" in problem
            assert "more ranks" not in problem


class TestFit:
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

    def test_sentence(self):
        assert problem_of(shipped("20B", 96), 80) is None
        sentence = problem_of(shipped("pythia/160M", 1), 8)
        assert "does not fit" in sentence
        assert "--set train_micro_batch_size_per_gpu=" in sentence
        offloaded = problem_of(shipped("6-7B", 1), 80)
        assert "of main memory" in offloaded
        assert "--set zero_optimization.offload_optimizer.device=cpu" in offloaded

    def test_nothing_fits(self):
        assert "nor with more ranks" in problem_of(shipped("175B", 96), 3)

    def test_recompute_needs_less(self):
        plan = shipped("20B", 96)
        assert memory_with(plan, recompute=True).activations * 5 < memory_with(plan, recompute=False).activations
        assert memory_with(plan, recompute=True) == plan.memory

    def test_zero_stages_need_less_and_less(self, tiny):
        totals = []
        for stage in range(4):
            keys = {**tiny, "precision": "bf16", "zero_optimization": {"stage": stage}, "hidden_size": 1024}
            memory = resolve(NeoXConfig.from_flat(keys), 8, 100).memory
            totals.append(memory.weights + memory.optimizer)
        assert totals[0] > totals[1] >= totals[2] > totals[3]


class TestFigures:
    def test_flops_are_about_six_per_parameter(self):
        for name in ("20B", "1-3B", "175B"):
            plan = shipped(name, 96)
            assert figures(plan).flops_per_token == pytest.approx(6 * plan.layers.numel, rel=0.15)

    def test_bubble_and_days(self):
        plan = shipped("20B", 96, "peak_theoretical_tflops=312", "expected_mfu=0.38")
        found = figures(plan)
        assert found.bubble == pytest.approx(3 / 35)
        assert found.tokens == 150_000 * 1536 * 2048
        seconds = found.tokens * found.flops_per_token / (96 * 312e12 * 0.38)
        assert found.days == pytest.approx(seconds / 86400)
        assert figures(shipped("125M", 8)).bubble == 0

    def test_ranks_of_stages(self):
        plan = shipped("20B", 96)
        assert [stage_ranks(plan, i) for i in range(4)] == [(0, 23), (24, 47), (48, 71), (72, 95)]
        assert 1 < imbalance(plan) < 1.05
