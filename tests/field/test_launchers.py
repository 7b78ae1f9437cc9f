"""What others reported of launchers, hostfiles, environment files and visible devices."""

from __future__ import annotations

import logging
import socket
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

from neox.config import NeoXConfig
from neox.config.sections.runner import RunnerConfig
from neox.engine.device import choose_device
from neox.errors import ConfigError, LaunchError
from neox.launch.agent.rank_group import host_variables
from neox.launch.environment import environment_file, forwarded_environment
from neox.launch.hosts import hostfile as hosts
from neox.launch.hosts import vendors
from neox.launch.hosts.hostfile import is_this_machine, read_hostfile, select_hosts
from neox.launch.hosts.placement import choose_hosts, place_ranks
from neox.launch.hosts.rendezvous import master_address
from neox.launch.hosts.vendors import NVIDIA, VISIBLE_VARIABLES
from neox.launch.launcher_choice import chosen_launcher, launcher_problem
from neox.launch.spec import Host, LaunchSpec


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VISIBLE_VARIABLES, "DS_ACCELERATOR", "DLTS_HOSTFILE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def hostfile(tmp_path: Path, text: str) -> str:
    path = tmp_path / "hostfile"
    path.write_text(text)
    return str(path)


def test_values_of_deepspeed_env_are_a_shells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed PR 1907, 5878, 7071, #6997: quotes, references and special characters."""
    monkeypatch.chdir(tmp_path)
    text = 'GLOO_SOCKET_IFNAME="lo"\nLD_LIBRARY_PATH=/opt/efa/lib64:$LD_LIBRARY_PATH\nSLURM_X=64(x2)\n'
    (tmp_path / ".deepspeed_env").write_text(text + 'PYTHONPATH=/a\nJSON=\'{"a": "b"}\'\n')
    assert environment_file({"HOME": "/none", "LD_LIBRARY_PATH": "/old"}) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "LD_LIBRARY_PATH": "/opt/efa/lib64:/old",
        "SLURM_X": "64(x2)",
        "PYTHONPATH": "/a",
        "JSON": '{"a": "b"}',
    }
    (tmp_path / ".deepspeed_env").write_text('JSON={"a": "b"}\n')  # of which a shell makes {a: b}
    with pytest.raises(ConfigError):
        environment_file({"HOME": "/none"})


def test_deepspeed_env_of_both_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed PR 4992, 4006: the home directory's file counts beside the current one's, under each name."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (".deepspeed_env", ".mine"):
        (tmp_path / "home" / name).write_text("A=home\nB=home\n")
        (tmp_path / name).write_text("B=here\n")
    for named in ({}, {"DS_ENV_FILE": ".mine"}):
        assert environment_file({"HOME": str(tmp_path / "home"), **named}) == {"A": "home", "B": "here"}


@pytest.mark.slow
def test_deepspeeds_launcher_makes_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words that DeepSpeed's pdsh runner writes for a shell, read by a shell."""
    import subprocess

    from deepspeed.launcher.multinode_runner import PDSHRunner

    lines = ['A="lo"', "B=/opt:$LD", "C=64(x2)", "D=a b", "E=8.0;9.0", "F=plain", "G=${LD}x", "H=-Da=b", "I=\\$LD"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("\n".join(lines))
    runner = PDSHRunner(SimpleNamespace(user_args=[], user_script="x"), "")
    for line in lines:
        runner.add_export(*line.split("=", 1))
    script = "".join(f"export {name}={value}; " for name, value in runner.exports.items()) + "exec env"
    done = subprocess.run(["sh", "-c", script], env={"LD": "/ld"}, capture_output=True, text=True, check=True)
    theirs = dict(line.split("=", 1) for line in done.stdout.splitlines())
    ours = environment_file({"HOME": "/none", "LD": "/ld"})
    assert ours == {name: theirs[name] for name in ours}
    assert len(ours) == len(lines)


def test_hostfiles_of_open_mpi_and_mpich(tmp_path: Path) -> None:
    """accelerate PR 514, DeepSpeed's documentation: its hostfiles are those of Open MPI."""
    eight = tuple(range(8))
    text = "worker-1 slots=8 max_slots=8\nworker-2 slots=8 max-slots=8\nworker-3 max_slots=9 slots = 8 # busy\n"
    text += "worker-4:8\nworker-5 count=8\nworker-6 slots=8 username=me\nme@worker-7 slots=8\n"
    read = read_hostfile(hostfile(tmp_path, text))
    names = ["worker-1", "worker-2", "worker-3", "worker-4", "worker-5", "me@worker-6", "me@worker-7"]
    assert read == tuple(Host(name, eight) for name in names)
    assert read_hostfile(hostfile(tmp_path, "a slots=2 max_slots=2 spare\nb slots=1\n"))[0].spare


@pytest.mark.parametrize("line", ["x lots=8", "x slots=8 port=22", "x slots=8 8", "x slots=-8", "x slots=08x", "x:"])
def test_a_wrong_line_is_shown_with_its_place(tmp_path: Path, line: str) -> None:
    """DeepSpeed#3669: the message held a placeholder instead of the line."""
    with pytest.raises(ConfigError) as error:
        read_hostfile(hostfile(tmp_path, f"y slots=8\n{line}\n"))
    assert "hostfile:2" in str(error.value)
    assert line in str(error.value)


def test_one_host_under_any_of_its_names_runs_without_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed#662, #4907: a hostfile that names only this machine, by address or by name."""
    (tmp_path / "hosts").write_text("127.0.1.1 node7.cluster.org node7 head\n10.1.2.3 other # node8\n")
    monkeypatch.setattr(hosts, "_HOSTS_FILE", tmp_path / "hosts")
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.cluster.org")
    monkeypatch.setattr(hosts, "sending_address", lambda host: host if host in ("10.1.2.9", "fd00::9") else "10.1.2.9")
    own = ["localhost", "LOCALHOST", "127.0.0.1", "127.0.1.1", "::1", "10.1.2.9", "fd00::9"]
    own += ["node7", "node7.cluster.org", "Node7", "head"]
    for name in own:
        (host,) = read_hostfile(hostfile(tmp_path, f"{name} slots=2\n"))
        assert is_this_machine(name)
        assert chosen_launcher([host], RunnerConfig()) == "local"
        assert select_hosts([host], include=f"{name}:1") == (Host(name, (1,)),)
    for name in ("node8", "node7.elsewhere.org", "other", "10.1.2.3", "fd00::8", "0.0.0.0", "somebody@node7"):
        assert not is_this_machine(name)
    assert launcher_problem([Host("fd00::8", (0,)), Host("b", (0,))], RunnerConfig()) is not None  # pdsh cannot


def test_localhost_as_the_first_of_several_hosts(tmp_path: Path) -> None:
    """accelerate#1317: other hosts cannot meet at `localhost`."""
    found = place_ranks(RunnerConfig(hostfile=hostfile(tmp_path, "localhost slots=2\n192.0.2.7 slots=2\n")))
    address = master_address(found, RunnerConfig())
    assert not hosts.is_loopback(address)
    assert address in (socket.gethostname(), hosts.sending_address("192.0.2.7"))


@pytest.mark.parametrize("given", ["4,5,6,7", "GPU-8932f937,GPU-1,GPU-2,GPU-3", "0,1,6,7"])
def test_gpus_that_a_scheduler_gave_to_a_host(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """DeepSpeed#1331, #7155, #5278, #2976: 0 to 3 would be another job's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr(vendors, "present_devices", lambda root=None: (NVIDIA, 8))
    for slots in ((0, 1, 2, 3), (1, 3)):
        spec = LaunchSpec("id", (Host("far", slots),), "::1", 1, "s.py", (), "/", "/", "/", sys.executable)
        shown = host_variables(spec, 0, spec.hosts[0], {}, Path("progress"))["CUDA_VISIBLE_DEVICES"]
        assert shown == ",".join(given.split(",")[slot] for slot in slots)


def test_one_gpu_for_each_task_of_a_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed PR 3165, OpenRLHF#402: a rank that sees only its own GPU, or its own instance of a divided one."""
    import os

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.set_device", lambda index: None)
    monkeypatch.setattr("neox.engine.device.get_accelerator", CUDA_Accelerator)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert choose_device(3).index == 0
    assert os.environ["LOCAL_RANK"] == "0"
    monkeypatch.setenv("LOCAL_SIZE", "4")  # our agent shows all ranks of a host the same GPUs
    with pytest.raises(LaunchError):
        choose_device(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-cfb2a8ae")
    assert choose_device(3).index == 0
    monkeypatch.delenv("LOCAL_SIZE")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # torchrun
    with pytest.raises(LaunchError):
        choose_device(3)


def test_variables_of_python_reach_the_hosts() -> None:
    """DeepSpeed#158, determined PR 4297: not only PYTHONPATH, and library paths."""
    given = {"PYTHONHASHSEED": "0", "LD_LIBRARY_PATH": "/lib", "MLFLOW_TRACKING_URI": "x", "HCCL_IF_BASE_PORT": "1"}
    assert forwarded_environment({**given, "PYENV_ROOT": "/x"}) == given


def test_slots_that_the_hostfile_does_not_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """DeepSpeed#3624: `slots=2` are slots 0 and 1, and the message says so."""
    read = read_hostfile(hostfile(tmp_path, "work1 slots=2\nwork2 slots=2\n"))
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError) as error:
        select_hosts(read, include="work1:2,3")
    assert "work1 has 2 slots" in str(error.value)


def test_slurm_cannot_give_single_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed PR 8304: srun takes a number of devices."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    runner = RunnerConfig(launcher="slurm")
    assert launcher_problem([Host("a", (0, 1)), Host("b", (0, 1))], runner) is None
    assert "2,3" in str(launcher_problem([Host("a", (2, 3)), Host("b", (0, 1))], runner))
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # and no GPUs: the hosts show their own
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    monkeypatch.delenv("SLURM_GPUS_PER_NODE", raising=False)
    assert launcher_problem([Host("a", (2, 3)), Host("b", (0, 1))], runner) is None


@pytest.mark.parametrize(
    "given",
    [
        {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"},
        {"OMPI_COMM_WORLD_RANK": "1"},
        {"TORCHELASTIC_RUN_ID": "x", "RANK": "0"},
    ],
)
def test_the_command_itself_under_a_launcher_of_ranks(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    """gpt-neox#784: one command for each task."""
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    config = NeoXConfig.from_flat({"num_gpus": 1})
    with pytest.raises(LaunchError):
        choose_hosts(config, Namespace(dry_run=False, hosts=None, gpus=None))
    choose_hosts(config, Namespace(dry_run=True, hosts=None, gpus=None))


def test_devices_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with accelerators and a torch for CPUs is not trained on in silence."""
    monkeypatch.setattr(vendors, "present_devices", lambda root=None: (vendors.ASCEND, 8))
    with pytest.raises(LaunchError):
        choose_device(0)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert choose_device(0).type == "cpu"
