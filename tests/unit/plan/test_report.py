"""The plan for people and programs: its figures, and where each value came from."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from neox.config import NeoXConfig
from neox.plan import format_plan, host_device, plan_as_dict, resolve
from neox.plan.devices.device import GIB
from neox.plan.report.run_totals import imbalance, memory_with, run_totals, stage_ranks
from neox.plan.report.text import PUBLISHED_MFU
from tests.plans import SIZES, plan_of
from tests.unit.plan.shipped import shipped

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published_runs.tsv"
LABELS = {
    "defaults",
    "grid",
    "batch",
    "model",
    "stages",
    "memory",
    "kernels",
    "loss",
    "step",
    "run",
    "schedule",
    "saves",
    "derived",
    "note",
}


def labels(text):
    """Return the first words of lines that begin with one, in order."""
    return [line.split()[0] for line in text.splitlines() if not line.startswith((" ", "{", "}"))]


class TestJson:
    def test_20b(self):
        plan = shipped("20B", 96, "global_num_gpus=96")
        found = json.loads(json.dumps(plan_as_dict(plan)))
        assert found["grid"] == {"pp": 4, "mp": 2, "cp": 1, "dp": 12, "ep": 1, "world": 96}
        assert found["batch"] == {
            "train_batch_size": 1536,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 32,
        }
        assert [stage["layers"] for stage in found["stages"]] == [13, 11, 11, 14]
        assert [stage["ranges"] for stage in found["stages"]] == [[[0, 13]], [[13, 24]], [[24, 35]], [[35, 49]]]
        assert sum(stage["parameters"] for stage in found["stages"]) == found["parameters"] == 20_554_567_680
        assert [stage["ranks"] for stage in found["stages"]] == [[0, 23], [24, 47], [48, 71], [72, 95]]
        assert found["stages"][0]["contents"] == "embedding, 11 blocks"
        assert found["stages"][3]["contents"] == "11 blocks, norm, head"
        assert found["deepspeed"] == json.loads(json.dumps(plan.deepspeed))
        assert found["memory"]["fits"] is True

    def test_every_value_says_where_it_came_from(self):
        found = plan_as_dict(shipped("20B", 96, "global_num_gpus=96", "optimizer.params.lr=1e-4"))
        assert found["values"]["hidden_size"]["from"].endswith("20B.yml:15")
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

    def test_thousands_of_ranks(self):
        assert plan_as_dict(shipped("20B", 4096))["stages"][3]["ranks"] == [3072, 4095]


class TestText:
    def test_a_short_report_is_part_of_the_long_one(self):
        plan = shipped("20B", 96)
        brief = format_plan(plan)
        verbose = format_plan(plan, verbose=True)
        assert set(brief.splitlines()) <= set(verbose.splitlines())
        assert set(labels(brief)) == LABELS
        assert set(labels(verbose)) == LABELS | {"stage", "given", "others", "deepspeed"}
        assert len(brief.splitlines()) - len(plan_as_dict(plan)["notes"]) <= 18

    def test_it_has_the_figures_of_the_json(self):
        plan = shipped("20B", 96)
        found = plan_as_dict(plan)
        text = format_plan(plan, verbose=True)
        figure = found["figures"]
        for number in (
            96,
            found["parameters"],
            figure["tokens_per_step"],
            figure["tokens"],
            found["padded_vocab_size"],
        ):
            assert f"{number:,}" in text
        for stage in found["stages"]:
            assert stage["contents"] in text
            assert f"{stage['ranks'][0]}-{stage['ranks'][1]}" in text
        for name, derived in found["derived"].items():
            assert f"{name} = {derived['value']}: {derived['from']}" in text

    def test_a_model_that_is_only_run_has_no_steps(self):
        text = format_plan(shipped("20B", 8), training=False, verbose=True)
        assert not {"loss", "step", "run", "schedule", "saves", "deepspeed"} & set(labels(text))

    @pytest.mark.parametrize(
        ("steps", "unit"), [(1, " ms"), (1000, " seconds"), (100_000, " minutes"), (10**8, " days")]
    )
    def test_times_are_in_units_that_suit_them(self, steps, unit):
        plan = plan_of(**{**SIZES, "train_iters": steps, "peak_theoretical_tflops": 0.1})
        run = next(line for line in format_plan(plan).splitlines() if line.startswith("run"))
        assert unit in run

    def test_nothing_is_assumed_of_cpus(self):
        for keys, known in (({}, False), ({"peak_theoretical_tflops": 0.1}, True)):
            plan = plan_of(**SIZES, **keys)
            here = host_device(plan, [0], "here", 4 * GIB, training=True)
            assert ("MFU" in format_plan(plan, here)) is known
            assert "GPU" not in format_plan(plan, here)
            assert (run_totals(plan, here).days is not None) is known


class TestFigures:
    def test_flops_are_about_six_per_parameter(self):
        for name in ("20B", "1-3B", "175B"):
            plan = shipped(name, 96)
            assert run_totals(plan).flops_per_token == pytest.approx(6 * plan.layers.numel, rel=0.15)

    def test_bubble_and_days(self):
        plan = shipped("20B", 96, "peak_theoretical_tflops=312", "expected_mfu=0.38")
        found = run_totals(plan)
        assert found.bubble == pytest.approx(3 / 35)
        assert found.tokens == 150_000 * 1536 * 2048
        seconds = found.tokens * found.flops_per_token / (96 * 312e12 * 0.38)
        assert found.days == pytest.approx(seconds / 86400)
        assert run_totals(shipped("125M", 8)).bubble == 0

    def test_the_time_is_estimated_where_the_gpu_is_known_and_no_speed_is_given(self):
        plan = shipped("20B", 96)
        found = run_totals(plan)
        assert found.estimate is not None
        assert found.days == pytest.approx(found.estimate.seconds * 150_000 / 86400)
        for given in ("expected_mfu=0.4", "peak_theoretical_tflops=312", "gpu_type=null"):
            assert run_totals(shipped("20B", 96, given)).estimate is None
        slower = run_totals(shipped("20B", 96, "gradient_accumulation_steps=8", "train_batch_size=null"))
        assert slower.mfu < found.mfu, "a stage waits longer with fewer micro batches"

    def test_an_estimate_names_what_published_runs_reached(self):
        reached = {"a100": [], "h100": []}
        flops_8b = run_totals(shipped("llama/3-8B", 128)).flops_per_token
        with open(PUBLISHED, encoding="utf-8") as stream:
            for row in csv.DictReader(stream, delimiter="\t"):
                kind = row["gpu"][:4].lower()
                if kind not in reached or "fp8" in row["precision"]:
                    continue
                peak = {"a100": 312, "h100": 989}[kind]
                if row["tflops_per_gpu"]:  # those of the A100 count full recomputation: 4 passes for 3
                    share = 0.75 if kind == "a100" else 1.0
                    reached[kind].append(share * float(row["tflops_per_gpu"]) / peak)
                elif row["tokens_per_s_per_gpu"] and row["id"].startswith("titan-8b"):
                    reached[kind].append(float(row["tokens_per_s_per_gpu"]) * flops_8b / peak / 1e12)
                elif row["step_seconds"]:
                    tokens = int(row["global_batch"]) * int(row["seq_length"])
                    layers, hidden, length = int(row["layers"]), int(row["hidden"]), int(row["seq_length"])
                    terms = 1 + length / (6 * hidden) + int(row["vocab"]) / (12 * layers * hidden)
                    operations = 72 * tokens * layers * hidden**2 * terms
                    reached[kind].append(operations / float(row["step_seconds"]) / int(row["gpus"]) / peak / 1e12)
        for kind, shares in reached.items():
            assert PUBLISHED_MFU[kind] == (round(100 * min(shares)), round(100 * max(shares)))
        text = format_plan(shipped("20B", 96))
        assert "24 to 56 % MFU" in text
        assert "pipeline bubble" not in text, "the run's line says how long stages wait"

    def test_ranks_of_stages(self):
        plan = shipped("20B", 96)
        assert [stage_ranks(plan, i) for i in range(4)] == [(0, 23), (24, 47), (48, 71), (72, 95)]
        assert 1 < imbalance(plan) < 1.05

    def test_recomputation_needs_less(self):
        plan = shipped("20B", 96)
        assert memory_with(plan, recompute=True).activations * 5 < memory_with(plan, recompute=False).activations
        assert memory_with(plan, recompute=True) == plan.memory


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_tied_copies_are_counted_where_they_are_held(positions):
    config = NeoXConfig.from_flat({**SIZES, "pipe_parallel_size": 2, "pos_emb": positions})
    plan = resolve(config, 2, 100)
    words = plan.layers.word_embeddings.numel  # of the embedding, the last stage copies nothing else
    assert sum(stage.parameters for stage in plan.stages) == plan.layers.numel + words
