"""Where compiled layers are kept, so that the next start of a run does not compile them again (`compile_cache`)."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from neox.plan import RunPlan

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_NAME = "compile_cache"


def keep_compiled_layers(plan: RunPlan, environment: MutableMapping[str, str]) -> None:
    """Let torch's compiler keep its results beside the run. Call it before anything is compiled.

    Several ranks may share the directory: torch writes its files under other names and renames them, and finds them by
    a hash of the code, the device and the versions.

    Args:
        plan: The run.
        environment: Variables of this process, in which torch finds its directory. One that the user has set stays.
    """
    keys = plan.config
    beside = keys.logging.log_dir or keys.checkpoint.save
    if not keys.training.compile_cache or beside is None:
        return
    found = environment.get(_VARIABLE)
    if found is None or Path(found).name == _NAME:  # the latter is of an earlier run in this process
        environment[_VARIABLE] = str(Path(beside).absolute() / _NAME)
