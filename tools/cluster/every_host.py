"""One command on each of several hosts, over ssh or here, with the name of the host before every line of output."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from shlex import join
from typing import IO

from neox.errors import ConfigError, LaunchError
from neox.launch.commands import ssh_command
from neox.launch.hosts.hostfile import check_host_name, is_this_machine, read_hostfile
from neox.launch.spec import Host


def named_hosts(text: str | None) -> tuple[str, ...]:
    """Return the hosts of a hostfile, or of a list `a,b`; None means this machine.

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
    """Return the command that runs words on a host: the words themselves here, ssh with quoted words elsewhere."""
    if is_this_machine(host):
        return list(words)
    return ssh_command(Host(host, ()), words, ssh_port, options)


def print_commands(commands: Mapping[str, Sequence[str]]) -> None:
    """Print the command of each host, for a dry run."""
    for host, words in commands.items():
        print(f"# {host}\n{join(words)}")


class _Followed:
    """A command that runs, and the thread that prints its output."""

    def __init__(
        self, host: str, words: Sequence[str], environment: Mapping[str, str], ended: SimpleQueue[int]
    ) -> None:
        """Start the command.

        Args:
            host: Name before each line of output.
            words: The command.
            environment: Environment of the command.
            ended: Queue that gets the status of the command when it ends.

        Raises:
            LaunchError: The command cannot be started.
        """
        self._host = host
        self._ended = ended
        try:
            self.process = subprocess.Popen(
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
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        output: IO[str] | None = self.process.stdout
        assert output is not None
        for line in output:
            print(f"{self._host}: {line.rstrip()}", flush=True)
        status = self.process.wait()
        if status < 0:  # a signal ended it
            status = 128 - status
        if status:
            print(f"{self._host}: ended with status {status}", file=sys.stderr, flush=True)
        self._ended.put(status)


def run_on_hosts(
    commands: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
    *,
    end_all: Callable[[], None] | None = None,
) -> int:
    """Run one command for each host at the same time, and follow all of them.

    Args:
        commands: Host -> the words that this machine runs.
        environment: Environment of the commands.
        end_all: Function that ends what still runs on the hosts, called after the first failure and after an
            interruption; None waits for every host.

    Returns:
        0, or the status of the host that failed first (128 + N if signal N ended it).

    Raises:
        LaunchError: A command cannot be started.
    """
    followed: list[_Followed] = []
    ended: SimpleQueue[int] = SimpleQueue()
    failure = 0
    try:
        for host, words in commands.items():
            followed.append(_Followed(host, words, environment, ended))
        for _ in followed:
            status = ended.get()
            failure = failure or status
            if failure and end_all is not None:
                break
    finally:
        left = [one.process for one in followed if one.process.poll() is None]
        if left and end_all is not None:
            end_all()
        for process in left:
            process.terminate()
        for one in followed:
            one.thread.join()
    return failure
