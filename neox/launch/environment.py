"""Environment variables of ranks, which of them other hosts get and which are secret; stale locks of builds."""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from neox.errors import ConfigError
from neox.files import lock_file
from neox.log import get_logger

_log = get_logger(__name__)

FORWARDED = (
    "NCCL_*",
    "GLOO_*",
    "OMP_*",
    "MKL_*",
    "HF_*",
    "WANDB_*",
    "TORCH_*",
    "TORCHINDUCTOR_*",
    "TRITON_*",
    "DS_*",
    "CUDA_*",
    "UCX_*",
    "FI_*",
    "NEOX_*",
    "TOKENIZERS_*",
    "PYTORCH_*",
    "PATH",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
)
# Names of secrets. They are sent separately (`neox.launch.start`), so that they are on no command line and in no log.
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)S?$", re.IGNORECASE)
_NOT_FORWARDED = ("CUDA_VISIBLE_DEVICES",)  # differs between hosts


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


def launch_environment() -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables for child processes of this one, including those of DeepSpeed's file.

    Returns:
        The variables, and the names of those in the file. The latter are forwarded to every host.
    """
    from_file = environment_file(os.environ)
    return child_environment({**os.environ, **from_file}), tuple(from_file)


def environment_file(environment: Mapping[str, str]) -> dict[str, str]:
    """Read the variables for ranks from DeepSpeed's file of `NAME=value` lines.

    The file is `DS_ENV_FILE`, else `.deepspeed_env` in the current or the home directory. It may hold blank lines and
    `#` comments.

    Args:
        environment: Variables among which `DS_ENV_FILE` and `HOME` are looked up.

    Raises:
        ConfigError: `DS_ENV_FILE` does not exist, the file cannot be read, or a line has another form; with file and
            line.
    """
    path = _find_environment_file(environment)
    if path is None:
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"{path} cannot be read: {why}; DS_ENV_FILE names another file (of NAME=value lines)"
        ) from None
    found = {}
    for number, line in enumerate(lines, start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        name, equals, value = content.partition("=")
        name = name.strip()
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"{path}:{number}: expected NAME=value")  # the line itself may hold a secret
        found[name] = value
    return found


def _find_environment_file(environment: Mapping[str, str]) -> Path | None:
    """Return the path of DeepSpeed's file, or None without one. Raises ConfigError if `DS_ENV_FILE` does not exist."""
    named = environment.get("DS_ENV_FILE")
    if named:
        path = Path(named).expanduser()
        if not _is_file(path):
            raise ConfigError(f"DS_ENV_FILE names {named}, which does not exist")
        return path
    for directory in ("", environment.get("HOME", "/")):
        path = Path(directory, ".deepspeed_env")
        if _is_file(path):
            return path
    return None


def _is_file(path: Path) -> bool:
    """Return whether a file exists; False with a warning if this user may not look (another user's home)."""
    try:
        return path.is_file()
    except PermissionError:
        _log.warning("%s: permission denied, so variables for ranks are not read from it", path)
        return False


def forwarded_environment(environment: Mapping[str, str], patterns: Sequence[str] = FORWARDED) -> dict[str, str]:
    """Return the variables that are forwarded to the ranks on every host, without secrets."""
    forwarded = {}
    for name in _matching(environment, patterns):
        if not is_secret(name) and name not in _NOT_FORWARDED:
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
