"""`deepy.py` before anything starts: what it answers, what it refuses, and that it needs no torch for either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neox.data import IndexedDatasetBuilder, Sidecar, write_sidecar
from tests.distributed.spawn import run_script
from tests.end_to_end.launched_runs import CPU_ONLY, write_config

ROOT = Path(__file__).resolve().parents[2]


def deepy(*arguments: str, cwd: Path = ROOT, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run deepy.py and check its exit status."""
    done = run_script(ROOT / "deepy.py", *arguments, directory=cwd, **CPU_ONLY)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_config(tmp_path / "tiny.yml", tmp_path / "run", ranks=2)
    (tmp_path / "train.py").touch()
    return tmp_path


def test_20b_as_one_json_object_with_warnings_beside_it() -> None:
    setting = ("--set", "global_num_gpus=96")
    done = deepy("train.py", "-d", "configs", "20B.yml", *setting, "--dry-run", "--json", cwd=ROOT)
    plan: dict[str, Any] = json.loads(done.stdout)
    assert plan["grid"] == {"pp": 4, "mp": 2, "cp": 1, "ep": 1, "dp": 12, "world": 96}
    assert plan["batch"]["train_batch_size"] == 1536
    assert len(plan["stages"]) == 4
    assert plan["deepspeed"]["train_batch_size"] == 1536
    assert "ids is assumed" in done.stderr
    assert plan["launcher"] == "local"
    assert plan["launch"] == plan["commands"][0]["command"]
    assert "-m neox.launch.agent.host_agent " in plan["launch"]
    assert plan["deepspeed_launcher"].count("deepspeed.launcher.launch") == 1


def test_20b_as_gpt_neox_users_type_it_names_what_is_missing(tmp_path: Path) -> None:
    words = ("train.py", "-d", str(ROOT / "configs"), "20B.yml")
    error = deepy(*words, "--set", "tensorboard_dir=None", "--num_gpus", "8", cwd=tmp_path, code=2).stderr
    for command in (
        "`curl --create-dirs -o 20B_checkpoints/20B_tokenizer.json https://",
        "`python tools/prepare_data.py pile -d data --download-only`",
        "`python tools/preprocess_data.py --input data/pile --output-prefix ./data/pile_20B_tokenizer/pile_20B",
    ):
        assert command in error, error
    assert list(tmp_path.iterdir()) == []
    flags = ("--dry-run", "--json", "--num_gpus", "8", "--gpu-type", "a100-80")
    plan = json.loads(deepy(*words, "local_setup", *flags, cwd=tmp_path).stdout)
    assert plan["values"]["save"]["value"] == "checkpoints"
    (replaced,) = [note for note in plan["notes"] if "local_setup.yml replaces" in note]
    assert replaced.count("`") == 2 * 7


def test_neither_torch_nor_deepspeed_is_imported(tiny: Path) -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'deepspeed', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    arguments = [str(ROOT / "deepy.py"), "train.py", "tiny.yml", "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tiny, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_a_plan_needs_pydantic_and_yaml_alone(tiny: Path) -> None:
    absent = ("torch", "deepspeed", "transformers", "numpy", "tokenizers", "orjson", "tqdm", "regex")
    code = f"import sys, runpy\nfor name in {absent}: sys.modules[name] = None\nsys.argv = sys.argv[1:]\n"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, str(ROOT / "deepy.py"), "train.py", "tiny.yml", "--dry-run", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tiny, env=environment)
    assert done.returncode == 0, done.stderr
    assert "is not installed" in done.stderr
    assert json.loads(done.stdout)["grid"]["world"] == 2


def test_what_a_newcomer_types(tiny: Path) -> None:
    assert "did you mean train.py?" in deepy("trian.py", "tiny.yml", cwd=tiny, code=2).stderr
    assert "`--set train_iters=VALUE`" in deepy("train.py", "tiny.yml", "--train-iters", "9", cwd=tiny, code=2).stderr
    command = [sys.executable, str(ROOT / "train.py"), "tiny.yml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tiny)
    assert done.returncode == 2
    assert "python deepy.py train.py tiny.yml" in done.stderr
    command = [sys.executable, "-S", str(ROOT / "tools" / "convert_to_hf.py"), "--help"]  # -S: no package is found
    done = subprocess.run(command, capture_output=True, text=True, cwd=tiny)
    assert done.returncode == 1
    assert "`make install`" in done.stderr
    assert "Traceback" not in done.stderr


def test_imagined_hosts(tiny: Path) -> None:
    flags = ("--dry-run", "--json", "--hosts", "512", "--gpus", "8")
    plan = json.loads(deepy("train.py", "tiny.yml", *flags, cwd=tiny).stdout)
    assert plan["grid"]["world"] == 4096
    assert len(plan["hosts"]) == 512
    assert plan["hosts"][511] == {"name": "host511", "slots": 8, "ranks": [4088, 4095], "stages": [0, 0]}
    text = deepy("train.py", "tiny.yml", "--dry-run", "--verbose", *flags[2:], cwd=tiny).stdout
    done = deepy("train.py", "tiny.yml", "--dry-run", "--hosts", "3", "--set", "global_num_gpus=96", cwd=tiny)
    assert "`global_num_gpus: 96`" in done.stderr
    assert "world = 6: the hosts" in done.stdout
    assert len(done.stdout.splitlines()) <= 24
    assert "--verbose shows" in done.stdout
    assert "ranks 0-4095" in text
    assert "--node_rank 1 to 511" in text


def test_what_is_missing_warns_in_a_dry_run_and_stops_a_launch(tiny: Path) -> None:
    missing = ("--set", "vocab_file=none.json", "--set", "data_path=data/none_text_document", "-H", "nohosts")
    done = deepy("train.py", "tiny.yml", *missing[:4], "--dry-run", cwd=tiny)
    assert done.stderr.count("warning:") == 2
    done = deepy("train.py", "tiny.yml", *missing[:4], "--set", "train_iters=None", cwd=tiny, code=2)
    for words in ("tools/train_tokenizer.py", "tools/preprocess_data.py", "`train_iters` is missing"):
        assert words in done.stderr, words
    done = deepy("train.py", "tiny.yml", *missing[:4], "--set", "hidden_size=63", cwd=tiny, code=2)
    for words in ("tools/train_tokenizer.py", "tools/preprocess_data.py", "`hidden_size: 63`"):
        assert words in done.stderr, words
    (tiny / "empty").touch()
    for flags in (missing[4:], (*missing[4:], "--dry-run"), ("-H", "empty", "--dry-run")):
        done = deepy("train.py", "tiny.yml", *flags, cwd=tiny, code=2)
        assert f"hostfile {flags[1]} " in done.stderr
    done = deepy("train.py", "tiny.yml", *missing[4:], "--set", "hidden_size=63", cwd=tiny, code=2)
    assert "hostfile nohosts does not exist" in done.stderr
    assert "`hidden_size: 63`" in done.stderr
    assert not (tiny / "run").exists()


def test_a_dry_run_gives_the_verdict_of_a_start(tiny: Path) -> None:
    """What is wrong on every machine ends both with status 2; a task's file that is not here ends the start alone."""
    (tiny / "text.txt").write_text("once upon a time")
    tasks = {"lambada=none.jsonl": "no such file", "wikitxt=text.txt": "not a kind", "lambada_openia": "unknown to"}
    for task, reason in tasks.items():
        words = ("train.py", "tiny.yml", "--eval_tasks", task)
        done = deepy(*words, "--dry-run", cwd=tiny, code=0 if "none" in task else 2)
        assert reason in done.stderr, done.stderr
        assert reason in deepy(*words, cwd=tiny, code=2).stderr


def test_a_dry_run_compares_with_a_gpu_that_is_given(tiny: Path) -> None:
    small = ("--set", "gpu_memory_gib=2.001")
    done = deepy("train.py", "tiny.yml", *small, "--dry-run", cwd=tiny, code=2)
    assert "does not fit" in done.stderr
    assert "memory" in done.stdout
    (tiny / "other.py").touch()  # nobody knows what this one needs
    assert "does not fit" not in deepy("other.py", "tiny.yml", *small, "--dry-run", cwd=tiny).stderr


def test_an_assumed_gpu_that_is_too_small_is_a_warning(tiny: Path) -> None:
    large = ("--set", "hidden_size=32768", "--set", "num_layers=96", "--hosts", "1", "--dry-run")
    assert "does not fit" in deepy("train.py", "tiny.yml", *large, cwd=tiny).stderr
    deepy("train.py", "tiny.yml", *large, "--gpu-type", "h200", cwd=tiny, code=2)


def test_a_host_that_is_too_small_for_what_its_ranks_offload_is_a_warning(tiny: Path) -> None:
    """The usual host of a kind of GPU is a guess; what a key says is not."""
    offload = ("--set", "zero_optimization={stage: 2, offload_optimizer: {device: cpu}}")
    large = (*offload, "--set", "hidden_size=16384", "--set", "num_layers=8", "--gpus", "1", "--dry-run")
    on_h200 = ("train.py", "tiny.yml", *large, "--gpu-type", "h200")
    assert "of main memory" in deepy(*on_h200, cwd=tiny).stderr
    given = deepy(*on_h200, "--set", "host_memory_gib=300", cwd=tiny, code=2)
    assert "of main memory" in given.stderr


def test_a_plan_for_a_gpu_says_that_this_machine_has_none() -> None:
    keys = ("--dry-run", "--set", "host_memory_gib=64")
    printed = deepy("train.py", "-d", "configs", "pythia/14M.yml", *keys).stdout
    assert "\ndevice    planned for a GPU of 39.4 GiB (A100 SXM 40 GB)" in printed


def test_what_this_machine_cannot_hold_is_not_started(tiny: Path) -> None:
    (tiny / "train.py").unlink()
    large = ("--set", "hidden_size=32768", "--set", "num_layers=96")
    done = deepy("train.py", "tiny.yml", *large, "--dry-run", cwd=tiny, code=2)
    assert "usable on localhost with" in done.stderr
    assert "H100" not in done.stdout
    for keys in (large, ("--set", "host_memory_gib=0.5")):
        done = deepy("train.py", "tiny.yml", *keys, cwd=tiny, code=2)
        assert "does not fit" in done.stderr
        assert "host_memory_gib" in done.stderr
    assert not (tiny / "run").exists()


def test_data_of_another_tokenizer_is_refused_on_the_head_node(tiny: Path) -> None:
    tokens = np.arange(100) % 50
    with IndexedDatasetBuilder(tiny / "other", np.dtype("uint16")) as builder:
        builder.add_document(tokens)
    data = ("--set", f"data_path={tiny}/other")
    about = Sidecar("HFTokenizer", "0" * 64, 50, 0, append_eod=False, documents=1, tokens=100, max_id=49)
    write_sidecar(tiny / "other", about)
    done = deepy("train.py", "tiny.yml", *data, "--dry-run", cwd=tiny, code=2)
    assert "error: " in done.stderr
    assert "made with another tokenizer" in done.stderr
    assert "memory" in done.stdout, "the plan is shown all the same"
    done = deepy("train.py", "tiny.yml", *data, cwd=tiny, code=2)
    assert "--set: data_path: " in done.stderr
    assert "made with another tokenizer" in done.stderr
    (tiny / "other.json").unlink()
    (tiny / "other.idx").write_bytes(b"garbage")
    assert "other.idx" in deepy("train.py", "tiny.yml", *data, cwd=tiny, code=2).stderr
    assert not (tiny / "run").exists()


def test_a_dry_run_without_hosts_assumes_one_copy(tiny: Path) -> None:
    big = ("--set", "pipe_parallel_size=2", "--set", "num_gpus=null", "--dry-run", "--json")
    done = deepy("train.py", "tiny.yml", *big, cwd=tiny)
    assert "warning: " in done.stderr
    assert json.loads(done.stdout)["grid"]["world"] == 2


def test_keys_grid_and_launcher_are_refused_together(tiny: Path) -> None:
    wrong = ("--set", "hiden_size=1", "--set", "model_parallel_size=3", "--set", "launcher=slurm")
    for more in ((), ("--dry-run",)):
        error = deepy("train.py", "tiny.yml", *wrong, *more, cwd=tiny, code=2).stderr
        assert "unknown key `hiden_size`" in error
        assert "2 GPUs cannot be divided" in error
    assert (
        "mvapich'` is not supported"
        in deepy("train.py", "tiny.yml", "--set", "launcher=mvapich", "--dry-run", cwd=tiny, code=2).stderr
    )
    (tiny / "hosts").write_text("a slots=1\nb slots=2\n")
    done = deepy("train.py", "tiny.yml", "-H", "hosts", *wrong[-2:], "--set", "num_gpus=null", "--dry-run", cwd=tiny)
    assert "warning: launcher: slurm" in done.stderr


def test_a_tool_that_runs_by_itself_is_run(tiny: Path) -> None:
    for name in ("prepare_data.py", "prepare_data"):
        done = deepy(name, "enwik8", "-d", str(tiny), "--sha256", "short", code=1)
        assert "--sha256 takes FILE=DIGEST" in done.stderr


def test_a_tool_over_hosts_leaves_nothing_after_a_usage_error(tiny: Path) -> None:
    before = sorted(tiny.iterdir())
    assert "--input" in deepy("preprocess_data.py", "-H", "none", cwd=tiny, code=2).stderr
    flags = ("--input", "a", "--output-prefix", "b", "--tokenizer-type", "HFTokenizer", "--vocab-file", "c")
    assert "hostfile none" in deepy("preprocess_data.py", "-H", "none", *flags, cwd=tiny, code=2).stderr
    text = deepy("preprocess_data.py", "--help", cwd=tiny).stdout
    assert "--jsonl-keys" in text
    assert "--hostfile" in text
    assert sorted(tiny.iterdir()) == before


def test_launcher_none_prints_commands(tiny: Path) -> None:
    (tiny / "dummy.py").touch()
    (tiny / "hosts").write_text("a slots=2\nb slots=2\n")
    keys = ("--set", "launcher=none", "--set", "use_cpu_initialization=true")
    done = deepy("dummy.py", "tiny.yml", "-H", "hosts", *keys, cwd=tiny)
    assert "note: `use_cpu_initialization: true`" in done.stderr
    assert done.stdout.count("neox.launch.agent.host_agent") == 2
    assert "torch.distributed.run" in done.stdout


def test_doctor(tiny: Path) -> None:
    table = deepy("doctor", "tiny.yml", cwd=tiny).stdout
    assert table.splitlines()[1].startswith("localhost  2 ")
    assert "ok" in table
    table = deepy("doctor", "tiny.yml", "--set", "data_path=none", cwd=tiny, code=1).stdout
    assert table.count(f"localhost: {tiny / 'none.bin'} ") == 2  # in the list, and as what to fix first
    error = deepy("doctor", "--set", "hostfil=x", cwd=tiny, code=2).stderr
    assert "did you mean `hostfile`?" in error
    assert "num_layers" not in error  # no model is asked for


def test_scripts_help_version_and_usage(tiny: Path) -> None:
    assert "--dry-run" in deepy("--help").stdout
    assert deepy("--version").stdout.startswith("neox ")
    assert "at least one configuration file" in deepy("train.py", code=2).stderr
    assert "go with --dry-run" in deepy("train.py", "tiny.yml", "--json", cwd=tiny, code=2).stderr
    assert "no such file" in deepy("train.py", "none.yml", cwd=tiny, code=2).stderr
