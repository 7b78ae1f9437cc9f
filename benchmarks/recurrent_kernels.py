"""Compare fused kernels of recurrent blocks with torch's operations on a GPU: results, gradients and time, in turn.

    benchmarks/recurrent_kernels.py [--tokens 4096] [--batch 2] [--hidden 2048] [--rounds 5] [--json FILE]

A line for each kernel whose package is installed (causal-conv1d, mamba-ssm, flash-linear-attention): the largest
difference of outputs and of gradients, as a share of the largest value, and the times of forward and backward pass.
Inputs are bf16 where the network's are, in documents of a quarter of the tokens where the kernel takes them. Exits with
1 if a difference is above 0.03, the rounding of bf16 over a chunk.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import describe
from neox.devices import FAST_PATHS
from neox.model.mamba import selective_scan
from neox.model.mamba2 import chunked_scan
from neox.ops import causal_convolution, gated_delta_scan, has_fast_path, recurrent_kernels, wkv_scan

MOST = 0.03
HEAD = 64
Case = tuple[str, str, Callable[..., Tensor], list[Tensor]]


def cases(batch: int, tokens: int, hidden: int, device: torch.device) -> list[Case]:
    """Return (name, fast path, function, inputs that need gradients) of each kernel."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    heads = hidden // HEAD
    positions = (torch.arange(tokens, device=device) % (tokens // 4)).expand(batch, -1)
    starts = torch.arange(tokens, device=device) - positions
    wide = (batch, tokens, hidden)
    of_heads = (batch, tokens, heads, HEAD)
    steps = F.softplus(drawn(*wide, dtype=torch.float32) - 2)
    decay = -drawn(hidden, 16, dtype=torch.float32).exp()
    head_steps = F.softplus(drawn(batch, tokens, heads, dtype=torch.float32) - 2)
    fading = -F.softplus(drawn(batch, tokens, heads, dtype=torch.float32))
    channel_fading = -drawn(*of_heads, dtype=torch.float32).sub(2).exp()
    states = drawn(batch, tokens, 16, dtype=torch.float32), drawn(batch, tokens, 16, dtype=torch.float32)
    group = drawn(batch, tokens, 1, 128), drawn(batch, tokens, 1, 128)

    def mamba(*inputs: Tensor) -> Tensor:
        if recurrent_kernels.takes_kernel(recurrent_kernels.MAMBA, inputs[0]):
            return recurrent_kernels.selective_scan(*inputs)
        return selective_scan(*inputs, torch.zeros(batch, hidden, 16, device=device))[0]

    def convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return causal_convolution(x, weight, bias, positions=positions)[0]

    def mamba2(*inputs: Tensor) -> Tensor:
        return chunked_scan(*inputs, None, starts)[0]

    def gated_delta(*inputs: Tensor) -> Tensor:
        return gated_delta_scan(*inputs, starts=starts)[0]

    def rwkv(*inputs: Tensor) -> Tensor:
        return wkv_scan(*inputs, starts=starts)[0]

    queries, keys, values = drawn(*of_heads), drawn(*of_heads), drawn(*of_heads)
    strength = drawn(batch, tokens, heads, dtype=torch.float32).sigmoid()
    bonus = drawn(heads, HEAD, dtype=torch.float32)
    head_decay = -drawn(heads, dtype=torch.float32).exp()
    return [
        ("convolution", recurrent_kernels.CONVOLUTION, convolution, [drawn(*wide), drawn(hidden, 4), drawn(hidden)]),
        ("mamba", recurrent_kernels.MAMBA, mamba, [drawn(*wide, dtype=torch.float32), steps, decay, *states]),
        ("mamba2", recurrent_kernels.MAMBA, mamba2, [drawn(*of_heads), head_steps, head_decay, *group]),
        ("gated_delta", recurrent_kernels.LINEAR_ATTENTION, gated_delta, [queries, keys, values, fading, strength]),
        ("rwkv", recurrent_kernels.LINEAR_ATTENTION, rwkv, [queries, keys, values, channel_fading, bonus]),
    ]


def one_pass(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], float]:
    """Return outputs and gradients, and the seconds of both passes."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    torch.cuda.synchronize()
    begun = time.perf_counter()
    y = function(*leaves)
    gradients = torch.autograd.grad(y.float().sin().sum(), leaves)
    torch.cuda.synchronize()
    return [y.detach(), *gradients], time.perf_counter() - begun


def compare(name: str, function: Callable[..., Tensor], inputs: list[Tensor], rounds: int) -> dict[str, Any]:
    """Run a function by its kernel and by torch's operations, in turn; the first round counts for values only."""
    seconds: dict[str, list[float]] = {"fused": [], "plain": []}
    difference = 0.0
    for number in range(rounds + 1):
        fused, of_fused = one_pass(function, inputs)
        with mock.patch.object(recurrent_kernels, "takes_kernel", return_value=False):
            plain, of_plain = one_pass(function, inputs)
        if number:
            seconds["fused"].append(of_fused)
            seconds["plain"].append(of_plain)
        for one, other in zip(fused, plain, strict=True):
            largest = other.float().abs().max().item()
            difference = max(difference, (one.float() - other.float()).abs().max().item() / largest)
    medians = {side: median(times) for side, times in seconds.items()}
    return {"kernel": name, "difference": difference, **medians, "ratio": medians["plain"] / medians["fused"]}


def main() -> int:
    """Compare what is installed, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("skipped: the kernels run on GPUs, and there is none")
    device = torch.device("cuda")
    results = []
    missing = set()
    for name, path, function, inputs in cases(args.batch, args.tokens, args.hidden, device):
        if not has_fast_path(path, device):  # type: ignore[arg-type]  # a name of the table
            missing.add(FAST_PATHS[path].package)  # type: ignore[index]
            continue
        found = compare(name, function, inputs, args.rounds)
        results.append(found)
        print("{kernel:12} difference {difference:.4f}  fused {fused:.5f} s  plain {plain:.5f} s".format(**found))
    if missing:
        print(f"not installed: {', '.join(sorted(missing))}")
    if not results:
        raise SystemExit("skipped: none of the packages is installed")
    if args.json:
        args.json.write_text(json.dumps({"machine": describe(device), "results": results}, indent=1) + "\n")
    return int(any(found["difference"] > MOST for found in results))


if __name__ == "__main__":
    sys.exit(main())
