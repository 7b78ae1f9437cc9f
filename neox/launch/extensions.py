"""Building ahead of time what DeepSpeed compiles when its ranks first start on CPU (`deepspeed_shm_comm`).

`python -m neox.launch.extensions` builds what is missing. Our own ranks switch that extension off (it serves inference
only); other scripts under DeepSpeed in the same environment find it ready.

PyTorch guards its builds with a `lock` file that stays when the building process is killed, and then every later start
waits for ever without a word. Here a kernel lock (`flock`, gone with its owner) comes first, and a `lock` file that no
living process holds open is removed, before a build and before every launch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from neox.errors import LaunchError, run_script
from neox.files import lock_file
from neox.launch.accelerators import count_accelerators
from neox.launch.environment import child_environment
from neox.launch.lifeline import parent_death_hook
from neox.log import get_logger, setup_logging

_log = get_logger(__name__)
_NAME = "deepspeed_shm_comm"
_STAMP = "neox_built.json"
# None where this machine cannot build it: DeepSpeed then works without, and so do we.
_BUILD = "import sys; from deepspeed.comm.torch import build_shm_op; sys.exit(0 if build_shm_op() is not None else 3)"
_UNSUPPORTED = 3


def extensions_directory() -> Path:
    """Where PyTorch keeps compiled extensions for children of this interpreter."""
    return Path(child_environment()["TORCH_EXTENSIONS_DIR"])


def versions() -> dict[str, str]:
    """What a built extension depends on."""
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "deepspeed"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            raise LaunchError(f"{name} is not installed for {sys.executable}: run `make install`") from None
    return found


def is_built(directory: Path) -> bool:
    """Whether the extension, or the knowledge that it cannot be built here, is there for the installed versions."""
    try:
        stamp = json.loads((directory / _NAME / _STAMP).read_text())
    except (OSError, ValueError):
        return False
    whole = stamp.get("unsupported", False) or (directory / _NAME / f"{_NAME}.so").is_file()
    return whole and stamp.get("versions") == versions() and not (directory / _NAME / "lock").exists()


def build(directory: Path) -> None:
    """Build the extension unless it is there; wait for another process that is at it. Raises LaunchError."""
    target = directory / _NAME
    target.mkdir(parents=True, exist_ok=True)
    with _exclusive(directory / "neox_build.lock"):
        if is_built(directory):
            return
        break_stale_lock(target / "lock")
        environment = {**child_environment(), "TORCH_EXTENSIONS_DIR": str(directory)}
        _log.info("building DeepSpeed's %s in %s (once; one to two minutes)", _NAME, directory)
        result = subprocess.run(
            [sys.executable, "-c", _BUILD],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            preexec_fn=parent_death_hook(),
        )
        if result.returncode not in (0, _UNSUPPORTED):
            last = "\n".join((result.stdout + result.stderr).splitlines()[-20:])
            raise LaunchError(f"DeepSpeed's {_NAME} could not be built (a C++ compiler is needed); last lines:\n{last}")
        stamp = {"versions": versions(), "unsupported": result.returncode == _UNSUPPORTED}
        (target / _STAMP).write_text(json.dumps(stamp))


def break_stale_lock(lock: Path) -> bool:
    """Remove PyTorch's lock file when no living process has it open, which its owner does; whether it was removed."""
    if not lock.exists() or _has_owner(lock):
        return False
    lock.unlink(missing_ok=True)
    return True


def break_stale_locks() -> list[Path]:
    """Remove the stale locks of every extension that children of this interpreter use; which they were."""
    return [lock for lock in extensions_directory().glob("*/lock") if break_stale_lock(lock)]


def _has_owner(lock: Path) -> bool:
    status = lock.stat()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            other = link.stat()
        except OSError:  # closed meanwhile, or another user's process
            continue
        if (other.st_dev, other.st_ino) == (status.st_dev, status.st_ino):
            return True
    return False


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a kernel lock on a file; it ends with its process, however that ends."""
    with open(path, "w") as file:
        try:
            lock_file(file, wait=False)
        except BlockingIOError:
            _log.info("waiting for another process that is building in %s", path.parent)
            lock_file(file, wait=True)
        yield


def main() -> int:
    """Build what is missing; a machine with an accelerator needs nothing."""
    setup_logging()
    if count_accelerators() == 0:
        build(extensions_directory())
    return 0


if __name__ == "__main__":
    run_script(main)
