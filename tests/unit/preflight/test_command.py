"""The run directory, and plans of scripts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from neox.config import NOTHING, NeoXConfig, apply_decisions
from neox.data import IndexedDatasetBuilder
from neox.decisions.start import decide_length
from neox.errors import ConfigError, LaunchError
from neox.launch.hosts.placement import ChosenBy, Placement, choose_hosts
from neox.launch.spec import Host
from neox.plan import Capabilities, gpu_device
from neox.plan.schedule import schedule_of
from neox.preflight.command_line import find_script, parse_arguments
from neox.preflight.data_amounts import read_amounts
from neox.preflight.planning import Job, PlannedJob, plan_job, read_config
from neox.preflight.plot import _curves, draw_schedules
from neox.preflight.plot_step import step_picture
from neox.preflight.run_directory import run_directory, write_run_directory
from neox.problems import Missing, Source
from tests.plans import SIZES, plan_of


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_directory(None, "configs/20B.yml") == tmp_path / "runs" / "20B"
    assert run_directory("logs", "20B") == tmp_path / "logs"


def test_what_is_written(tmp_path: Path) -> None:
    for steps in (1, 2):
        plan = plan_of(**{**SIZES, "train_iters": steps})
        commands = {"launch": "launch 'a b'", "commands": [{"host": "here", "command": "agent"}]}
        write_run_directory(tmp_path / "run", plan, gpu_device(plan), plan.notes, commands)
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"plan.json", "deepspeed.json", "config.yml", "command.txt", "ranks"}
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["grid"]["world"] == 1
    assert json.loads((tmp_path / "run" / "deepspeed.json").read_text())["train_micro_batch_size_per_gpu"] == 2
    assert yaml.safe_load((tmp_path / "run" / "config.yml").read_text())["train_iters"] == 2
    assert (tmp_path / "run" / "command.txt").read_text().endswith("launch 'a b'\n# on here\nagent\n")
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError):
        write_run_directory(tmp_path / "file", plan, gpu_device(plan), plan.notes, commands)


def test_a_dry_run_without_data_starts_without_numpy() -> None:
    """Each import is paid by everyone who looks at a plan."""
    program = (
        "import sys; from neox.preflight.command import main; "
        "sys.argv = ['deepy.py', 'train.py', '-d', 'configs', '20B.yml', '--dry-run', '--set', 'data_path=nowhere']; "
        "main(); "
        "sys.exit('numpy' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, stdout=subprocess.DEVNULL).returncode == 0


OF_96_RANKS = {**SIZES, "train_batch_size": 1536, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}


def test_deepy_plans_generation_beside_training(tmp_path: Path) -> None:
    file = tmp_path / "model.yml"
    file.write_text(json.dumps({**OF_96_RANKS, "global_num_gpus": 96, "num_gpus": 2}))
    for script, world in (("train.py", 96), ("generate.py", 2), ("evaluate", 2)):
        arguments = parse_arguments([script, str(file), "--dry-run"])
        config = read_config(arguments)
        placement, _ = choose_hosts(config, arguments)
        job = Job(find_script(script), placement, dry_run=True)
        assert plan_job(config, job, Capabilities(), is_sound=True).plan.grid.world_size == world


def test_a_plan_leaves_to_the_start_what_depends_on_its_moment(tmp_path: Path) -> None:
    """A port that another run has now is no fault of the configuration."""
    with socket.create_server(("", 0)) as other_run:
        port = other_run.getsockname()[1]
        planned = planned_here(tmp_path, master_port=port)
    assert ("master_port",) in {problem.keys for problem in planned.problems}
    assert planned.refused == ()


def test_a_step_of_save_is_left_to_hosts_that_may_have_it(tmp_path: Path) -> None:
    """Disks of the hosts may have checkpoints. A dry run warns; ranks of this machine cannot start."""
    file = tmp_path / "model.yml"
    file.write_text(json.dumps({**SIZES, "save": str(tmp_path / "disk"), "iteration": 7}))
    arguments = parse_arguments(["train.py", str(file)])
    found = {}
    for name, dry_run in (("localhost", False), ("another", False), ("another", True)):
        placement = Placement((Host(name, (0,)),), ChosenBy.NOTHING, accelerators=0)
        job = Job(find_script("train.py"), placement, dry_run)
        planned = plan_job(read_config(arguments), job, Capabilities(), is_sound=True)
        start = planned.plan.start
        assert start is not None
        about_step = [isinstance(problem, Missing) for problem in planned.problems if "iteration" in problem.keys]
        found[name, dry_run] = (about_step, start.left_to_ranks)
    assert found == {
        ("localhost", False): ([True], False),
        ("another", False): ([], True),
        ("another", True): ([True], True),
    }


def test_a_plan_judges_the_devices_that_it_is_for(tmp_path: Path) -> None:
    """Quantized weights need GPUs: CPU ranks refuse them, and a plan for GPUs does not."""
    zero = {"stage": 3, "zero_quantized_weights": True}
    (found,) = planned_here(tmp_path, zero_optimization=zero).refused
    assert found.keys == ("zero_optimization.zero_quantized_weights",)
    assert planned_here(tmp_path, zero_optimization=zero, gpu_type="h100").refused == ()


def planned_here(directory: Path, **keys: Any) -> PlannedJob:
    """Plan a training as a dry run on a machine without GPUs."""
    file = directory / "model.yml"
    file.write_text(json.dumps({**SIZES, **keys}))
    arguments = parse_arguments(["train.py", str(file), "--dry-run"])
    placement = Placement((Host("localhost", (0,)),), ChosenBy.NOTHING, accelerators=0)
    job = Job(find_script("train.py"), placement, dry_run=True)
    return plan_job(read_config(arguments), job, Capabilities(), is_sound=True)


def test_precision_auto_needs_hosts_that_can_be_asked(tmp_path: Path) -> None:
    file = tmp_path / "model.yml"
    file.write_text(json.dumps({**SIZES, "precision": "auto"}))
    arguments = parse_arguments(["train.py", str(file), "--dry-run", "--hosts", "1", "--gpus", "1"])
    config = read_config(arguments)
    placement, _ = choose_hosts(config, arguments)

    def plan(*asked: dict[str, object], dry_run: bool) -> tuple[str, bool]:
        job = Job(find_script("train.py"), placement, dry_run=dry_run)
        planned = plan_job(config, job, Capabilities.of_hosts(asked), is_sound=True)
        return planned.plan.precision, ("precision",) in [problem.keys for problem in planned.problems]

    modern, old = {"devices": "GPUs", "bf16": True, "fp16": True}, {"devices": "CPU", "bf16": False, "fp16": False}
    assert plan(dry_run=True) == ("bf16", False)
    assert plan(dry_run=False) == ("bf16", True)
    assert plan(modern, modern, dry_run=False) == ("bf16", False)
    assert plan(modern, old, dry_run=False) == ("fp32", False)
    assert plan({**modern, "bf16": None}, dry_run=False) == ("bf16", True)


def test_a_length_in_epochs_becomes_iterations(tmp_path: Path) -> None:
    prefix, keys = str(tmp_path / "text"), {**SIZES, "train_iters": None, "num_train_epochs": 1.5, "split": "1"}
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(np.arange(1000) % 50, [10] * 100)
    config = NeoXConfig.from_flat({**keys, "data_path": prefix}, {"num_train_epochs": Source.in_file("a.yml", 7)})
    found = decide_length(config, 2)
    counted = apply_decisions(config, found.decisions)
    assert (counted.training.train_iters, found.problems) == (11, ())  # 1,499 // 32 = 46 samples, four a step
    assert "46 samples" in found.notes[0]
    assert str(counted.source("train_iters")) == "a.yml:7 (num_train_epochs)"
    assert not counted.given("num_train_epochs")
    (problem,) = decide_length(NeoXConfig.from_flat({**keys, "data_path": prefix + "none"}), 2).problems
    assert problem.keys == ("num_train_epochs",)
    one_step = config.updated({"num_train_epochs": 0.01})
    assert [each.value for each in decide_length(one_step, 2).decisions] == [1, None]
    for log_style, samples in {"neox": 0, "fleetx": 31}.items():  # 999 // 32
        assert read_amounts(config.updated({"log_style": log_style})).amounts.epoch_samples == samples
    as_it_is = NeoXConfig.from_flat({**SIZES, "data_path": prefix})
    assert decide_length(as_it_is, 2) == NOTHING


def test_a_plot_draws_a_step_of_stages(tmp_path: Path) -> None:
    keys = {"pipe_parallel_size": 2, "gradient_accumulation_steps": 6, "gpu_type": "a100-40"}
    for schedule in ("1f1b", "interleaved", "dualpipev"):
        plan = plan_of(2, **{**SIZES, **keys, "pipeline_schedule": schedule})
        draw_schedules(plan, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
        picture = step_picture(plan)
        assert picture.micro_batches == 6
        assert len(picture.timeline.passes) == 2
        passes = 2 * 6 * len(plan.stages[0].ranges)
        assert [len(of_stage) for of_stage in picture.timeline.passes] == [passes, passes]
    unknown = step_picture(plan_of(2, **{**SIZES, **keys, "gpu_type": None, "gradient_accumulation_steps": 100}))
    assert unknown.micro_batches == 8
    assert unknown.timeline.length == pytest.approx(3 * (8 + 1))


def test_a_plot_draws_what_changes(tmp_path: Path) -> None:
    ramp = {"train_batch_size": 8, "rampup_batch_size": [2, 2, 20], "lr_decay_style": "cosine"}
    plan = plan_of(**{**SIZES, **ramp})
    draw_schedules(plan, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    rate, batch = _curves(plan, 10)
    assert [schedule_of(plan.config).lr(step) for step in rate.at] == rate.values
    assert (batch.values[0], batch.values[-1]) == (2, 8)
    with pytest.raises(ConfigError):
        draw_schedules(plan, tmp_path / "plot.png" / "plot.png")
