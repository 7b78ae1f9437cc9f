"""Checks of all hosts at once before a run starts, as a table that ends with the first thing to fix."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neox.launch.commands import module_command, ssh_command
from neox.launch.hosts import is_this_machine
from neox.launch.remote import PROBE_MARK, code_hash, encode_request
from neox.launch.spec import Host, LaunchSpec, code_root

_MAX_PARALLEL = 128
_MAX_CLOCK_SECONDS = 5.0
_MIN_FREE_BYTES = 2**30
_LEGEND = (
    "slots: ranks that start there; code: hash of the project's files; acc.: GPUs that ranks may use; memory: main "
    "memory that is available; free: disk space where the run writes and reads; s: seconds until the answer"
)


@dataclass(frozen=True)
class Checks:
    """What to check on every host.

    Attributes:
        save_paths: Directories that the run writes; all hosts must see the same file system under the first.
        local_paths: Directories of local disks that the run writes.
        data_paths: Files that the run reads.
        ssh_port: Port of the ssh servers; None for ssh's own configuration.
        seconds: Time that each host has to answer.
        always_ssh: Whether this machine is asked over ssh, too, as pdsh will.
    """

    save_paths: tuple[str, ...] = ()
    local_paths: tuple[str, ...] = ()
    data_paths: tuple[str, ...] = ()
    ssh_port: int | None = None
    seconds: float = 8.0
    always_ssh: bool = False


@dataclass
class HostReport:
    """Result of the checks of one host.

    Attributes:
        host: The host.
        answer: What `neox.launch.remote.probe` returned there; empty without an answer.
        problems: Sentences, in the order in which to fix them.
        notes: Facts that are no problems.
        seconds: Duration of the answer.
    """

    host: Host
    answer: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def examine(spec: LaunchSpec, checks: Checks, environment: Mapping[str, str]) -> list[HostReport]:
    """Check all hosts in parallel.

    Args:
        spec: The run, of which hosts, port, interpreter and code directory are used.
        checks: What to check.
        environment: Variables of the ssh processes.

    Returns:
        One report for each host, in order.
    """
    workers = min(_MAX_PARALLEL, len(spec.hosts))
    with _marker_file(checks.save_paths) as (marker, problem), ThreadPoolExecutor(workers) as pool:
        jobs = [pool.submit(_ask, spec, number, checks, environment, marker) for number, _ in enumerate(spec.hosts)]
        reports = [job.result() for job in jobs]
    if problem:
        reports[0].problems.append(problem)
    _judge(reports, spec, checks, code_hash(code_root()))
    return reports


def _ask(
    spec: LaunchSpec, number: int, checks: Checks, environment: Mapping[str, str], marker: str | None
) -> HostReport:
    host = spec.hosts[number]
    request = encode_request(
        port=spec.master_port if number == 0 else None,
        paths=[*checks.save_paths, *checks.local_paths, *checks.data_paths],
        marker=marker,
    )
    command = [*module_command(spec, "neox.launch.remote"), "probe", request]
    if checks.always_ssh or not is_this_machine(host.name):
        more_options = shlex.split(environment.get("PDSH_SSH_ARGS_APPEND", ""))
        command = ssh_command(host, command, checks.ssh_port, more_options)
    report = HostReport(host)
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=checks.seconds,
            check=False,
        )
        _read(report, done, spec)
    except subprocess.TimeoutExpired:
        report.problems.append(
            f"no answer within {checks.seconds:.0f} s: is it up, and does `ssh {host.name} true` work? (--set "
            f"doctor_timeout={2 * checks.seconds:.0f} waits longer for a busy host)"
        )
    except OSError as error:
        report.problems.append(f"{command[0]} cannot be started: {error.strerror}")
    report.seconds = time.monotonic() - started
    return report


def _read(report: HostReport, done: subprocess.CompletedProcess[str], spec: LaunchSpec) -> None:
    """Read the answer, which login scripts may have surrounded with text, or add the problem to the report."""
    for line in done.stdout.splitlines():
        if line.startswith(PROBE_MARK):
            report.answer = json.loads(line[len(PROBE_MARK) :])
            return
    messages = [line for line in done.stderr.strip().splitlines() if line.strip()]
    last = messages[-1] if messages else "(no message)"
    name = report.host.name
    if done.returncode == 255:
        report.problems.append(f"ssh failed: {last}; try `ssh {name} true` (keys, host name, port)")
    elif done.returncode in (126, 127):
        report.problems.append(f"no Python at {spec.python} there: {last}; install the same environment at that path")
    elif "No module named" in last:
        report.problems.append(f"{last}: the project must be at {spec.code_root} and its environment complete there")
    else:
        report.problems.append(f"the check ended with status {done.returncode}: {last}")


def _judge(reports: Sequence[HostReport], spec: LaunchSpec, checks: Checks, code: str) -> None:
    """Add problems to the reports; `code` is the hash of the project's files on this machine."""
    answered = [report for report in reports if report.answer]
    if not answered:
        return
    for key, what, remedy in (
        ("python", "Python", "install the same version"),
        ("torch", "torch", "run `make install` there"),
        ("deepspeed", "deepspeed", "run `make install` there"),
    ):
        usual = Counter(report.answer[key] for report in answered).most_common(1)[0][0]
        for report in answered:
            if report.answer[key] == "missing":
                report.problems.append(f"{what} is not installed: {remedy}")
            elif report.answer[key] != usual:
                report.problems.append(f"{what} is {report.answer[key]}, elsewhere {usual}: {remedy}")
    for report in answered:
        if report.answer["code"] != code:
            report.problems.append(
                f"code of this project is {report.answer['code']}, on this machine {code}: copy or check out the same "
                "version there"
            )
        _judge_host(report, spec, checks)


def _judge_host(report: HostReport, spec: LaunchSpec, checks: Checks) -> None:
    answer, slots = report.answer, len(report.host.slots)
    if 0 < answer["accelerators"] < slots:
        report.problems.append(f"{slots} slots, but {answer['accelerators']} accelerators: lower slots or num_gpus")
    elif answer["accelerators"] == 0:
        report.notes.append("no accelerator: CPU ranks")
    if answer["port"] not in (None, "free"):
        report.problems.append(
            f"master port {spec.master_port}: {answer['port']}; leave master_port out, or set another"
        )
    if answer["shared"] is False:
        report.problems.append(
            f"a file that this machine wrote to {checks.save_paths[0]} is not there: the directory must be shared"
        )
    for path in (*checks.save_paths, *checks.local_paths):
        state = answer["paths"][path]
        if not state["writable"]:
            report.problems.append(f"{path} cannot be written")
        elif state["free"] < _MIN_FREE_BYTES:
            report.problems.append(f"{path} has only {state['free'] / 2**20:.0f} MiB free")
    for path in checks.data_paths:
        if not answer["paths"][path]["exists"]:
            report.problems.append(f"{path} does not exist there: put the data on a shared file system, or copy it")
    if abs(answer["clock"] - time.time()) > _MAX_CLOCK_SECONDS + report.seconds:
        report.problems.append(f"its clock is {answer['clock'] - time.time():+.0f} s off: synchronise it (NTP)")


@contextmanager
def _marker_file(paths: Sequence[str]) -> Iterator[tuple[str | None, str | None]]:
    """Create a temporary file in the first path, which other hosts should see.

    Yields:
        The file (None without paths), and why it cannot be written (None where it can).
    """
    if not paths:
        yield None, None
        return
    directory = Path(paths[0])
    created = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".doctor-{socket.gethostname()}-", dir=directory)
    except OSError as error:
        yield None, f"{directory} cannot be written on this machine: {error.strerror}"
        return
    os.close(handle)
    try:
        yield name, None
    finally:
        Path(name).unlink(missing_ok=True)
        with suppress(OSError):  # another run has begun to use it
            for path in created:
                path.rmdir()


def format_reports(reports: Sequence[HostReport]) -> str:
    """Format the reports as a table, all problems, and the first thing to fix."""
    titles = ("host", "slots", "python", "torch", "deepspeed", "code", "acc.", "memory", "free", "s", "")
    rows = [titles, *(_row(report) for report in reports)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append(_LEGEND)
    for report in reports:
        lines += [f"{report.host.name}: {problem}" for problem in report.problems]
    first = next((report for report in reports if report.problems), None)
    if first is not None:
        lines.append(f"first thing to fix, on {first.host.name}: {first.problems[0]}")
    return "\n".join(lines)


def _row(report: HostReport) -> tuple[str, ...]:
    answer = report.answer
    free = min((state["free"] for state in answer.get("paths", {}).values()), default=None)
    return (
        report.host.name,
        str(len(report.host.slots)),
        *(str(answer.get(key, "-")) for key in ("python", "torch", "deepspeed", "code", "accelerators")),
        *("-" if size is None else f"{size / 2**30:.0f} GiB" for size in (answer.get("memory"), free)),
        f"{report.seconds:.1f}",
        "PROBLEM" if report.problems else "ok" + (f" ({'; '.join(report.notes)})" if report.notes else ""),
    )
