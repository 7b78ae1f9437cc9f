"""One command on each of several hosts: over ssh or here, with the host before every line of output."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from typing import IO

from neox.errors import ConfigError, LaunchError
from neox.launch.commands import ssh_command
from neox.launch.hosts import check_host_name, is_this_machine, read_hostfile
from neox.launch.spec import Host

_POLL = 0.2  # seconds


def named_hosts(text: str | None) -> tuple[str, ...]:
    """Return the hosts of a hostfile, or of a list `a,b`; this machine where nothing is given.

    Raises:
        ConfigError: The file is wrong or missing, or a word is no host name.
    """
    if text is None:
        return ("localhost",)
    if Path(text).is_file() or "/" in text or Path(text).suffix == ".txt" or "hostfile" in text:
        return tuple(host.name for host in read_hostfile(text))
    names = [name for name in text.replace(" ", ",").split(",") if name]
    if not names or len({*names}) < len(names):
        raise ConfigError(f"--hosts {text!r}: expected a hostfile, or names such as worker-1,worker-2, each once")
    return tuple(check_host_name(name, "--hosts") for name in names)


def command_on(host: str, words: Sequence[str], ssh_port: int | None, options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs words on a host: themselves here, over ssh elsewhere, each word quoted."""
    return list(words) if is_this_machine(host) else ssh_command(Host(host, ()), words, ssh_port, options)


def print_commands(commands: Mapping[str, Sequence[str]]) -> None:
    """Print the command of each host, for a dry run."""
    for host, words in commands.items():
        print(f"# {host}\n{join(words)}")


@dataclass
class _Running:
    host: str
    process: subprocess.Popen[str]


def run_on_hosts(
    commands: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
    *,
    end_all: Callable[[], None] | None = None,
) -> int:
    """Run one command for each host at the same time, and follow all of them.

    Args:
        commands: Host -> the words that this machine runs.
        environment: Of the commands.
        end_all: Ends what still runs on the hosts, after the first failure and after an interruption; None to wait for
            every host.

    Returns:
        0, or the status of the host that failed first (128 + N where signal N ended it).

    Raises:
        LaunchError: A command cannot be started.
    """
    started: list[_Running] = []
    first: list[int] = []
    failed = threading.Event()

    def follow(running: _Running) -> None:
        output: IO[str] | None = running.process.stdout
        assert output is not None
        for line in output:
            print(f"{running.host}: {line.rstrip()}", flush=True)
        status = running.process.wait()
        if status:
            first.append(status if status > 0 else 128 - status)
            print(f"{running.host}: ended with status {first[-1]}", file=sys.stderr, flush=True)
            failed.set()

    threads: list[threading.Thread] = []
    try:
        for host, words in commands.items():
            try:
                process = subprocess.Popen(
                    words,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                )
            except OSError as error:
                raise LaunchError(f"{host}: {words[0]} cannot be started: {error.strerror}") from None
            started.append(_Running(host, process))
            threads.append(threading.Thread(target=follow, args=(started[-1],), daemon=True))
            threads[-1].start()
        while any(thread.is_alive() for thread in threads) and not (failed.is_set() and end_all is not None):
            for thread in threads:
                thread.join(_POLL / len(threads))
    finally:
        left = [running for running in started if running.process.poll() is None]
        if left and end_all is not None:
            end_all()
        for running in left:
            running.process.terminate()
        for thread in threads:
            thread.join()
    return first[0] if first else 0
