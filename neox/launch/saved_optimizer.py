"""Whether a checkpoint holds an optimizer state that training can take up, by names of files and words in a pickle."""

from __future__ import annotations

import zipfile
from pathlib import Path

from neox.config import NeoXConfig
from neox.config.wording import WITHOUT_SAVED_OPTIMIZER


def optimizer_problem(checkpoint: Path, config: NeoXConfig) -> str | None:
    """Why training cannot take up the optimizer's state in a checkpoint, and the ways out; None where it may.

    Without files of their own (ZeRO) states are in the client files, in torch's form: with its `param_groups`.
    """
    keys = config.checkpoint
    if keys.finetune or keys.no_load_optim or not checkpoint.is_dir():
        return None
    if not any(checkpoint.glob("layer_*.pt")):  # whatever this is, the ranks look closer
        return None
    divided = sorted(checkpoint.glob("*zero_pp_rank_*_optim_states.pt"))
    if not divided and not any(_mentions(file, b"param_groups") for file in checkpoint.glob("mp_rank_*.pt")):
        return f"{checkpoint} holds no optimizer state to go on with; {WITHOUT_SAVED_OPTIMIZER}"
    if divided and not (checkpoint / "manifest.json").is_file() and not _mentions(divided[0], b"param_slice_mappings"):
        return (
            f"{checkpoint} holds an optimizer state that does not say where parameters lie, as DeepSpeed before 0.7 "
            f"wrote it (GPT-NeoX-20B's full weights are of that kind); {WITHOUT_SAVED_OPTIMIZER}"
        )
    return None


def _mentions(file: Path, key: bytes) -> bool:
    """Whether the pickle inside a file of torch has a key; True where it cannot be looked at."""
    try:
        with zipfile.ZipFile(file) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return not pickles or key in archive.read(pickles[0])
    except (OSError, zipfile.BadZipFile, EOFError, ValueError, RuntimeError, NotImplementedError):
        return True
