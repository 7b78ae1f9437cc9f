"""Environment variables: what child processes get, what travels to other hosts, and what never does."""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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
# Names that say "secret"; they are inherited on this machine, and reach other hosts only through files there.
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
    """Names that the patterns ask for and that are held back as secrets."""
    chosen = (name for name in environment if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
    return tuple(sorted(name for name in chosen if is_secret(name)))
