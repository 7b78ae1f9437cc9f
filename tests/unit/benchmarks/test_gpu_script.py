"""`benchmarks/gpu.sh`: its steps, its results when a step is cut off, and the packages that a GPU machine lacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
OFFLINE = ROOT / "requirements" / "requirements-offline-gpu.txt"

RUNNER = """
import re, sys
from importlib import metadata
from pathlib import Path

def name(requirement):
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")

carried = {name(line) for line in Path(sys.argv[1]).read_text().splitlines() if line and line[0] != "#"}
allowed, waiting = set(carried), ["torch", "numpy", "tokenizers", "transformers", "safetensors", "matplotlib", "pytest",
                                  "triton", "pip", "setuptools", "pytest-xdist", "pytest-timeout", "hypothesis", "neox"]
while waiting:
    one = waiting.pop()
    if one in allowed:
        continue
    allowed.add(one)
    try:
        needed = metadata.requires(one) or () if one != "neox" else ()
    except metadata.PackageNotFoundError:
        continue
    waiting += [name(item) for item in needed if "extra ==" not in item]
modules = metadata.packages_distributions()

class Blocker:
    def find_spec(self, module, path=None, target=None):
        owners = {owner.lower().replace("_", "-") for owner in modules.get(module.partition(".")[0], ())}
        if owners and not owners & allowed:
            raise ModuleNotFoundError(f"{module} is not on the GPU machine", name=module)

sys.meta_path.insert(0, Blocker())
import pytest
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", sys.argv[2]]))
"""


def test_gpu_tests_are_collected_with_the_packages_of_a_gpu_machine():
    command = [sys.executable, "-c", RUNNER, OFFLINE, ROOT / "tests" / "gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests collected" in done.stdout


def test_unknown_step_is_refused_with_the_names():
    done = subprocess.run([SCRIPT, "nonsense"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert "train-1.3B-engine" in done.stderr


def test_every_listed_step_has_a_command():
    steps = subprocess.run([SCRIPT, "--list"], capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert len(set(steps)) == len(steps)
    body = SCRIPT.read_text().partition("command_of() {")[2].partition("\n}\n")[0]
    program = f"command_of() {{{body}\n}}\npython=p rounds=1 work=w rehearse=\n"
    program += (
        "rehearse=\n" + f"for s in {' '.join(steps)}; do command=(); command_of $s; " + 'echo "$s ${#command[@]}"; done'
    )
    counts = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout
    assert [line.split()[0] for line in counts.splitlines()] == steps
    assert all(int(line.split()[1]) > 2 for line in counts.splitlines())


def test_figures_of_steps_that_were_cut_off_are_kept(tmp_path: Path):
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    (work / "machine.log").write_text("a GPU\n")
    (work / "steps.tsv").write_text(
        "train\tstopped after 240 s\t240\ngenerate\tpassed\t3\nbroken\tstopped after 240 s\t240\n"
    )
    (work / "train.json").write_text('{"rows": [1]}')
    (work / "broken.json").write_text('{"rows": [')
    for step in ("train", "generate", "broken"):
        (work / f"{step}.log").write_text('text\n{"tokens_per_second": 5}\n')
    command = [sys.executable, ROOT / "benchmarks" / "collect.py", work, out / "gpu-1"]
    subprocess.run(command, check=True, timeout=60)
    found = json.loads((out / "gpu-1.json").read_text())
    assert found["steps"]["train"]["figures"] == {"rows": [1]}
    assert found["steps"]["generate"]["figures"] == [{"tokens_per_second": 5}]
    assert found["steps"]["broken"]["figures"] == {"unfinished": "broken.json"}
    with tarfile.open(out / "gpu-1.tar.gz") as archive:
        assert "train.log" in archive.getnames()


PYTHON = """#!/bin/bash
case $1 in
    -c) exit 0 ;;
    benchmarks/collect.py) exec {python} "$@" ;;
esac
echo '{{"tokens_per_second": 5}}'
[[ $* == *--one-by-one* ]] && exec sleep 300
exit 3
"""


def results(out: Path) -> dict[str, dict[str, object]]:
    """Return the steps in the one file of figures, and check the archive beside it."""
    (figures,) = out.glob("gpu-*.json")
    with tarfile.open(figures.with_suffix(".tar.gz")) as archive:
        assert "machine.log" in archive.getnames()
    return json.loads(figures.read_text())["steps"]


def test_a_signal_ends_the_step_and_keeps_its_figures(tmp_path: Path):
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "OUT": str(out)}
    command = [SCRIPT, "generate-410M", "generate-410M-steps", "generate-1.3B"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as script:
        lines = iter(script.stdout)
        while "--one-by-one" not in next(lines):
            pass
        while "tokens_per_second" not in next(lines):  # of the step that takes long
            pass
        script.send_signal(signal.SIGTERM)
        assert "cut off" in "".join(lines)
    assert script.returncode == 143
    found = results(out)
    assert {name: step["status"] for name, step in found.items()} == {
        "generate-410M": "failed with exit code 3",
        "generate-410M-steps": "cut off",
    }
    assert found["generate-410M-steps"]["figures"] == [{"tokens_per_second": 5}]


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_every_step_runs_on_a_cpu_from_a_checkout_that_is_not_installed(tmp_path: Path):
    """In an environment that finds this one's packages, but not the checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=120)
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    (site / "others.pth").write_text(os.path.dirname(os.path.dirname(pytest.__file__)) + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHON": str(tmp_path / "venv" / "bin" / "python"), "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([SCRIPT, "--rehearse"], env=environment, capture_output=True, text=True, timeout=1500)
    found = results(tmp_path)
    skipped = {"memory", "recurrent-kernels"}  # which are of GPUs alone
    assert {name for name, step in found.items() if step["status"] != "passed"} == skipped, done.stdout
    assert found["train-1.3B-engine"]["figures"]["rows"]
    assert found["generate-1.3B"]["figures"]
    assert found["longest-8B"]["figures"]["figures"][-1]["tokens"] == 512
    sides = found["speed-1.3B-32k"]["figures"]["figures"]
    assert len(sides) == 5
    assert all(side["tokens_per_second"] > 0 for side in sides)


@pytest.mark.slow
def test_ceilings_run_on_this_machine(tmp_path: Path):
    result = tmp_path / "ceilings.json"
    command = [
        sys.executable,
        ROOT / "benchmarks" / "ceilings.py",
        "--shape",
        "tiny",
        "--seconds",
        "0.01",
        "--json",
        result,
    ]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    found = json.loads(result.read_text())["shapes"]["tiny"]
    assert found["ceiling_flops_per_second"] > 0
    assert {row["product"] for row in found["products"]} >= {"query_key_value", "head"}
    assert any("refused" not in row and row["kernels"] for row in found["attention"])
