"""One machine: true exit codes, the first traceback last, signals passed on, and nothing left running, ever."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from neox.launch.agent.agent_files import ANSWER_SECONDS
from tests.end_to_end.launched_runs import ROLES, LaunchedRun, marked_pids


def test_killing_any_process_leaves_nothing_running(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    runs += [LaunchedRun(tmp_path, NEOX_DUMMY_CHILD="1") for _ in ROLES]
    for run, role in zip(runs, ROLES, strict=True):
        run.wait_up()
        os.kill(run.pids(role)[-1], signal.SIGKILL)
    for run, role in zip(runs, ROLES, strict=True):
        assert run.seconds_until_gone(10) < 10, role
        output = run.output()
        if role == "rank":
            assert run.process.returncode == 128 + signal.SIGKILL
            assert re.search(r"error: rank \d on localhost .*SIGKILL", output)
        else:
            assert run.process.returncode != 0, (role, output)


@pytest.mark.slow
def test_a_rank_that_the_kernel_kills_for_memory_is_reported_as_that(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    mount = Path("/sys/fs/cgroup/memory" if Path("/sys/fs/cgroup/memory").is_dir() else "/sys/fs/cgroup")
    group = mount / f"neox-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = next((file for file in ("memory.limit_in_bytes", "memory.max") if (group / file).exists()), None)
        assert limit is not None
        (group / limit).write_text(str(300 * 2**20))
    except (OSError, AssertionError):
        pytest.skip("needs the right to make a control group with a limit on memory")
    enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    run = LaunchedRun(tmp_path, prefix=("sh", "-c", enter, "sh"), NEOX_DUMMY="fill")
    runs.append(run)
    output = run.output(60)
    run.seconds_until_gone()
    group.rmdir()
    assert run.process.returncode == 128 + signal.SIGKILL
    assert re.search(r"error: rank 1 on localhost .*SIGKILL.* memory", output)


def test_exit_codes_and_the_first_traceback_last(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    cases = {"raise": 1, "exit7": 7, "segfault": 128 + signal.SIGSEGV, "quick": 0}
    reason = "ValueError: the reason of rank 1"
    runs += [LaunchedRun(tmp_path, NEOX_DUMMY=mode) for mode in cases]
    outputs = {mode: run.output(60) for mode, run in zip(cases, runs, strict=True)}
    assert {mode: run.process.returncode for mode, run in zip(cases, runs, strict=True)} == cases
    assert outputs["raise"].rstrip().endswith(reason)
    explanation = outputs["raise"].partition("error: rank 1 on localhost ")[2]
    assert "KeyError: 'first'" in explanation  # the chain, whole
    assert "runpy" not in outputs["raise"]
    assert "Fatal Python error: Segmentation fault" in outputs["segfault"]
    assert "rank 0 is up" in outputs["quick"]
    for run in runs:
        assert not run.pids()


def test_a_lost_connection_is_one_line_above_the_reason(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    script = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if dist.get_rank() == 1:\n    raise ValueError('the reason')\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    run = LaunchedRun(tmp_path, script=script)
    runs.append(run)
    lines = run.output(90).splitlines()
    assert run.process.returncode == 1
    assert lines[-1].endswith("ValueError: the reason")
    consequences = [line for line in lines if line.startswith("  rank 0: ")]
    assert len(consequences) == 1
    assert str(run.directory / "run" / "ranks" / "localhost" / "rank_0000.log") in consequences[0]
    assert sum("Traceback" in line for line in lines) == 1


def seconds_to_end(runs: Sequence[LaunchedRun], asked: Sequence[float], limit: float = 90) -> list[float]:
    """For each run the seconds from its signal, sent at `asked`, until no process of it lives."""
    ended: dict[int, float] = {}
    while len(ended) < len(runs):
        for number, run in enumerate(runs):
            if number not in ended and not run.pids():
                ended[number] = time.monotonic() - asked[number]
        assert time.monotonic() - asked[-1] < limit, [run.pids() for run in runs]
        time.sleep(0.05)
    return [seconds for _, seconds in sorted(ended.items())]


def test_signals_let_ranks_save(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    """How long ranks have after a signal: those that save, those that are slow but answer, and those that are stuck.

    "late": rank 1 is in the middle of a save, in which it hears nothing. Rank 0 does not wait for it.
    """
    cases = {signal.SIGTERM: 0, signal.SIGINT: 130, signal.SIGHUP: 0}  # as the ranks, which train.py ends so
    saving = [LaunchedRun(tmp_path, NEOX_DUMMY="save") for _ in cases]
    answering = LaunchedRun(tmp_path, NEOX_DUMMY="answer")
    late = LaunchedRun(tmp_path, NEOX_DUMMY="late")
    stuck = [LaunchedRun(tmp_path, NEOX_DUMMY="stubborn") for _ in range(2)]
    runs += [*saving, answering, late, *stuck]
    for run in runs:
        run.wait_up()
    asked = []
    signals = [*cases, signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT]
    for run, signum in zip(runs, signals, strict=True):
        asked.append(time.monotonic())
        run.process.send_signal(signum)
    *seconds, answered, seconds_late, terminated, interrupted = seconds_to_end(runs, asked)
    for run, code in zip(saving, cases.values(), strict=True):
        output = run.output()
        assert run.process.returncode == code, output
        assert "error" not in output
        assert "[rank 0] saved" in output
        assert "[rank 1] saved" in output
    assert max(seconds) < 10
    assert ANSWER_SECONDS < terminated < 10
    assert ANSWER_SECONDS < interrupted < 10
    for run, signum in zip(stuck, (signal.SIGTERM, signal.SIGINT), strict=True):
        output = run.output()
        assert f"within {ANSWER_SECONDS:.0f} s: killed" in output
        assert run.process.returncode == 128 + signum
    output = answering.output()
    assert answered > 9  # which is longer than a rank has that does not answer
    assert answering.process.returncode == 0, output
    assert "[rank 1] saved" in output
    output = late.output()
    assert seconds_late > 7
    assert late.process.returncode == 130, output
    assert "[rank 1] saved" in output
    assert "error" not in output


def test_a_stopped_rank_is_noticed_and_every_stack_shown(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    run = LaunchedRun(tmp_path, ["--set", "hang_timeout=3"])
    runs.append(run)
    run.wait_up()
    os.kill(run.pids("rank")[-1], signal.SIGSTOP)
    output = run.output(30)
    assert run.process.returncode == 124, output
    assert output.count("--- stacks of rank") == 2
    assert str(run.directory / "run" / "stacks.txt") in output
    assert (run.directory / "run" / "stacks.txt").read_text().count("--- stacks of rank") == 2
    assert "dummy.py" in output  # where the other rank waits
    assert "the process is stopped" in output
    assert not marked_pids(run.mark)


def test_rank_0_can_ask_and_be_answered(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    script = (
        "import os\n"
        "assert os.environ['CUDA_VISIBLE_DEVICES'] == ''  # hidden GPUs stay hidden\n"
        "if os.environ['RANK'] == '0':\n"
        "    print('hello ' + input('who? '))\n"
    )
    run = LaunchedRun(tmp_path, script=script)
    runs.append(run)
    assert run.process.stdout is not None
    assert run.process.stdin is not None
    assert run.process.stdout.read(len("who? ")) == "who? "  # shown without a line end
    run.process.stdin.write("world\n")
    run.process.stdin.flush()
    assert run.process.stdout.readline() == "hello world\n"
    assert run.process.wait(20) == 0
