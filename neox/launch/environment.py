"""Environment of ranks: variables, which of them are forwarded to other hosts, secrets, and extension locks."""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Mapping, Sequence
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
# Names of secrets. They are sent apart from the rest (`neox.launch.start`), on no command line and in no log.
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)S?$", re.IGNORECASE)
_NOT_FORWARDED = ("CUDA_VISIBLE_DEVICES",)  # differs between hosts


def is_secret(name: str) -> bool:
    """Return whether a variable's name marks its value as a secret."""
    return bool(_SECRET.search(name)) and not name.startswith("TOKENIZERS_")


def child_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for child processes of this interpreter.

    The interpreter's bin directory comes first on PATH, where DeepSpeed looks for ninja, whether the virtual
    environment is activated or not. Compiled extensions are kept inside the virtual environment.

    Args:
        base: Variables to start from; this process's when left out.
    """
    environment = dict(os.environ if base is None else base)
    bin_directory = str(Path(sys.executable).parent)
    rest = [part for part in environment.get("PATH", os.defpath).split(os.pathsep) if part != bin_directory]
    environment["PATH"] = os.pathsep.join([bin_directory, *rest])
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    return environment


def launch_environment() -> tuple[dict[str, str], tuple[str, ...]]:
    """Return this process's variables as a run's children get them, with those of DeepSpeed's file.

    Returns:
        The variables, and the names of those in the file, which are forwarded to every host.
    """
    from_file = environment_file(os.environ)
    return child_environment({**os.environ, **from_file}), tuple(from_file)


def environment_file(environment: Mapping[str, str]) -> dict[str, str]:
    """Read the variables for ranks from DeepSpeed's file of `NAME=value` lines.

    The file is `DS_ENV_FILE`, else `.deepspeed_env` in the current or the home directory. Blank lines and `#` comments
    are accepted.

    Args:
        environment: Where `DS_ENV_FILE` and `HOME` are read.

    Raises:
        ConfigError: `DS_ENV_FILE` does not exist, the file cannot be read, or a line has another form; with file and
            line.
    """
    named = environment.get("DS_ENV_FILE")
    home = environment.get("HOME", "/")
    candidates = [Path(named).expanduser()] if named else [Path(".deepspeed_env"), Path(home, ".deepspeed_env")]
    path = next((candidate for candidate in candidates if _is_file(candidate)), None)
    if path is None:
        if named:
            raise ConfigError(f"DS_ENV_FILE names {named}, which does not exist")
        return {}
    found = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"{path} cannot be read: {why}; DS_ENV_FILE names another file (of NAME=value lines)"
        ) from None
    for number, line in enumerate(lines, start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        name, equals, value = content.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name.strip()):
            raise ConfigError(f"{path}:{number}: expected NAME=value")  # the line itself may hold a secret
        found[name.strip()] = value
    return found


def _is_file(path: Path) -> bool:
    """Return whether a file is there; not one in a directory that this user may not search, such as another's home."""
    try:
        return path.is_file()
    except PermissionError:
        _log.warning("%s: permission denied, so it is not looked for variables of ranks", path)
        return False


def forwarded_environment(environment: Mapping[str, str], patterns: Sequence[str] = FORWARDED) -> dict[str, str]:
    """Return the variables that are forwarded to the ranks on every host, without secrets."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        and name not in _NOT_FORWARDED
        and not is_secret(name)
    }


def forwarded_secrets(environment: Mapping[str, str], patterns: Sequence[str] = FORWARDED) -> tuple[str, ...]:
    """Return the names of the secrets that match the patterns; they are sent apart from other variables."""
    chosen = (name for name in environment if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
    return tuple(sorted(name for name in chosen if is_secret(name)))


def remove_stale_locks(directory: Path | None = None) -> list[Path]:
    """Remove the lock files of extension builds that no living process has open.

    PyTorch guards the build of an extension with a `lock` file. The file stays when the building process is killed, and
    every later build waits for it without an end or a message.

    Args:
        directory: PyTorch's directory of extensions; the one that children of this interpreter use when left out.

    Returns:
        The files that were removed.
    """
    directory = directory or Path(child_environment()["TORCH_EXTENSIONS_DIR"])
    if not (locks := list(directory.glob("*/lock"))):
        return []
    with open(directory / "neox_build.lock", "w") as guard:
        lock_file(guard, wait=True)  # else one agent could remove the lock of a build that began after another's look
        stale = [lock for lock in locks if not _is_open(lock)]
        for lock in stale:
            lock.unlink(missing_ok=True)
    return stale


def _is_open(path: Path) -> bool:
    """Return whether a living process has a file open, as far as this user can see, or the file is gone."""
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
