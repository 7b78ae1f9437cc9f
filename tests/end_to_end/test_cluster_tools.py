"""Tools for clusters: ending one run among several, and containers of a stand-in engine on two machines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from neox.launch.processes import is_alive
from tests.end_to_end.launched_runs import ROOT, LaunchedRun
from tests.end_to_end.network_namespaces import TwoMachines, two_machines, why_not

_REASON = why_not()
on_two_machines = pytest.mark.skipif(_REASON is not None, reason=_REASON or "")

# Runs what follows the image, writes down what it was asked for, and knows `rm --force NAME`.
ENGINE = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path

words, here = sys.argv[1:], Path(__file__).parent
if words[:2] == ["rm", "--force"]:
    os.kill(int((here / words[2]).read_text()), 9)
    sys.exit(0)
options = words[: words.index("IMAGE")]
name = next(word.partition("=")[2] for word in options if word.startswith("--name="))
(here / name).write_text(str(os.getpid()))
(here / (name + ".json")).write_text(json.dumps(words))
for word in options:
    if word.startswith("--env="):
        variable, _, value = word.removeprefix("--env=").partition("=")
        os.environ[variable] = value
    if word.startswith("--workdir="):
        os.chdir(word.partition("=")[2])
command = words[words.index("IMAGE") + 1 :]
os.execvp(command[0], command)
"""


def tool(name: str, *arguments: str, prefix: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, str(ROOT / "tools" / name), *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_kill_ends_the_run_that_is_named_and_no_other(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    runs += [LaunchedRun(tmp_path, NEOX_DUMMY="save"), LaunchedRun(tmp_path)]
    for run in runs:
        run.wait_up()
    ended, other = runs
    before = other.pids()
    killing = tool("cluster.py", "kill", str(ended.directory / "run"))
    assert "localhost: signalled" in killing.communicate(timeout=60)[0]
    assert killing.returncode == 0
    output = ended.output(30)
    assert ended.process.returncode == 0, output
    assert "[rank 0] saved" in output
    ended.seconds_until_gone()
    assert other.pids() == before
    again = tool("cluster.py", "kill", str(ended.directory / "run"), "--now")
    assert "localhost: not running here" in again.communicate(timeout=60)[0]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    with two_machines(tmp_path_factory.mktemp("machines")) as both:
        yield both


def containers(machines: TwoMachines, directory: Path, command: str, *more: str) -> subprocess.Popen[str]:
    engine, hostfile = directory / "docker", directory / "hostfile"
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    hostfile.write_text("".join(f"{host} slots=2\n" for host in machines.hosts))
    flags = ["--engine", str(engine), "--image", "IMAGE", "--src", str(directory), "--py", sys.executable]
    flags += ["--hosts", str(hostfile), "--cmd", command, *more]
    prefix = tuple(machines.inside([]))
    return tool("launch_container.py", *flags, prefix=prefix, **machines.environment)


def by_host(directory: Path) -> list[tuple[int, list[str]]]:
    """Process and words of each host's container, by the number of the host."""
    found = sorted(directory.glob("neox-*.json"), key=lambda path: path.stem.rpartition("-")[2])
    return [(int(path.with_suffix("").read_text()), json.loads(path.read_text())) for path in found]


@pytest.mark.slow
@pytest.mark.netns
@on_two_machines
@pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")
def test_sync_copies_to_the_same_path(machines: TwoMachines, tmp_path: Path) -> None:
    here, there = tmp_path / "a b", tmp_path / "there"
    for file in (here / "neox" / "new.py", here / "runs" / "log", here / ".git" / "HEAD", there / "old.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)
    (there / "runs").mkdir()
    host = machines.add_machine(3, instead=there, of=here)

    def sync(*flags: str) -> set[str]:
        hosts = f"{machines.hosts[0]},{host}"
        prefix = tuple(machines.inside([]))
        running = tool("cluster.py", "sync", "-H", hosts, *flags, str(here), prefix=prefix, **machines.environment)
        output = running.communicate(timeout=60)[0]
        assert running.returncode == 0, output
        return {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}

    assert sync() == {"neox/new.py", "old.py"}
    assert sync("--delete") == {"neox/new.py"}
    assert (there / "runs").is_dir()


@pytest.mark.netns
@on_two_machines
def test_a_container_on_every_host(machines: TwoMachines, tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text("import os, sys\nprint(os.getcwd(), os.environ['NEOX_ODD'], sys.argv[1:])\n")
    odd = "a b;$(touch pwned)`touch pwned`%h"
    running = containers(
        machines, tmp_path, f"python say.py {{node}}/{{nodes}} {{master}} '{odd}'", "--rdma", "--env", f"NEOX_ODD={odd}"
    )
    output = running.communicate(timeout=60)[0]
    assert running.returncode == 0, output
    for number, host in enumerate(machines.hosts):
        assert f"{host}: {tmp_path} {odd} {[f'{number}/2', machines.hosts[0], odd]}" in output
    assert not list(tmp_path.rglob("pwned"))
    assert all("--device=/dev/infiniband" in words for _, words in by_host(tmp_path))


@pytest.mark.netns
@on_two_machines
def test_the_first_failure_removes_the_other_containers(machines: TwoMachines, tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(
        "import sys, time\nprint('up', flush=True)\ntime.sleep(3 if sys.argv[1] == '1' else 600)\nsys.exit(7)\n"
    )
    running = containers(machines, tmp_path, "python wait.py {node}")
    output = running.communicate(timeout=60)[0]
    assert running.returncode == 7, output
    assert f"{machines.hosts[1]}: ended with status 7" in output
    deadline = time.monotonic() + 10
    while any(is_alive(process) for process, _ in by_host(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(by_host(tmp_path)) == 2
