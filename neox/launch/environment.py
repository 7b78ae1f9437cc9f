"""Environment variables of ranks, which of them other hosts get and which are secret; stale locks of builds."""

from __future__ import annotations

import fnmatch
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from neox.errors import ConfigError
from neox.files import lock_file
from neox.launch.hosts.vendors import VENDORS, VISIBLE_VARIABLES
from neox.launch.shell_values import (
    Assignment,
    ShellValueError,
    expand,
    read_assignments,
    read_value,
    referenced_names,
)
from neox.log import get_logger

_log = get_logger(__name__)

FORWARDED = (
    "GLOO_*",
    "OMP_*",
    "MKL_*",
    "HF_*",
    "WANDB_*",
    "MLFLOW_*",
    "TORCH_*",
    "TORCHINDUCTOR_*",
    "TRITON_*",
    "DS_*",
    "UCX_*",
    "FI_*",
    "MV2_*",
    "NEOX_*",
    "TOKENIZERS_*",
    "PYTORCH_*",
    "PATH",
    "PYTHON*",
    "LD_LIBRARY_PATH",
    *(pattern for vendor in VENDORS for pattern in vendor.forwarded),
)
# Names of secrets. They are sent separately (`neox.launch.supervisor.launchers`), so that they are on no command line
# and in no log.
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)S?$", re.IGNORECASE)
# They differ between hosts, as does DS_ENV_FILE, whose variables travel themselves.
_NOT_FORWARDED = ("DS_ENV_FILE", *VISIBLE_VARIABLES)
_DIFFERS_ON_AISC = ("NCCL_IB_HCA", "UCX_NET_DEVICES")  # a cluster whose hosts have other adapters each, says DeepSpeed
_SET_BY_LAUNCHER = {
    **dict.fromkeys(
        VISIBLE_VARIABLES,
        "choose devices with include, exclude or num_gpus, or set it in the environment of the host itself",
    ),
    "MASTER_ADDR": "give the key master_addr",
    "MASTER_PORT": "give the key master_port",
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE"), "take the line out"),
}


def is_secret(name: str) -> bool:
    """Return whether a variable's name marks its value as a secret."""
    return bool(_SECRET.search(name)) and not name.startswith("TOKENIZERS_")


def child_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for child processes of this interpreter.

    The interpreter's bin directory comes first on PATH: DeepSpeed looks for ninja there, and the virtual environment
    may not be activated. Compiled extensions are kept inside the virtual environment.

    Args:
        base: Variables to start from; those of this process if left out.
    """
    environment = dict(os.environ if base is None else base)
    bin_directory = str(Path(sys.executable).parent)
    directories = environment.get("PATH", os.defpath).split(os.pathsep)
    others = [directory for directory in directories if directory != bin_directory]
    environment["PATH"] = os.pathsep.join([bin_directory, *others])
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    return environment


@dataclass(frozen=True)
class LaunchEnvironment:
    """Variables of the launcher's processes, and which of them the ranks on every host get.

    Attributes:
        variables: The variables, those of DeepSpeed's files among them.
        forwarded: Patterns of the names that every host gets.
        of_hosts: Values in DeepSpeed's files that depend on variables which only the hosts know, such as HOSTNAME; as
            they are written there, in their order.
    """

    variables: dict[str, str]
    forwarded: tuple[str, ...]
    of_hosts: dict[str, str]


def launch_environment(patterns: Sequence[str] | None = None) -> LaunchEnvironment:
    """Return the environment of a launch, with the variables of DeepSpeed's files.

    Args:
        patterns: Patterns of the variables that are forwarded, besides those of the files; by default `FORWARDED`.
    """
    patterns = patterns or FORWARDED
    assignments = _read_environment_files(os.environ)
    from_files = _expand_in_order(assignments, os.environ)
    own = {*_matching(os.environ, patterns), *from_files}
    of_hosts: dict[str, str] = {}
    for assignment in assignments:
        names = set(referenced_names(assignment.parts))
        if is_secret(assignment.name):  # sent separately, with its value here
            continue
        if names.difference(own) or names.intersection(of_hosts):
            of_hosts[assignment.name] = assignment.source
        else:
            of_hosts.pop(assignment.name, None)
    variables = child_environment({**os.environ, **from_files})
    return LaunchEnvironment(variables, (*patterns, *from_files), of_hosts)


def environment_file(environment: Mapping[str, str]) -> dict[str, str]:
    """Read the variables for ranks from DeepSpeed's files of `NAME=value` lines, as a shell reads them.

    The files are `.deepspeed_env`, or what `DS_ENV_FILE` names, in the home directory and then in the current one. The
    second overrides the first. DeepSpeed's launcher hands their values to a shell on each host between double quotes;
    `neox.launch.shell_values` says what is read.

    Args:
        environment: Variables among which `DS_ENV_FILE`, `HOME` and those in values are looked up.

    Raises:
        ConfigError: `DS_ENV_FILE` does not exist, a file cannot be read, or a line has another form; with file and
            line.
    """
    return _expand_in_order(_read_environment_files(environment), environment)


def complete_on_host(of_hosts: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values of `LaunchEnvironment.of_hosts` on this host.

    Args:
        of_hosts: The values as they are written.
        environment: Variables of the ranks of this host.
    """
    completed: dict[str, str] = {}
    for name, source in of_hosts.items():
        completed[name] = expand(read_value(source), {**environment, **_shell_variables(), **completed})
    return completed


def _shell_variables() -> dict[str, str]:
    """Return what a shell on this host knows without being told."""
    return {"HOSTNAME": socket.gethostname(), "UID": str(os.getuid())}


def _expand_in_order(assignments: Sequence[Assignment], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the values of assignments; each sees those before it."""
    values: dict[str, str] = {}
    for assignment in assignments:
        values[assignment.name] = expand(assignment.parts, {**environment, **_shell_variables(), **values})
    return values


def _read_environment_files(environment: Mapping[str, str]) -> list[Assignment]:
    """Return the assignments of DeepSpeed's files, in the order in which they take effect."""
    assignments = []
    for path in _find_environment_files(environment):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(
                f"{path} cannot be read: {why}; DS_ENV_FILE names another file (of NAME=value lines)"
            ) from None
        try:
            found = read_assignments(text)
        except ShellValueError as error:
            raise ConfigError(f"{path}:{error.line}: {error.reason}") from None
        for assignment in found:
            advice = _SET_BY_LAUNCHER.get(assignment.name)
            if advice is not None:
                raise ConfigError(f"{path}:{assignment.line}: the launcher sets {assignment.name}; {advice}")
        assignments += found
    return assignments


def _find_environment_files(environment: Mapping[str, str]) -> list[Path]:
    """Return the paths of DeepSpeed's files. Raises ConfigError if `DS_ENV_FILE` does not exist."""
    named = environment.get("DS_ENV_FILE")
    name = Path(named or ".deepspeed_env").expanduser()
    paths: list[Path] = []
    for directory in (Path(environment.get("HOME", "/")), Path()):
        path = directory / name
        if _is_file(path) and not any(path.samefile(other) for other in paths):
            paths.append(path)
    if named and not paths:
        raise ConfigError(f"DS_ENV_FILE names {named}, which does not exist, here or in the home directory")
    return paths


def _is_file(path: Path) -> bool:
    """Return whether a file exists; False with a warning if this user may not look (another user's home)."""
    try:
        return path.is_file()
    except PermissionError:
        _log.warning("%s: permission denied, so variables for ranks are not read from it", path)
        return False


def forwarded_environment(environment: Mapping[str, str], patterns: Sequence[str] = FORWARDED) -> dict[str, str]:
    """Return the variables that are forwarded to the ranks on every host, without secrets."""
    kept_here = _NOT_FORWARDED
    if "AISC_JOB_NAME" in environment:
        kept_here += _DIFFERS_ON_AISC
    forwarded = {}
    for name in _matching(environment, patterns):
        if not is_secret(name) and name not in kept_here:
            forwarded[name] = environment[name]
    return forwarded


def forwarded_secrets(environment: Mapping[str, str], patterns: Sequence[str] = FORWARDED) -> tuple[str, ...]:
    """Return the names of the secrets that match the patterns. They are sent separately from other variables."""
    return tuple(filter(is_secret, _matching(environment, patterns)))


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match one of the patterns, sorted."""
    found: set[str] = set()
    for pattern in patterns:
        found.update(name for name in names if fnmatch.fnmatchcase(name, pattern))
    return sorted(found)


def remove_stale_locks(directory: Path | None = None) -> list[Path]:
    """Remove the lock files of extension builds that no living process has open.

    PyTorch guards the build of an extension with a `lock` file. If the building process is killed, the file stays, and
    every later build waits for it forever, without a message.

    Args:
        directory: PyTorch's directory of extensions; by default the one that children of this interpreter use.

    Returns:
        The files that were removed.
    """
    directory = directory or Path(child_environment()["TORCH_EXTENSIONS_DIR"])
    locks = list(directory.glob("*/lock"))
    if not locks:
        return []
    with open(directory / "neox_build.lock", "w") as guard:
        # Only one agent at a time may look and remove. Otherwise ranks of another agent could start a build in between.
        lock_file(guard, wait=True)
        stale = [lock for lock in locks if not _is_open_or_gone(lock)]
        for lock in stale:
            lock.unlink(missing_ok=True)
    return stale


def _is_open_or_gone(path: Path) -> bool:
    """Return whether a file is open in a living process that this user can see, or does not exist any more."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return True
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            other = link.stat()
        except OSError:  # closed meanwhile, or another user's process
            continue
        if (other.st_dev, other.st_ino) == (status.st_dev, status.st_ino):
            return True
    return False
