"""Where compiled layers are kept, so that the next start of a run does not compile them again (`compile_cache`)."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import MutableMapping
from pathlib import Path

from neox.engine.device import device_kind
from neox.plan import RunPlan

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_CHOSEN = "NEOX_COMPILE_CACHE"
"""Variable with the directory that a run of this process has chosen itself, so that the next run may change it."""
_NAME = "compile_cache"
_CPU_INFO = Path("/proc/cpuinfo")


def keep_compiled_layers(plan: RunPlan, environment: MutableMapping[str, str]) -> None:
    """Let torch's compiler keep its results beside the run. Call it before anything is compiled.

    Several ranks may share the directory: torch writes its files under other names and renames them, and finds them by
    a hash of the code, the device and the versions. That hash does not tell models of CPUs apart, although torch
    compiles for the instructions of the one it runs on. So each model has a directory of its own.

    Args:
        plan: The run.
        environment: Variables of this process, in which torch finds its directory. One that the user has set stays.
    """
    keys = plan.config
    beside = keys.logging.log_dir or keys.checkpoint.save
    if not keys.training.compile_cache or beside is None:
        return
    found = environment.get(_VARIABLE)
    if found is not None and found != environment.get(_CHOSEN):
        return
    directory = Path(beside).absolute() / _NAME
    if device_kind() == "cpu":
        directory /= model_of_cpu()
    environment[_VARIABLE] = str(directory)
    environment[_CHOSEN] = str(directory)


def model_of_cpu() -> str:
    """Return a name of this machine's model of CPU: `cpu-` and a hash of its model and instructions."""
    described = [platform.machine()]
    if _CPU_INFO.exists():
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
        described += sorted(set(told))
    return f"cpu-{hashlib.sha256(repr(described).encode()).hexdigest()[:12]}"
