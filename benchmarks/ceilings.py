"""Ceilings of one device for the benchmark's shapes: matrix products, attention by kernel, and copies in memory.

    python benchmarks/ceilings.py --shape 1.3B --shape 6.9B --json ceilings.json
    python benchmarks/ceilings.py --gpu h100      writes the figures of this GPU, with which times are estimated

Each line is sustained for `--seconds` (5) after a warm-up, on random data, in bf16. The products are those of a block
and of the head, forward and both gradients; their time over one token, summed, is the ceiling that a training step of
that shape can reach: model FLOPs over (time of the products + time of attention forward and backward). Attention runs
by torch's default choice and by each backend alone, with the names of the kernels that ran. The copy counts bytes read
and written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_sides import SHAPES, Shape

from benchmarks.gpu_figures import write_figures
from benchmarks.machine import describe
from neox.files import write_text

BACKENDS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def sustained(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the mean seconds of one call over at least `seconds` of calls."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    work()
    wait()
    started, calls, batch = time.perf_counter(), 0, 1
    while True:
        for _ in range(batch):
            work()
        wait()
        calls += batch
        elapsed = time.perf_counter() - started
        if elapsed >= seconds:
            return elapsed / calls
        batch = max(batch, int(calls * min(1.0, 0.1 * seconds / max(elapsed, 1e-9))))


def products(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of the matrix products of a block and of the head."""
    h = shape.hidden
    return {
        "query_key_value": (3 * h, h),
        "dense": (h, h),
        "dense_h_to_4h": (4 * h, h),
        "dense_4h_to_h": (h, 4 * h),
        "head": (shape.vocab, h),
    }


def product_rows(shape: Shape, device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """Time each product as forward, gradient of the input and gradient of the weight."""
    tokens = shape.micro_batch * shape.seq
    rows = []
    for name, (outputs, inputs) in products(shape).items():
        here = min(tokens, 8192) if name == "head" else tokens  # the loss multiplies the head chunk by chunk
        x, w, g = (
            torch.randn(*size, device=device).to(torch.bfloat16)
            for size in ((here, inputs), (outputs, inputs), (here, outputs))
        )
        works = {
            "forward": lambda x=x, w=w: x @ w.T,
            "input gradient": lambda g=g, w=w: g @ w,
            "weight gradient": lambda g=g, x=x: g.T @ x,
        }
        for pass_name, work in works.items():
            taken = sustained(work, device, seconds)
            flops = 2 * here * outputs * inputs
            rows.append(
                {
                    "product": name,
                    "pass": pass_name,
                    "size": [here, outputs, inputs],
                    "seconds": taken,
                    "flops_per_second": flops / taken,
                    "seconds_per_token": taken / here,
                }
            )
    return rows


def kernel_names(work: Callable[[], object], device: torch.device) -> list[str]:
    """Return the names of the kernels that a call runs on a GPU; on a CPU those of its operations."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device.type == "cuda" else activity.CPU]) as profile:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -max(e.self_device_time_total, e.self_cpu_time_total))
    return [event.key for event in events][:6]


def attention_rows(shape: Shape, device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """Time causal attention forward, and forward with backward, by each backend that takes these tensors."""
    size = (shape.micro_batch, shape.heads, shape.seq, shape.hidden // shape.heads)
    q, k, v = (torch.randn(size, device=device).to(torch.bfloat16).requires_grad_() for _ in range(3))
    gradient = torch.randn(size, device=device).to(torch.bfloat16)

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), gradient)

    rows = []
    for name, backend in BACKENDS.items():
        with contextlib.nullcontext() if backend is None else sdpa_kernel([backend]):
            try:
                both()
            except RuntimeError as error:
                rows.append({"backend": name, "refused": str(error).splitlines()[0]})
                continue
            one, two = sustained(forward, device, seconds), sustained(both, device, seconds)
            names = kernel_names(both, device)
        flops = 4 * shape.micro_batch * shape.heads * shape.seq**2 * size[-1]  # counted whole, as MFU counts it
        rows.append(
            {
                "backend": name,
                "forward_seconds": one,
                "forward_backward_seconds": two,
                "model_flops_per_second": 3 * flops / two,
                "seconds_per_token": two / (shape.micro_batch * shape.seq),
                "kernels": names,
            }
        )
    return rows


def copy_bytes_per_second(device: torch.device, seconds: float) -> float:
    """Return bytes read plus bytes written per second of a copy that no cache holds."""
    elements = (8 if device.type == "cuda" else 1) * 2**26
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / sustained(lambda: target.copy_(source), device, seconds)


def ceiling(shape: Shape, rows: list[dict[str, Any]], attention: list[dict[str, Any]]) -> float:
    """Return the most model FLOP/s of a training step that these products and the fastest attention allow."""
    h = shape.hidden
    per_token = 0.0
    for row in rows:
        per_token += row["seconds_per_token"] * (1 if row["product"] == "head" else shape.layers)
    per_token += shape.layers * min(row["seconds_per_token"] for row in attention if "refused" not in row)
    parameters = shape.layers * 12 * h * h + shape.vocab * h
    return (6 * parameters + 12 * shape.layers * shape.seq * h) / per_token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: 27M on a CPU, else 1.3B and 6.9B")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each line is sustained")
    parser.add_argument("--json", type=Path, help="write everything to this file too, after each shape")
    parser.add_argument("--gpu", help="key of GPUS, whose file in neox/devices/gpus takes the figures")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = {**describe(device), "seconds": args.seconds, "shapes": {}}
    result["copy_bytes_per_second"] = copy_bytes_per_second(device, args.seconds)
    print(f"copy: {result['copy_bytes_per_second'] / 1e9:,.0f} GB/s read and written")
    for name in args.shape or (["1.3B", "6.9B"] if device.type == "cuda" else ["27M"]):
        shape = SHAPES[name]
        rows, attention = product_rows(shape, device, args.seconds), attention_rows(shape, device, args.seconds)
        most = ceiling(shape, rows, attention)
        result["shapes"][name] = {"products": rows, "attention": attention, "ceiling_flops_per_second": most}
        if args.json:
            write_text(args.json, json.dumps(result, indent=1) + "\n")
        for row in rows:
            print(f"{name} {row['product']:16s} {row['pass']:16s} {row['flops_per_second'] / 1e12:8.2f} TFLOP/s")
        for row in attention:
            figures = row.get("refused") or f"{row['model_flops_per_second'] / 1e12:8.2f} TFLOP/s  {row['kernels'][0]}"
            print(f"{name} attention {row['backend']:10s} {figures}")
        print(f"{name} ceiling of a training step: {most / 1e12:.2f} model TFLOP/s")
    if args.gpu:
        print(f"wrote {write_figures(args.gpu, result)}")


if __name__ == "__main__":
    main()
