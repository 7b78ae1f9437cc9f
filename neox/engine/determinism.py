"""Bit-equal repeats of a run (`deterministic`): deterministic algorithms, reductions in a fixed order, seeds."""

from __future__ import annotations

import random
from collections.abc import MutableMapping

import numpy as np
import torch

from neox.errors import LaunchError
from neox.parallel import derive_seed
from neox.plan import RunPlan

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_VALUES = (":4096:8", ":16:8")
"""Workspaces with which cuBLAS repeats its results, as NVIDIA documents them."""
NO_ALGORITHM = "does not have a deterministic implementation"
"""What torch says of an operation that it refuses in a deterministic run, after its name."""


def use_deterministic_algorithms(plan: RunPlan, environment: MutableMapping[str, str]) -> None:
    """Set up this process for a run that can be repeated bit for bit, or as usual. Call it before the GPU is used.

    - torch chooses deterministic algorithms, and raises an error where it has none.
    - cuBLAS, MKL and NCCL reduce in an order that does not depend on timing or on addresses in memory.
    - Python's and numpy's generators, which only other packages use, start from the run's seed. Streams of the run
      itself follow from its seed in any case.

    Args:
        plan: The run.
        environment: Variables of this process, in which cuBLAS, MKL and NCCL find their settings.

    Raises:
        LaunchError: If the environment asks cuBLAS for a workspace with which it does not repeat its results.
    """
    wanted = plan.config.training.deterministic
    if not wanted:
        if torch.are_deterministic_algorithms_enabled():  # of an earlier run in this process
            torch.use_deterministic_algorithms(False)
        return
    workspace = environment.setdefault(_CUBLAS, _CUBLAS_VALUES[0])
    if workspace not in _CUBLAS_VALUES:
        raise LaunchError(
            f"deterministic: {_CUBLAS}={workspace} lets cuBLAS give other results in each run; unset it, or set it to "
            f"{' or '.join(_CUBLAS_VALUES)}"
        )
    environment.setdefault("MKL_CBWR", "AUTO,STRICT")
    environment.setdefault("NCCL_ALGO", "Ring")
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.use_deterministic_algorithms(True)
    # torch would also write to every new tensor, such as DeepSpeed's buckets, most of which are never used.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    seed = plan.config.training.seed
    random.seed(derive_seed(seed, "python"))
    np.random.seed(derive_seed(seed, "numpy") % 2**32)
