"""Whether a checkpoint holds an optimizer state that training can take up, by names, sizes and one pickle."""

from __future__ import annotations

import zipfile
from pathlib import Path

from neox.config import NeoXConfig

_WAYS_OUT = (
    "set `no_load_optim: true` (weights and iteration, a new optimizer) or `finetune: true` (weights, iteration 0)"
)


def optimizer_problem(checkpoint: Path, config: NeoXConfig) -> str | None:
    """Why training cannot take up the optimizer's state in a checkpoint, and the ways out; None where it may.

    Adam's moments take more room than the weights, so client states smaller than the layer files hold none.
    """
    keys = config.checkpoint
    if keys.finetune or keys.no_load_optim or not checkpoint.is_dir():
        return None
    divided = sorted(checkpoint.glob("*zero_pp_rank_*_optim_states.pt"))
    weights, clients = (_bytes(checkpoint, pattern) for pattern in ("layer_*.pt", "mp_rank_*.pt"))
    if not divided and clients < weights:
        return f"{checkpoint} holds no optimizer state to go on with; {_WAYS_OUT}"
    if divided and not (checkpoint / "manifest.json").is_file() and not _says_where_parameters_lie(divided[0]):
        return (
            f"{checkpoint} holds an optimizer state that does not say where parameters lie, as DeepSpeed before 0.7 "
            f"wrote it (GPT-NeoX-20B's full weights are of that kind); {_WAYS_OUT}"
        )
    return None


def _bytes(directory: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in directory.glob(pattern))


def _says_where_parameters_lie(file: Path) -> bool:
    """Whether the pickle inside an optimizer file has the key; True where it cannot be looked at."""
    try:
        with zipfile.ZipFile(file) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return not pickles or b"param_slice_mappings" in archive.read(pickles[0])
    except (OSError, zipfile.BadZipFile, EOFError, ValueError, RuntimeError, NotImplementedError):
        return True
