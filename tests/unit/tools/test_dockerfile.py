"""The Dockerfile: its stages, its packages, and its RUN lines in an environment as empty as this machine allows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()


def stage(name: str) -> list[tuple[str, str]]:
    """Instructions of a stage, those of the stages below it first."""
    found: list[tuple[str, str]] = []
    inside = False
    for line in LINES:
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, own = rest.partition(" AS ")
            inside = own == name
            if inside and any(other.startswith("FROM ") and other.endswith(f" AS {base}") for other in LINES):
                found = stage(base)
        elif inside and instruction.isupper():
            found.append((instruction, rest))
    return found


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_commands_run_as_a_user_who_is_not_root(name: str) -> None:
    users = [rest for instruction, rest in stage(name) if instruction == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    made = [rest for instruction, rest in stage(name) if instruction == "RUN" and "useradd" in rest]
    assert users[-1] in made[0].split()
    after = stage(name)[[instruction for instruction, _ in stage(name)].index("USER") :]
    assert ("RUN", "make install") in [(i, " ".join(rest.split()[:2])) for i, rest in after]


def test_what_a_checkout_gathers_stays_out_of_the_image() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "data", "runs"} <= {*ignored}


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_its_packages_exist(name: str) -> None:
    if shutil.which("apt-cache") is None or not list(Path("/var/lib/apt/lists").glob("*_Packages*")):
        pytest.skip("needs Debian's lists of packages (apt-get update)")
    for instruction, rest in stage(name):
        if instruction == "RUN" and "apt-get install" in rest:
            listed = rest.partition("apt-get install")[2].partition("&&")[0].split()
            packages = [word for word in listed if not word.startswith("-")]
            done = subprocess.run(["apt-cache", "policy", *packages], capture_output=True, text=True, check=True)
            assert done.stdout.count("Candidate: ") == len(packages), done.stdout
            assert "Candidate: (none)" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_run_lines_of_the_cpu_stage_make_an_environment_that_plans(tmp_path: Path) -> None:
    """All RUN lines, as they are, where `apt-get`, `useradd` and `chown` do nothing."""
    project, programs = tmp_path / "neox", tmp_path / "programs"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, project / name)
    programs.mkdir()
    for name in ("apt-get", "useradd", "chown", "mkdir", "rm"):
        real = shutil.which(name)
        # what the lines make and remove outside the project is the container's
        body = f'for word; do case "$word" in /opt/*|/var/*) exit 0;; esac; done; exec {real} "$@"'
        (programs / name).write_text(f"#!/bin/sh\n{body if name in ('mkdir', 'rm') else 'exit 0'}\n")
        (programs / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    for settings in (Path.home() / ".config/pip/pip.conf", Path.home() / ".pip/pip.conf"):
        if settings.is_file():  # names this machine's index of packages
            environment["PIP_CONFIG_FILE"] = str(settings)
    environment |= {"PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path), "PIP_RETRIES": "1"}
    for instruction, rest in stage("cpu"):
        if instruction == "RUN":
            done = subprocess.run(["sh", "-ec", rest], cwd=project, env=environment, capture_output=True, text=True)
            if "No matching distribution found" in done.stderr:
                missing = next(line for line in done.stderr.splitlines() if "No matching distribution found" in line)
                pytest.skip(f"needs an index of packages: {missing}")
            assert done.returncode == 0, f"{rest}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    planned = [str(project / ".venv/bin/python"), "deepy.py", "train.py", "-d", "configs", "125M.yml", "--dry-run"]
    planned += ["--set", "train_iters=10", "--hosts", "1", "--gpus", "1"]
    done = subprocess.run(planned, cwd=project, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout
