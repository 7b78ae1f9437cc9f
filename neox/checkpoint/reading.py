"""Safe reading of `.pt` files: memory-mapped; only tensors, plain values and the types listed here are unpickled."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from neox.errors import CheckpointError


class SavedScaler:
    """Stand-in for DeepSpeed's loss scalers: their saved attributes and no behaviour."""

    cur_scale: float


class SavedFragment:
    """Stand-in for DeepSpeed's `fragment_address`: where a parameter's part lies in a flat buffer (elements)."""

    numel: int
    start: int


_reconstruct = np.zeros(0).__reduce__()[0]

# (callable, name in the pickle). DeepSpeed's types become stand-ins, so that reading needs no deepspeed.
_ALLOWED: tuple[Any, ...] = (
    (_reconstruct, "numpy.core.multiarray._reconstruct"),
    (_reconstruct, "numpy._core.multiarray._reconstruct"),
    (np.ndarray, "numpy.ndarray"),
    (np.dtype, "numpy.dtype"),
    type(np.dtype(np.uint32)),
    type(np.dtype(np.int64)),
    type(np.dtype(np.float64)),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (SavedScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (SavedScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (SavedFragment, "deepspeed.utils.tensor_fragment.fragment_address"),
)


def load_file(path: Path) -> Any:
    """Load one `.pt` file on CPU; tensors stay memory-mapped (private: writing into one does not touch the file).

    Raises CheckpointError naming the file when it is missing, truncated, not a torch file, or holds another type.
    """
    try:
        size = path.stat().st_size
        mapped = zipfile.is_zipfile(path)  # files older than torch 1.6 are no zip and cannot be mapped
        with torch.serialization.safe_globals(list(_ALLOWED)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: {_unpickling_reason(error)}") from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = "empty" if size == 0 else (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path}: broken or no torch file ({reason}); take another checkpoint") from error


def _unpickling_reason(error: pickle.UnpicklingError) -> str:
    text = str(error)
    if "Unsupported global: GLOBAL " in text:
        name = text.split("Unsupported global: GLOBAL ", 1)[1].split()[0]
        return f"holds an object of type {name}; only tensors, plain values and the types in neox.checkpoint are read"
    return "cannot be unpickled; the file is broken, or holds something other than tensors and plain values"
