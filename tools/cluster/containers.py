"""Commands that start a container on each host: docker, podman or apptainer, as words that no shell joins."""

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
    """A command in a container, the same on every host but for the places of its words.

    Attributes:
        engine: One of `ENGINES`, or the path of one on the hosts.
        image: The image, by the name the engine takes.
        source: Directory that is mounted at its own path, and is the working directory.
        command: Words of the command; `{node}`, `{nodes}`, `{host}` and `{master}` in them are replaced by the host's
            number, the number of hosts, the host's name and the first host's.
        python: Interpreter in the image; replaces a first word `python`, and installs the wheel.
        wheel: Wheel below a mounted directory that is installed before the command starts.
        mounts: Further directories `PATH[:PATH_INSIDE[:ro]]`.
        variables: `NAME=value` lines of the environment.
        gpus: Whether the container gets the host's GPUs.
        rdma: Whether it gets `/dev/infiniband`, with memory that may be locked.
        shm_size: Size of its shared memory; None for the host's.
        user: `UID:GID` of the command.
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
        """Check what an engine would report on every host. Raises ConfigError."""
        if self._kind not in ENGINES:
            raise ConfigError(f"--engine {self.engine} is none of {', '.join(ENGINES)}, nor a path of one")
        if self.image.startswith("-"):
            raise ConfigError(f"--image {self.image!r} is not an image: it begins with a dash")
        if not self.command:
            raise ConfigError('--cmd is empty: give the command and its arguments, such as --cmd "python train.py"')
        for word in self.command:
            unknown = [place for place in re.findall(r"\{(\w+)\}", word) if place not in _PLACES]
            if unknown:
                known = ", ".join(f"{{{place}}}" for place in _PLACES)
                raise ConfigError(f"--cmd has {{{unknown[0]}}}; places are {known}")
        for mount in self.mounts:
            paths, mode = mount.split(":")[:2], mount.split(":")[2:]
            if mode not in ([], ["ro"]) or not all(path.startswith("/") for path in paths):
                raise ConfigError(f"--mount {mount}: expected PATH, PATH:PATH_INSIDE or PATH:PATH_INSIDE:ro, absolute")
        for variable in self.variables:
            name, equals, _ = variable.partition("=")
            if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ConfigError(f"--env {name}: expected NAME=value")
            if is_secret(name):
                raise ConfigError(f"--env {name}: command lines are no secret on a host; mount a file that holds it")
        if self.shm_size is not None and (self.is_apptainer or not _SIZE.fullmatch(self.shm_size)):
            shares = "apptainer shares the host's" if self.is_apptainer else "expected a size such as 16g"
            raise ConfigError(f"--shm-size {self.shm_size}: {shares}")

    @property
    def is_apptainer(self) -> bool:
        """Whether the command is a child of the one that starts it, not of a daemon."""
        return self._kind == "apptainer"

    @property
    def _kind(self) -> str:
        return Path(self.engine).name

    def start(self, name: str, hosts: Sequence[str], number: int) -> list[str]:
        """Return the command that starts the container on one host and ends with its command's status.

        Args:
            name: Of the container.
            hosts: Names of all hosts.
            number: Of this host.
        """
        engine = self._apptainer() if self.is_apptainer else self._docker(name)
        places = {"node": number, "nodes": len(hosts), "host": hosts[number], "master": hosts[0].rpartition("@")[2]}
        words = [re.sub(r"\{(\w+)\}", lambda place: str(places[place[1]]), word) for word in self.command]
        if words[0] in ("python", "python3"):
            words[0] = self.python
        install = [] if self.wheel is None else [self.python, "-c", _INSTALL, str(self.wheel)]
        return [*engine, self.image, *install, *words]

    def stop(self, name: str) -> list[str] | None:
        """Return the command that ends a container on its host; None where it ends with its connection."""
        return None if self.is_apptainer else [self.engine, "rm", "--force", name]

    def paths(self) -> list[str]:
        """Return the paths that the container needs on its host."""
        return [outside for outside, _, _ in self._mounts()]

    def _docker(self, name: str) -> list[str]:
        gpus = ["--gpus", "all"] if self._kind == "docker" else ["--device", "nvidia.com/gpu=all"]
        return [
            *(self.engine, "run", "--rm", "--init", f"--name={name}", "--network=host", f"--user={self.user}"),
            *(["--userns=keep-id"] if self._kind == "podman" else []),
            *(["--ipc=host"] if self.shm_size is None else [f"--shm-size={self.shm_size}"]),
            *(gpus if self.gpus else []),
            *(["--device=/dev/infiniband", "--ulimit=memlock=-1"] if self.rdma else []),
            *("--env=HOME=/tmp", *(f"--env={variable}" for variable in self.variables)),
            *(f"--volume={outside}:{inside}{mode}" for outside, inside, mode in self._mounts()),
            f"--workdir={self.source}",
        ]

    def _apptainer(self) -> list[str]:
        """Return the start of apptainer's command, which shares network, devices and shared memory with the host."""
        return [
            *(self.engine, "exec", *(["--nv"] if self.gpus else [])),
            *(f"--env={variable}" for variable in self.variables),
            *(f"--bind={outside}:{inside}{mode}" for outside, inside, mode in self._mounts()),
            f"--pwd={self.source}",
        ]

    def _mounts(self) -> list[tuple[str, str, str]]:
        """Return (path outside, path inside, `:ro` or nothing) of all mounts."""
        found = [(str(self.source), str(self.source), "")]
        if self.wheel is not None:
            found.append((str(self.wheel), str(self.wheel), ":ro"))
        for mount in self.mounts:
            outside, _, rest = mount.partition(":")
            inside, _, mode = rest.partition(":")
            found.append((outside, inside or outside, ":ro" if mode else ""))
        return found


def split_command(text: str) -> tuple[str, ...]:
    """Divide a command line into words by a shell's rules of quoting; nothing else of a shell works in it.

    Raises:
        ConfigError: A quote is not closed, or a word means something to a shell alone.
    """
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split, lexer.commenters = True, ""
        words = tuple(lexer)
    except ValueError as error:
        raise ConfigError(f"--cmd: {error}") from None
    special = next((word for word in words if re.fullmatch(r"[|&;<>]+", word)), None)
    if special is not None:
        raise ConfigError(f"--cmd has {special}, and no shell reads it; write a script, and give its path")
    return words
