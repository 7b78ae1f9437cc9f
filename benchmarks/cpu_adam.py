"""Time AdamW on a CPU, which updates offloaded states: torch's fused kernel against DeepSpeed's CPUAdam.

    benchmarks/cpu_adam.py [--millions 30] [--steps 9] [--extensions DIR]

Both update as many fp32 parameters in alternate steps; the best step of each counts. DeepSpeed's kernel is compiled
first, which needs a C++ compiler and minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from neox.optim.adamw import AdamW


def state(count: int) -> torch.Tensor:
    """Return fp32 parameters with gradients; the same each time."""
    generator = torch.Generator().manual_seed(0)
    parameter = torch.randn(count, generator=generator)
    parameter.grad = 0.01 * torch.randn(count, generator=generator)
    return parameter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=30, help="parameters")
    parser.add_argument("--steps", type=int, default=9, help="steps of each side")
    parser.add_argument("--extensions", default=None, help="directory of compiled extensions; a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["TORCH_EXTENSIONS_DIR"] = arguments.extensions or temporary
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        count, numbers = int(arguments.millions * 1e6), {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}
        ours, theirs = state(count), state(count)
        sides: dict[str, Any] = {"torch": AdamW([{"params": [ours], "weight_decay": 0.1}], **numbers)}
        started = time.perf_counter()
        sides["deepspeed"] = DeepSpeedCPUAdam([{"params": [theirs], "weight_decay": 0.1}], **numbers)
        print(f"compiling and loading CPUAdam: {time.perf_counter() - started:.0f} s")
        best = dict.fromkeys(sides, float("inf"))
        for _ in range(arguments.steps):
            for name, optimizer in sides.items():
                started = time.perf_counter()
                optimizer.step()
                best[name] = min(best[name], time.perf_counter() - started)
        for name, seconds in best.items():
            print(f"{name:10} {1e9 * seconds / count:.2f} ns per parameter, {torch.get_num_threads()} threads")
        print(f"largest difference of parameters: {(ours - theirs).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
