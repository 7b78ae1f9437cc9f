"""Environment variables: what child processes get, what travels to other hosts, and what never does."""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from neox.errors import LaunchError

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
# Names that say "secret"; they travel apart from the rest (`neox.launch.secrets`), on no command line and in no log.
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)S?$", re.IGNORECASE)
_NOT_FORWARDED = ("CUDA_VISIBLE_DEVICES",)  # means something else on every host


def is_secret(name: str) -> bool:
    """Whether a variable's name says that its value must not be shown."""
    return bool(_SECRET.search(name)) and not name.startswith("TOKENIZERS_")


def child_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for child processes of this interpreter.

    The interpreter's bin directory comes first on PATH (DeepSpeed looks for ninja there, activated or not), and
    compiled extensions are kept inside the environment, so that they are built once for all its users.
    """
    environment = dict(os.environ if base is None else base)
    bin_directory = str(Path(sys.executable).parent)
    rest = [part for part in environment.get("PATH", os.defpath).split(os.pathsep) if part != bin_directory]
    environment["PATH"] = os.pathsep.join([bin_directory, *rest])
    environment.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    return environment


def environment_file(environment: Mapping[str, str]) -> dict[str, str]:
    """Read DeepSpeed's file of `NAME=value` lines for the ranks: `DS_ENV_FILE`, else `.deepspeed_env` here or at home.

    Blank lines and `#` comments are fine. Raises LaunchError with file and line for anything else.
    """
    named = environment.get("DS_ENV_FILE")
    home = environment.get("HOME", "/")
    candidates = [Path(named).expanduser()] if named else [Path(".deepspeed_env"), Path(home, ".deepspeed_env")]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        if named:
            raise LaunchError(f"DS_ENV_FILE names {named}, which does not exist")
        return {}
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        name, equals, value = content.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name.strip()):
            raise LaunchError(f"{path}:{number}: expected NAME=value")  # the line itself may hold a secret
        found[name.strip()] = value
    return found


def forwarded_environment(environment: Mapping[str, str], patterns: Sequence[str] = FORWARDED) -> dict[str, str]:
    """Choose the variables that travel to the ranks on every host; secrets never do."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        and name not in _NOT_FORWARDED
        and not is_secret(name)
    }


def withheld_secrets(environment: Mapping[str, str], patterns: Sequence[str] = FORWARDED) -> tuple[str, ...]:
    """Names that the patterns ask for and that are held back as secrets, to travel apart."""
    chosen = (name for name in environment if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
    return tuple(sorted(name for name in chosen if is_secret(name)))
