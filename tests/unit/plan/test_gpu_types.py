"""Kinds of GPUs in plans, the batch that a file was made for, and sizes of checkpoints."""

from __future__ import annotations

from typing import get_args

import pytest

from neox.config.sections.runner import GpuType
from neox.devices import GPUS
from neox.errors import ConfigError
from neox.plan import config_from_files, format_plan, gpu_device, plan_as_dict, resolve
from neox.plan.devices.device import GIB, host_device
from neox.plan.memory.checkpoint_size import checkpoint_bytes, kept_checkpoints
from neox.plan.report.run_totals import run_totals
from neox.plan.search.fastest import suggest_layouts
from neox.plan.search.fit import memory_problem
from tests.plans import SIZES, plan_of
from tests.unit.plan.shipped import shipped


def test_the_key_knows_the_gpus_of_the_table():
    assert set(get_args(GpuType)) == set(GPUS)


def test_a_kind_sets_memory_and_peak():
    device = gpu_device(plan_of(**SIZES, gpu_type="a100-40", precision="bf16"))
    gpu = GPUS["a100-40"]
    assert device.size == int(gpu.memory_gib * GIB)
    assert device.peak_tflops == gpu.peak_tflops
    assert "a100-40" in device.source
    assert not device.assumed
    assert gpu_device(plan_of(**SIZES)).assumed


@pytest.mark.parametrize("on_command_line", [False, True])
def test_who_wins(tmp_path, on_command_line):
    """Single figures win over a kind, except that a kind on the command line wins over figures in a file."""
    file = tmp_path / "own.yml"
    keys = {**SIZES, "precision": "bf16", "gpu_memory_gib": 24, "peak_theoretical_tflops": 100}
    overrides = ["gpu_type=h100"] if on_command_line else []
    if not on_command_line:
        keys["gpu_type"] = "h100"
    file.write_text("\n".join(f"{key}: {value}" for key, value in keys.items()))
    device = gpu_device(resolve(config_from_files([file], overrides=overrides), 1, 1000))
    gpu = GPUS["h100"]
    expected = (int(gpu.memory_gib * GIB), gpu.peak_tflops) if on_command_line else (24 * GIB, 100)
    assert (device.size, device.peak_tflops) == expected
    both = config_from_files([file], overrides=["gpu_type=h100", "gpu_memory_gib=12"])
    assert gpu_device(resolve(both, 1, 1000)).size == 12 * GIB


def test_another_number_of_ranks_has_a_note_with_the_key_that_keeps_the_batch():
    assert not any("planned_num_gpus" in note for note in shipped("20B", 96).notes)
    (note,) = (note for note in shipped("20B", 48).notes if "planned_num_gpus" in note)
    assert "1,536" in note
    kept = shipped("20B", 48, "train_batch_size=1536", "gradient_accumulation_steps=null")
    assert kept.batch.train_batch_size == 1536
    assert not any("planned_num_gpus" in note for note in kept.notes)


@pytest.mark.parametrize(
    ("kind", "name"), [("ascend910b", "Ascend 910B"), ("mi250x", "MI250X"), ("max1550", "Max 1550")]
)
def test_the_shipped_20b_on_sixteen_accelerators_of_64_gb(kind, name):
    """gpt-neox's 20B runs on 16 Ascend 910B (Ascend's ModelZoo); a MI250X or a Max 1550 is two devices."""
    plan = shipped("20B", 16, f"gpu_type={kind}")
    device = gpu_device(plan)
    assert device.size <= 64 * GIB
    assert memory_problem(plan, device, training=True) is None
    text = format_plan(plan, device)
    assert name in text
    assert "seconds a step" in text


class TestCheckpoints:
    @pytest.mark.parametrize(
        ("precision", "stage", "per_parameter"),
        [("fp32", 0, 4 + 8), ("bf16", 0, 2 + 12), ("bf16", 1, 2 + 12), ("bf16", 2, 2 + 12)],
    )
    def test_states_are_written_once(self, precision, stage, per_parameter):
        keys = {**SIZES, "precision": precision, "zero_optimization": {"stage": stage}, "save": "checkpoints"}
        plan = plan_of(2, **keys, checkpoint_factor=2)
        assert checkpoint_bytes(plan) == pytest.approx(per_parameter * plan.layers.numel, rel=1e-4)
        weights = plan_of(2, **keys, checkpoint_factor=2, no_save_optim=True)
        assert checkpoint_bytes(weights) == (4 if precision == "fp32" else 2) * plan.layers.numel

    def test_all_that_are_kept(self):
        keys = {**SIZES, "save": "checkpoints", "checkpoint_factor": 2}
        assert kept_checkpoints(plan_of(**keys)) == 5
        plan = plan_of(**keys, keep_last_n_checkpoints=3)
        assert kept_checkpoints(plan) == 3
        found = plan_as_dict(plan)
        assert (found["checkpoint_bytes"], found["checkpoints_kept"]) == (checkpoint_bytes(plan), 3)
        assert "on disk" in format_plan(plan)
        assert "on disk" in format_plan(plan_of(**keys | {"checkpoint_factor": 10}))


def test_products_of_fp32_are_not_timed_by_the_peak_of_16_bits() -> None:
    """Reported as torchtitan#668 and TRL PR 7197. Right: NVIDIA's data sheet of the H100: 67 TFLOP/s, not 989."""
    keys = {**SIZES, "gpu_type": "h100"}
    timed = plan_of(**{**keys, "precision": "bf16"})
    in_fp32 = plan_of(**{**keys, "precision": "fp32"})
    assert run_totals(timed).estimate is not None
    assert run_totals(in_fp32).estimate is run_totals(in_fp32).days is None
    given = plan_of(**{**keys, "precision": "fp32", "peak_theoretical_tflops": 67.0})
    days = run_totals(given).days
    assert days is not None
    assert "h100" not in gpu_device(given).peak_source
    with pytest.raises(ConfigError, match="fp32"):
        suggest_layouts(in_fp32, gpu_device(in_fp32), GPUS["h100"])
    assert suggest_layouts(in_fp32, gpu_device(in_fp32), GPUS["h100"], measured=True).best
    on_cpu = host_device(in_fp32, [0], "here", None, training=True)  # where layouts are measured
    assert suggest_layouts(in_fp32, on_cpu, GPUS["h100"]).best
