"""Commands that start a container on each host by docker, podman or apptainer, as words that no shell reads."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neox.errors import ConfigError
from neox.launch.environment import is_secret

ENGINES = ("docker", "podman", "apptainer")
# Installs a wheel and becomes the command: `PYTHON -c _INSTALL WHEEL COMMAND...`.
_INSTALL = (
    "import os, subprocess, sys; "
    "subprocess.run([sys.executable, '-m', 'pip', 'install', '--user', '--no-deps', sys.argv[1]], check=True); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
_SIZE = re.compile(r"\d+[bkmgBKMG]?")
_PLACES = ("node", "nodes", "host", "master")


@dataclass(frozen=True)
class Container:
    """A command in a container. It is the same on every host, except for the places in its words.

    Attributes:
        engine: One of `ENGINES`, or the path of one on the hosts.
        image: Name of the image, as the engine takes it.
        source: Directory that is mounted at its own path; it is the working directory.
        command: Words of the command. The places `{node}`, `{nodes}`, `{host}` and `{master}` become the host's number,
            the number of hosts, the host's name and the first host's name.
        python: Interpreter in the image; it replaces a first word `python`, and installs the wheel.
        wheel: Wheel that is installed before the command starts; None for none.
        mounts: Further directories, `PATH[:PATH_INSIDE[:ro]]`.
        variables: `NAME=value` lines of the environment.
        gpus: Whether the container gets the host's GPUs.
        rdma: Whether it gets `/dev/infiniband`, and may lock memory.
        shm_size: Size of its shared memory; None shares the host's.
        user: `UID:GID` that runs the command.
    """

    engine: str
    image: str
    source: Path
    command: tuple[str, ...]
    python: str = "python3"
    wheel: Path | None = None
    mounts: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    gpus: bool = True
    rdma: bool = False
    shm_size: str | None = None
    user: str = f"{os.getuid()}:{os.getgid()}"

    def __post_init__(self) -> None:
        """Refuse what an engine would refuse on every host. Raises ConfigError."""
        if self._kind not in ENGINES:
            raise ConfigError(f"--engine {self.engine} is none of {', '.join(ENGINES)}, nor a path of one")
        if self.image.startswith("-"):
            raise ConfigError(f"--image {self.image!r} is not an image: it begins with a dash")
        _check_command(self.command)
        for mount in self.mounts:
            _check_mount(mount)
        for variable in self.variables:
            _check_variable(variable)
        if self.shm_size is None:
            return
        if self.is_apptainer:
            raise ConfigError(f"--shm-size {self.shm_size}: apptainer shares the host's")
        if not _SIZE.fullmatch(self.shm_size):
            raise ConfigError(f"--shm-size {self.shm_size}: expected a size such as 16g")

    @property
    def is_apptainer(self) -> bool:
        """Whether the engine is apptainer, whose command is a child of the one that starts it, not of a daemon."""
        return self._kind == "apptainer"

    @property
    def _kind(self) -> str:
        return Path(self.engine).name

    def start(self, name: str, hosts: Sequence[str], number: int) -> list[str]:
        """Return the command that starts the container on one host. It ends with the status of the container's command.

        Args:
            name: Name of the container.
            hosts: Names of all hosts.
            number: Number of this host.
        """
        places = {
            "node": str(number),
            "nodes": str(len(hosts)),
            "host": hosts[number],
            "master": hosts[0].rpartition("@")[2],
        }
        words = [re.sub(r"\{(\w+)\}", lambda place: places[place[1]], word) for word in self.command]
        if words[0] in ("python", "python3"):
            words[0] = self.python
        if self.wheel is not None:
            words = [self.python, "-c", _INSTALL, str(self.wheel), *words]
        engine = self._apptainer() if self.is_apptainer else self._docker(name)
        return [*engine, self.image, *words]

    def stop(self, name: str) -> list[str] | None:
        """Return the command that ends a container on its host; None if the container ends with its connection."""
        if self.is_apptainer:
            return None
        return [self.engine, "rm", "--force", name]

    def paths(self) -> list[str]:
        """Return the paths that the container needs on its host."""
        return [outside for outside, _, _ in self._mounts()]

    def _docker(self, name: str) -> list[str]:
        """Return the start of the command of docker or podman."""
        words = [self.engine, "run", "--rm", "--init", f"--name={name}", "--network=host", f"--user={self.user}"]
        if self._kind == "podman":
            words.append("--userns=keep-id")
        words.append("--ipc=host" if self.shm_size is None else f"--shm-size={self.shm_size}")
        if self.gpus and self._kind == "docker":
            words += ["--gpus", "all"]
        elif self.gpus:
            words += ["--device", "nvidia.com/gpu=all"]
        if self.rdma:
            words += ["--device=/dev/infiniband", "--ulimit=memlock=-1"]
        words.append("--env=HOME=/tmp")
        words += self._variables()
        words += [f"--volume={outside}:{inside}{mode}" for outside, inside, mode in self._mounts()]
        words.append(f"--workdir={self.source}")
        return words

    def _apptainer(self) -> list[str]:
        """Return the start of apptainer's command, which shares network, devices and shared memory with the host."""
        words = [self.engine, "exec"]
        if self.gpus:
            words.append("--nv")
        words += self._variables()
        words += [f"--bind={outside}:{inside}{mode}" for outside, inside, mode in self._mounts()]
        words.append(f"--pwd={self.source}")
        return words

    def _variables(self) -> list[str]:
        return [f"--env={variable}" for variable in self.variables]

    def _mounts(self) -> list[tuple[str, str, str]]:
        """Return (path outside, path inside, `:ro` or nothing) of all mounts."""
        found = [(str(self.source), str(self.source), "")]
        if self.wheel is not None:
            found.append((str(self.wheel), str(self.wheel), ":ro"))
        for mount in self.mounts:
            outside, _, rest = mount.partition(":")
            inside, _, mode = rest.partition(":")
            found.append((outside, inside or outside, f":{mode}" if mode else ""))
        return found


def _check_command(command: Sequence[str]) -> None:
    if not command:
        raise ConfigError('--cmd is empty: give the command and its arguments, such as --cmd "python train.py"')
    for word in command:
        for place in re.findall(r"\{(\w+)\}", word):
            if place not in _PLACES:
                known = ", ".join(f"{{{name}}}" for name in _PLACES)
                raise ConfigError(f"--cmd has {{{place}}}; places are {known}")


def _check_mount(mount: str) -> None:
    paths = mount.split(":")[:2]
    mode = mount.split(":")[2:]
    if mode not in ([], ["ro"]) or not all(path.startswith("/") for path in paths):
        raise ConfigError(f"--mount {mount}: expected PATH, PATH:PATH_INSIDE or PATH:PATH_INSIDE:ro, absolute")


def _check_variable(variable: str) -> None:
    name, equals, _ = variable.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ConfigError(f"--env {name}: expected NAME=value")
    if is_secret(name):
        raise ConfigError(
            f"--env {name}: everyone on a host can read command lines; mount a file that holds the secret"
        )


def split_command(text: str) -> tuple[str, ...]:
    """Divide a command line into words by a shell's rules of quoting. Nothing else of a shell works in it.

    Raises:
        ConfigError: A quote is not closed, or a word has a meaning only for a shell.
    """
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        lexer.commenters = ""
        words = tuple(lexer)
    except ValueError as error:
        raise ConfigError(f"--cmd: {error}") from None
    for word in words:
        if re.fullmatch(r"[|&;<>]+", word):
            raise ConfigError(f"--cmd has {word}, but no shell reads it; write a script, and give its path")
    return words
