"""Time attention with a window and with documents against attention to all earlier tokens.

    benchmarks/masked_attention.py [--tokens 8192] [--window 512] [--heads 12] [--rounds 5] [--threads 1]

One row of tokens, forward and backward, in turn: torch's flash attention to all earlier tokens, then a window, then
documents in a row, each as training computes them. The best of the rounds counts. On CPUs the time is this process's
processor time, so that other processes disturb it less; on GPUs it is the device's.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from neox.ops import DTYPES, VisiblePairs, block_mask_of, core_attention, window_rule


def seconds(attend: Callable[[], Tensor], device: torch.device) -> float:
    """Return the time of one forward and backward pass."""
    if device.type == "cuda":
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        attend().sum().backward()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    begun = time.process_time()
    attend().sum().backward()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the row")
    parser.add_argument("--window", type=int, default=512, help="tokens of the window, and of each document")
    parser.add_argument("--heads", type=int, default=12, help="heads")
    parser.add_argument("--head-dim", type=int, default=64, help="size of a head")
    parser.add_argument("--rounds", type=int, default=5, help="rounds")
    parser.add_argument("--threads", type=int, default=1, help="threads on a CPU")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=None, help="both if not given")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = arguments.tokens
    starts = torch.arange(tokens, device=device) // arguments.window * arguments.window
    sides = {
        "all earlier tokens": None,
        "window": VisiblePairs(tokens, device, rule=window_rule(arguments.window), reach=arguments.window),
        "documents": VisiblePairs(tokens, device, starts.unsqueeze(0)),
    }
    print(f"{tokens} tokens, {arguments.heads} heads of {arguments.head_dim}, window and documents {arguments.window}")
    for precision in (arguments.precision,) if arguments.precision else ("fp32", "bf16"):
        shape = (1, tokens, arguments.heads, arguments.head_dim)
        generator = torch.Generator().manual_seed(0)
        leaves = [torch.randn(shape, generator=generator).to(device, DTYPES[precision]) for _ in range(3)]
        for leaf in leaves:
            leaf.requires_grad_()
        best = dict.fromkeys(sides, float("inf"))
        for _ in range(arguments.rounds):
            for name, pairs in sides.items():

                def attend(pairs: VisiblePairs | None = pairs, leaves: list[Tensor] = leaves) -> Tensor:
                    mask = None
                    if pairs is not None and device.type == "cuda":
                        mask = block_mask_of(pairs)
                    q, k, v = leaves
                    return core_attention(q, k, v, impl="flash", pairs=pairs, block_mask=mask)

                best[name] = min(best[name], seconds(attend, device))
        for name, measured in best.items():
            ratio = measured / best["all earlier tokens"]
            print(f"{precision}  {name:20} {1000 * measured:8.0f} ms  {ratio:.3f}")
    print("load average", *(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()
