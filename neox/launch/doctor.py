"""Checking every host at once before anything starts: one table, and the first thing to fix."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neox.launch.commands import ssh_command
from neox.launch.placement import is_this_machine
from neox.launch.probe import code_hash, encode_request
from neox.launch.spec import Host, LaunchSpec, code_root

_AT_ONCE = 128
_CLOCK_SECONDS = 5.0
_LEAST_FREE = 2**30
_ANSWER = "@probe "


@dataclass(frozen=True)
class Checks:
    """save_paths are written, data_paths read; several hosts must see one file system under the first save path."""

    save_paths: tuple[str, ...] = ()
    data_paths: tuple[str, ...] = ()
    ssh_port: int | None = None
    seconds: float = 8.0  # that each host has to answer
    always_ssh: bool = False  # this machine too, as pdsh will


@dataclass
class HostReport:
    """One host's answer; problems come in the order in which to fix them."""

    host: Host
    answer: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def examine(spec: LaunchSpec, checks: Checks, environment: Mapping[str, str]) -> list[HostReport]:
    """Ask all hosts in parallel, and judge the answers; with `checks.seconds` as it is in under ten seconds."""
    with _marker(checks.save_paths) as (marker, problem), ThreadPoolExecutor(min(_AT_ONCE, len(spec.hosts))) as pool:
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
        paths=[*checks.save_paths, *checks.data_paths],
        marker=marker,
    )
    command = ["env", f"PYTHONPATH={spec.code_root}", spec.python, "-m", "neox.launch.probe", request]
    if checks.always_ssh or not is_this_machine(host.name):
        command = ssh_command(host, command, checks.ssh_port)
        command[1:1] = shlex.split(environment.get("PDSH_SSH_ARGS_APPEND", ""))
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
    """Find the answer among whatever login scripts print; otherwise say what went wrong."""
    for line in done.stdout.splitlines():
        if line.startswith(_ANSWER):
            report.answer = json.loads(line[len(_ANSWER) :])
            return
    words = [line for line in done.stderr.strip().splitlines() if line.strip()]
    last = words[-1] if words else "(no message)"
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
    """Add to the reports what is wrong; `code` is the hash of the project's files on this machine."""
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
    for path in checks.save_paths:
        state = answer["paths"][path]
        if not state["writable"]:
            report.problems.append(f"{path} cannot be written")
        elif state["free"] < _LEAST_FREE:
            report.problems.append(f"{path} has only {state['free'] / 2**20:.0f} MiB free")
    for path in checks.data_paths:
        if not answer["paths"][path]["exists"]:
            report.problems.append(f"{path} does not exist there: put the data on a shared file system, or copy it")
    if abs(answer["clock"] - time.time()) > _CLOCK_SECONDS + report.seconds:
        report.problems.append(f"its clock is {answer['clock'] - time.time():+.0f} s off: synchronise it (NTP)")


@contextmanager
def _marker(paths: Sequence[str]) -> Iterator[tuple[str | None, str | None]]:
    """A file in the first save path (None without one) that other hosts should see, or why this machine cannot write
    it; file and a path made for it go."""
    if not paths:
        yield None, None
        return
    directory = Path(paths[0])
    made = [path for path in (directory, *directory.parents) if not path.exists()]
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
            for path in made:
                path.rmdir()


def format_reports(reports: Sequence[HostReport]) -> str:
    """A table of all hosts, then the first thing to fix."""
    head = ("host", "slots", "python", "torch", "deepspeed", "code", "acc.", "free", "s", "")
    rows = [head, *(_row(report) for report in reports)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
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
        "-" if free is None else f"{free / 2**30:.0f} GiB",
        f"{report.seconds:.1f}",
        "PROBLEM" if report.problems else "ok" + (f" ({'; '.join(report.notes)})" if report.notes else ""),
    )


def print_reports(reports: Sequence[HostReport]) -> None:
    """Print the table to stderr."""
    print(format_reports(reports), file=sys.stderr, flush=True)
