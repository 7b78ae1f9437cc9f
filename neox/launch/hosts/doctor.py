"""Checks of all hosts, in parallel, before a run starts. The result is a table and the first thing to fix."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

from neox.launch.agent.preemption import ProbedNotice
from neox.launch.commands import MAX_CONNECTIONS, SSH_FAILED, module_command, more_ssh_options, ssh_command
from neox.launch.hosts.hostfile import is_this_machine
from neox.launch.hosts.links import LinkMeasurement, measure_links
from neox.launch.hosts.remote import PROBE_MARK, code_hash, encode_request
from neox.launch.hosts.vendors import interface_variable
from neox.launch.spec import Host, LaunchSpec, code_root

_MAX_CLOCK_SECONDS = 5.0
_MIN_FREE_BYTES = 2**30
_MOST_PRODUCT_TIMES = 4.0  # the median time of a small product
_NOTICE_SHARE = 0.5  # of the time for an answer, in which the preemption command must end
_GRACE_SECONDS = 0.5  # for a host that was lost, after all others have answered
_TITLES = (
    *("host", "slots", "python", "torch", "deepspeed", "code", "acc.", "driver"),
    *("memory", "free", "link", "s", ""),
)
_LEGEND = (
    "slots: ranks that start there; torch: version, and what it is built for; code: hash of the project's files; acc.: "
    "accelerators that ranks may use; driver: its version, and that of the vendor's libraries; memory: main memory "
    "that is available; free: disk space where the run writes and reads; link: MB/s over one TCP connection to another "
    "host; s: seconds until the answer"
)


@dataclass(frozen=True)
class HostChecks:
    """What to check on every host.

    Attributes:
        save_paths: Directories that the run writes; the first one must be the same directory on all hosts.
        local_paths: Directories of local disks that the run writes.
        data_paths: Files that the run reads.
        ssh_port: Port of the ssh servers; None for ssh's own configuration.
        seconds: Time in which each host must answer.
        always_ssh: Whether this machine is asked over ssh, too, because pdsh will start its ranks over ssh.
        links: Whether to measure the links between the hosts.
        lost: Names of hosts that have just been lost. They are given up soon after all others have answered.
        awaited: Names of hosts that may be coming back, and may lack GPUs or file systems for some time.
    """

    save_paths: tuple[str, ...] = ()
    local_paths: tuple[str, ...] = ()
    data_paths: tuple[str, ...] = ()
    ssh_port: int | None = None
    seconds: float = 8.0
    always_ssh: bool = False
    links: bool = True
    lost: frozenset[str] = frozenset()
    awaited: frozenset[str] = frozenset()


@dataclass
class HostReport:
    """Result of checking one host.

    Attributes:
        host: The host.
        answer: Result of `neox.launch.hosts.remote.probe` on the host; empty if it did not answer.
        problems: One sentence for each problem, in the order in which they should be fixed.
        notes: Facts that are not problems.
        seconds: Time until the answer.
        link_speed: Bytes per second over the slowest link to other hosts; None if it was not measured.
        unreachable: Whether ssh could not reach it, or it did not answer in time.
        awaited: Whether it may be coming back, so that its problems may end by themselves.
    """

    host: Host
    answer: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    link_speed: float | None = None
    unreachable: bool = False
    awaited: bool = False


def examine_hosts(spec: LaunchSpec, checks: HostChecks, environment: Mapping[str, str]) -> list[HostReport]:
    """Check all hosts in parallel.

    Args:
        spec: The run, whose hosts, port, interpreter and code directory are used.
        checks: What to check.
        environment: Variables of the ssh processes.

    Returns:
        One report for each host, in order.
    """
    numbers = range(len(spec.hosts))
    workers = min(MAX_CONNECTIONS, len(numbers))
    others = sum(host.name not in checks.lost for host in spec.hosts)
    others_left = _Countdown(others)

    def ask(number: int) -> HostReport:
        if others and spec.hosts[number].name in checks.lost:
            return _ask(spec, number, checks, environment, marker, others_left.over)
        try:
            return _ask(spec, number, checks, environment, marker)
        finally:
            others_left.count()

    with _marker_file(checks.save_paths) as (marker, problem), ThreadPoolExecutor(workers) as pool:
        reports = list(pool.map(ask, numbers))
    if problem:
        reports[0].problems.append(problem)
    _judge_hosts(reports, spec, checks, code_hash(code_root()))
    if checks.links:
        _check_links([report for report in reports if not report.problems], spec, checks, environment)
    return reports


class _Countdown:
    """Hosts that have not been asked to the end yet.

    Args:
        hosts: Their number.

    Attributes:
        over: Set when none is left.
    """

    def __init__(self, hosts: int) -> None:
        self._left = hosts
        self._lock = threading.Lock()
        self.over = threading.Event()

    def count(self) -> None:
        """Note that one host less is left."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.over.set()


def _ask(
    spec: LaunchSpec,
    number: int,
    checks: HostChecks,
    environment: Mapping[str, str],
    marker: str | None,
    others_are_done: threading.Event | None = None,
) -> HostReport:
    """Run the probe on one host, and return a report with the answer, or with the reason why there is none.

    Args:
        spec: The run.
        number: Number of the host.
        checks: What to check.
        environment: Variables of the ssh process.
        marker: File that the host should see.
        others_are_done: Set when there is nobody else to wait for; None to wait for this host in any case.
    """
    host = spec.hosts[number]
    port = spec.master_port if number == 0 else None  # the rendezvous is on the first host
    paths = [*checks.save_paths, *checks.local_paths, *checks.data_paths]
    variables = {}
    if spec.preemption_command is not None:
        variables = dict(spec.environment)
    seconds = checks.seconds * _NOTICE_SHARE
    preemption = ProbedNotice(spec.preemption_command, spec.preemption_file, variables, seconds)
    request = encode_request(port=port, paths=paths, marker=marker, preemption=preemption)
    command = [*module_command(spec, "neox.launch.hosts.remote"), "probe", request]
    if checks.always_ssh or not is_this_machine(host.name):
        command = ssh_command(host, command, checks.ssh_port, more_ssh_options(environment))
    report = HostReport(host, awaited=host.name in checks.awaited)
    started = time.monotonic()
    try:
        done = _run_probe(command, environment, checks.seconds, others_are_done)
        _read_answer(report, done, spec)
    except subprocess.TimeoutExpired:
        report.unreachable = True
        report.problems.append(
            f"no answer within {checks.seconds:.0f} s: is it up, and does `ssh {host.name} true` work? If it is only "
            f"busy, wait longer with --set doctor_timeout={2 * checks.seconds:.0f}"
        )
    except _GivenUpError:
        report.unreachable = True
        report.problems.append("it was lost, and did not answer while the others did")
    except OSError as error:
        report.problems.append(f"{command[0]} cannot be started: {error.strerror}")
    report.seconds = time.monotonic() - started
    return report


class _GivenUpError(Exception):
    """A probe that nobody waits for any more."""


def _run_probe(
    command: Sequence[str], environment: Mapping[str, str], seconds: float, others_are_done: threading.Event | None
) -> subprocess.CompletedProcess[str]:
    """Run a probe to its end.

    Args:
        command: Its command.
        environment: All its variables.
        seconds: Time in which it must end.
        others_are_done: Set when it is to be given up soon; None for never.

    Raises:
        subprocess.TimeoutExpired: It has not ended in time.
        _GivenUpError: It was given up.
    """
    with subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            if others_are_done is not None and _outlasts(process, seconds, others_are_done):
                raise _GivenUpError
            output, errors = process.communicate(timeout=seconds)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _outlasts(process: subprocess.Popen[str], seconds: float, others_are_done: threading.Event) -> bool:
    """Return whether a probe still runs some time after all others have ended."""
    if others_are_done.wait(seconds):
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)  # its output is short enough for the pipe
    return process.poll() is None


def _read_answer(report: HostReport, done: subprocess.CompletedProcess[str], spec: LaunchSpec) -> None:
    """Add the probe's answer, or the problem, to the report. Login scripts may have printed other lines."""
    for line in done.stdout.splitlines():
        if line.startswith(PROBE_MARK):
            report.answer = json.loads(line.removeprefix(PROBE_MARK))
            return
    last = (done.stderr.strip() or "(no message)").splitlines()[-1]
    name = report.host.name
    if done.returncode == SSH_FAILED:
        report.unreachable = True
        report.problems.append(f"ssh failed: {last}; try `ssh {name} true` (keys, host name, port)")
    elif done.returncode in (126, 127):
        report.problems.append(f"no Python at {spec.python} there: {last}; install the same environment at that path")
    elif "No module named" in last:
        report.problems.append(f"{last}: the project and its complete environment must be at {spec.code_root}")
    else:
        report.problems.append(f"the check ended with status {done.returncode}: {last}")


def _judge_hosts(reports: Sequence[HostReport], spec: LaunchSpec, checks: HostChecks, code: str) -> None:
    """Add problems to the reports: what is wrong on each host, and how it differs from most hosts.

    Args:
        reports: Reports of all hosts.
        spec: The run.
        checks: What was checked.
        code: Hash of the project's files on this machine.
    """
    answered = [report for report in reports if report.answer]
    if not answered:
        return
    _compare_versions(answered, "python", "Python", "install the same version")
    _compare_versions(answered, "torch", "torch", "run `make install` there")
    _compare_versions(answered, "deepspeed", "deepspeed", "run `make install` there")
    _compare_versions(answered, "torch_build", "torch's build", "install the same build there")
    _compare_versions(answered, "vendor", "the accelerators' vendor", "one run needs accelerators of one vendor")
    usual_seconds = median_low(report.answer["product_seconds"] for report in answered)
    with_accelerators = sum(report.answer["accelerators"] > 0 for report in answered)
    for report in answered:
        times = report.answer["product_seconds"] / usual_seconds
        if times > _MOST_PRODUCT_TIMES:
            report.problems.append(
                f"its processor takes {times:.0f} times as long for a small product as the median of the hosts: look "
                "for other programs, power limits and heat, or leave it out"
            )
        if report.answer["code"] != code:
            report.problems.append(
                f"the project's code differs: its hash is {report.answer['code']} there and {code} here; copy or check "
                "out the same version there"
            )
        notice = report.answer.get("preemption")  # missing in answers of other versions
        if notice is not None:
            report.problems.append(f"it is about to be preempted: {notice}")
        if not report.answer["product"]:
            report.problems.append("its processor multiplies wrongly: leave it out, and have it repaired")
        _judge_accelerators(report, others_have_some=2 * with_accelerators >= len(answered))
        port_state = report.answer["port"]
        if port_state not in (None, "free"):
            report.problems.append(
                f"master port {spec.master_port}: {port_state}; leave master_port out, or set another"
            )
        _judge_paths(report, checks)
        clock_difference = report.answer["clock"] - time.time()
        if abs(clock_difference) > _MAX_CLOCK_SECONDS + report.seconds:
            report.problems.append(f"its clock is {clock_difference:+.0f} s off: synchronise it (NTP)")


def _compare_versions(answered: Sequence[HostReport], key: str, name: str, remedy: str) -> None:
    """Add a problem to each report whose version is missing, or differs from that of most hosts.

    Hosts without a version, because they have no accelerator or other code, are not compared.
    """
    versions = Counter(report.answer[key] for report in answered if report.answer.get(key) is not None)
    if not versions:
        return
    usual = versions.most_common(1)[0][0]
    for report in answered:
        version = report.answer.get(key)
        if version == "missing":
            report.problems.append(f"{name} is not installed: {remedy}")
        elif version not in (usual, None):
            report.problems.append(f"{name} is {version}, elsewhere {usual}: {remedy}")


def _judge_accelerators(report: HostReport, *, others_have_some: bool) -> None:
    slots = len(report.host.slots)
    accelerators = report.answer["accelerators"]
    torch_problem = report.answer.get("torch_problem")  # missing in answers of other versions
    if torch_problem is not None:
        report.problems.append(torch_problem)
    if accelerators == 0 and others_have_some:
        report.problems.append("no accelerator, unlike other hosts: look at its driver, or leave it out")
    elif accelerators == 0:
        report.notes.append("no accelerator: CPU ranks")
    elif accelerators < slots:
        report.problems.append(f"{slots} slots, but only {accelerators} accelerator(s): lower slots or num_gpus")


def _judge_paths(report: HostReport, checks: HostChecks) -> None:
    states = report.answer["paths"]
    if report.answer["shared"] is False:
        report.problems.append(
            f"a file that this machine wrote to {checks.save_paths[0]} is not there: the directory must be shared"
        )
    for path in (*checks.save_paths, *checks.local_paths):
        if not states[path]["writable"]:
            report.problems.append(f"{path} cannot be written")
        elif states[path]["free"] < _MIN_FREE_BYTES:
            report.problems.append(f"{path} has only {states[path]['free'] / 2**20:.0f} MiB free")
    for path in checks.data_paths:
        if not states[path]["exists"]:
            report.problems.append(f"{path} does not exist there: put the data on a shared file system, or copy it")


def _check_links(
    reports: Sequence[HostReport], spec: LaunchSpec, checks: HostChecks, environment: Mapping[str, str]
) -> None:
    """Measure the links between hosts, and add the speeds and problems to the reports."""
    if len(reports) < 2:
        return
    token = secrets.token_hex(16)
    commands = []
    for report in reports:
        vendor = report.answer.get("vendor") if report.answer["accelerators"] else None
        variable = interface_variable(vendor)
        words = [*module_command(spec, "neox.launch.hosts.links"), spec.environment.get(variable, ""), token]
        commands.append(ssh_command(report.host, words, checks.ssh_port, more_ssh_options(environment)))
    with LinkMeasurement(commands, environment, checks.seconds) as measurement:
        results = measure_links([report.host.name for report in reports], measurement)
    for report, result in zip(reports, results, strict=True):
        report.link_speed = result.speed
        if result.problem:
            report.problems.append(result.problem)


@contextmanager
def _marker_file(paths: Sequence[str]) -> Iterator[tuple[str | None, str | None]]:
    """Create a temporary file in the first path, which other hosts should see.

    Yields:
        The file (None without paths), and the reason if it cannot be written (else None).
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
        with suppress(OSError):  # it is not empty: another run has begun to use it
            for path in created:
                path.rmdir()


def format_reports(reports: Sequence[HostReport]) -> str:
    """Format the reports: a table, then all problems, then the first thing to fix."""
    rows = [_TITLES, *map(_row, reports)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.append(_LEGEND)
    first_thing = None
    for report in reports:
        for problem in report.problems:
            lines.append(f"{report.host.name}: {problem}")
            if first_thing is None:
                first_thing = f"first thing to fix, on {report.host.name}: {problem}"
    if first_thing is not None:
        lines.append(first_thing)
    return "\n".join(lines)


def _row(report: HostReport) -> tuple[str, ...]:
    answer = report.answer
    free_bytes = [state["free"] for state in answer.get("paths", {}).values()]
    torch = str(answer.get("torch", "-"))
    if answer.get("torch_build") is not None:
        torch += f" ({answer['torch_build']})"
    accelerators = str(answer.get("accelerators", "-"))
    if answer.get("vendor") is not None:
        accelerators += f" {answer['vendor']}"
    driver = ", ".join(filter(None, (answer.get("driver"), answer.get("library"))))
    verdict = "ok"
    if report.problems:
        verdict = "PROBLEM"
    elif report.notes:
        verdict = f"ok ({'; '.join(report.notes)})"
    return (
        report.host.name,
        str(len(report.host.slots)),
        str(answer.get("python", "-")),
        torch,
        str(answer.get("deepspeed", "-")),
        str(answer.get("code", "-")),
        accelerators,
        driver or "-",
        _gibibytes(answer.get("memory")),
        _gibibytes(min(free_bytes, default=None)),
        "-" if report.link_speed is None else f"{report.link_speed / 1e6:,.0f}",
        f"{report.seconds:.1f}",
        verdict,
    )


def _gibibytes(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size / 2**30:.0f} GiB"
