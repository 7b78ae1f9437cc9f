"""Training speed: tokens/s, model FLOPs and MFU beside a matmul probe, and on a CPU beside transformers' GPT-NeoX.

python benchmarks/train.py                          # CPU: 27M in fp32 and bf16, transformers in turn, in one run
python benchmarks/train.py --shape 1.3B --compile   # GPU: bf16, flash attention
python benchmarks/train.py --shape 6.9B --compile --json out.json

Sides: "neox" is what a user gets, `initialize_engine` and its `train_batch` through DeepSpeed, in one process (ZeRO 0
in fp32; in bf16 ZeRO 1, which accumulates gradients in fp32); "model" is the bare network in a plain loop, so that the
difference is DeepSpeed's cost; "transformers" is their GPT-NeoX in its usual loop, in bf16 with fp32 weights under
autocast (Trainer's `bf16`); "transformers-weights" is that loop with bf16 weights and moments alone, in which small
updates are lost. A GPU run has "model" alone unless told otherwise.

A step is the whole work of one: `accumulation` micro-batches forward and backward, clipping at 1.0, AdamW. Rounds go
through all sides in turn and medians count, so that a machine that slows down slows all of them.

Model FLOPs per token = 6 P + 12 L S H (PaLM, arXiv:2204.02311, appendix B): P parameters without the embedding table,
attention counted whole; recomputation never counts. MFU = model FLOPs/s over the peak assumed (dense bf16 of the data
sheet; on a CPU, and on a GPU not in the table, the matmul probe). "of probe" = over a large square matmul of the same
dtype, measured in the same run between the rounds.

bf16 trains bf16 weights with an fp32 master copy and fp32 Adam moments (16 bytes a parameter in all). Gradients of
"model" accumulate over micro-batches in bf16, in place: no separate fp32 gradient. No recomputation unless --recompute.
--fp8 multiplies in fp8 in the blocks; MFU stays relative to bf16's peak, so that it compares with a run without it.
The loss is computed in chunks without whole logits (`GPT.loss`); transformers' sides use their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from train_sides import DTYPES, SHAPES, SIDES, Shape, Side, make_plan

from benchmarks.machine import describe
from neox.files import write_text
from neox.ops import FP8_RECIPES, linear

PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bf16 FLOP/s of data sheets, by part of the device's name; the first match counts."""

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds_of(work: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def matmul_probe(dtype: str, device: torch.device, clock: Callable[[], float]) -> float:
    """Return FLOP/s of a large square matmul by the fastest product this project knows, the median of several runs."""
    size, repeats = (8192, 20) if device.type == "cuda" else (1024, 4)
    a, b = (torch.randn(size, size, device=device).to(DTYPES[dtype]) for _ in range(2))
    seconds_of(lambda: linear(a, b), device, clock)
    tries = [seconds_of(lambda: [linear(a, b) for _ in range(repeats)], device, clock) for _ in range(3)]
    return 2 * size**3 * repeats / statistics.median(tries)


def peak_of(device: torch.device, probe: float) -> tuple[float, str]:
    """Return the FLOP/s that MFU is measured against, and where the number is from."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, peak in PEAKS.items():
            if all(word in name for word in part.split()):
                return peak, f"data sheet of {part}, dense bf16"
    return probe, "matmul probe of this run"


def halved(shape: Shape) -> Shape:
    return replace(shape, micro_batch=shape.micro_batch // 2, accumulation=shape.accumulation * 2)


def planned(shape: Shape, args: argparse.Namespace, dtype: str, device: torch.device) -> Shape:
    """Halve the micro-batch until the engine's plan fits: after running out of memory DeepSpeed frees little of it."""
    while device.type == "cuda" and shape.micro_batch > 1:
        if make_plan(shape, args, dtype).memory.total < 0.97 * torch.cuda.mem_get_info(device)[0]:
            break
        shape = halved(shape)
    return shape


def fits(shape: Shape, build: Callable[[Shape], Side], device: torch.device) -> tuple[Shape, Side]:
    """Build and run one step, with half the micro-batch (and twice the accumulation) as long as memory runs out."""
    while True:
        try:
            side = build(shape)
            side.step()
            return shape, side
        except torch.OutOfMemoryError:
            if shape.micro_batch == 1:
                raise
        # Outside the handler: the exception keeps the frames, and so the memory, of what failed.
        side = None
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # the peak of what failed is not the peak of what runs
        shape = halved(shape)


def measure(shape: Shape, args: argparse.Namespace, device: torch.device) -> Iterator[list[dict[str, Any]]]:
    """Time all sides in turn; after each counted round yield one row of figures for each side."""
    dtypes = args.dtype or (["bf16"] if device.type == "cuda" else ["fp32", "bf16"])
    clock = CLOCKS[args.clock]
    kinds = args.sides or (["model"] if device.type == "cuda" else list(SIDES))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    sides: list[tuple[str, Side]] = []
    for dtype in dtypes:
        for kind in kinds:
            if kind == "transformers-weights" and dtype != "bf16":
                continue  # the same as their other side
            shape = planned(shape, args, dtype, device) if kind == "neox" else shape
            shape, side = fits(shape, lambda s, k=kind, d=dtype: SIDES[k](s, args, d, device), device)
            sides.append((dtype, side))
    seconds: dict[str, list[float]] = {side.name: [] for _, side in sides}
    losses: dict[str, float] = {}
    probes: dict[str, list[float]] = {dtype: [] for dtype in dtypes}
    for round_number in range(args.warmup + args.rounds):
        for _, side in sides:
            taken = seconds_of(lambda s=side: losses.__setitem__(s.name, float(s.step())), device, clock)
            if round_number >= args.warmup:
                seconds[side.name].append(taken)
        if round_number >= args.warmup:
            memory = memory_of(device)  # before the probe, whose matrices count too
            for dtype in dtypes:
                probes[dtype].append(matmul_probe(dtype, device, clock))
            rows = (row_of(shape, args, device, dtype, side.name, seconds, losses, probes) for dtype, side in sides)
            yield [{**row, **memory} for row in rows]


def memory_of(device: torch.device) -> dict[str, int | None]:
    """Return bytes on a GPU: tensors' peak, the peak of what the allocator took, and what the driver says is in use."""
    if device.type != "cuda":
        return dict.fromkeys(("peak_memory_bytes", "peak_reserved_bytes", "driver_memory_bytes"))
    free, total = torch.cuda.mem_get_info(device)
    return {
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "driver_memory_bytes": total - free,
    }


def row_of(
    shape: Shape,
    args: argparse.Namespace,
    device: torch.device,
    dtype: str,
    name: str,
    seconds: dict[str, list[float]],
    losses: dict[str, float],
    probes: dict[str, list[float]],
) -> dict[str, Any]:
    plan = make_plan(shape, args, dtype)
    layers = plan.layers
    multiplied = layers.active_numel - layers.padded_vocab_size * layers.architecture.hidden_size
    per_token = 6 * multiplied + 12 * shape.layers * shape.seq * shape.hidden
    tokens = shape.micro_batch * shape.accumulation * shape.seq
    median = statistics.median(seconds[name])
    probe = statistics.median(probes[dtype])
    peak, source = peak_of(device, probe)
    flops = tokens * per_token / median
    # A ratio per round: both sides of a round met the same machine.
    baseline = seconds.get(f"transformers {dtype}")
    ratio = statistics.median(b / s for b, s in zip(baseline, seconds[name], strict=True)) if baseline else None
    return {
        "side": name,
        "shape": asdict(shape),
        "parameters": layers.numel,
        "active_parameters": layers.active_numel,
        "tokens_per_step": tokens,
        "seconds_per_step": median,
        "seconds_all": seconds[name],
        "tokens_per_second": tokens / median,
        "model_flops_per_token": per_token,
        "model_flops_per_second": flops,
        "mfu": flops / peak,
        "peak": peak,
        "peak_source": source,
        "probe_flops_per_second": probe,
        "of_probe": flops / probe,
        "times_transformers": ratio,
        "loss": losses[name],
        "attention": args.attention,
        "cudnn": args.cudnn,
        "compile": args.compile,
        "fp8": args.fp8 if dtype == "bf16" else None,
        "recompute": args.recompute,
        "gradient_accumulation_dtype": "fp32" if name.startswith("neox bf16") else dtype,
        "predicted_memory_bytes": plan.memory.total if name.startswith("neox") else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="27M")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", help="default: bf16 on a GPU, both on a CPU")
    parser.add_argument("--attention", choices=["flash", "fused", "eager"], default="flash")
    parser.add_argument("--cudnn", action="store_true", help="prefer cuDNN's attention to torch's own flash kernel")
    parser.add_argument("--micro-batch", type=int, help="samples in one micro-batch, in place of the shape's")
    parser.add_argument("--accumulation", type=int, help="micro-batches in one step, in place of the shape's")
    parser.add_argument("--fp8", choices=FP8_RECIPES, help="multiply in fp8 in the blocks of bf16's sides, ours")
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--recompute", action="store_true", help="recompute every block in the backward pass")
    parser.add_argument("--sides", choices=SIDES, nargs="+", help="default: all on a CPU, model on a GPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="rounds that are not counted")
    parser.add_argument("--threads", type=int, help="torch threads on a CPU")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: processor seconds instead, for a machine that others use meanwhile; with --threads 1, since threads "
        "that wait for each other use the processor too",
    )
    parser.add_argument("--json", type=Path, help="write everything to this file too")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = SHAPES[args.shape]
    shape = replace(
        shape,
        micro_batch=args.micro_batch or shape.micro_batch,
        accumulation=args.accumulation or shape.accumulation,
    )
    if args.clock == "cpu" and (device.type != "cpu" or torch.get_num_threads() != 1):
        parser.error("--clock cpu is for CPUs, with --threads 1")
    where = {**describe(device), "clock": args.clock}
    rows: list[dict[str, Any]] = []
    for rows in measure(shape, args, device):
        if args.json:  # after each round: a run that is cut off leaves what it measured
            write_text(args.json, json.dumps({**where, "name": args.shape, "rows": rows}, indent=1) + "\n")
    print(f"{args.shape}: {rows[0]['parameters'] / 1e6:,.1f} M parameters on {where['device']}, torch {where['torch']}")
    print(f"peak: {rows[0]['peak'] / 1e12:.2f} TFLOP/s ({rows[0]['peak_source']}); FLOPs per token = 6 P + 12 L S H")
    for row in rows:
        compared = row["times_transformers"]
        memory = row["peak_memory_bytes"]
        print(
            f"{row['side']:18s} {row['tokens_per_second']:10,.0f} tokens/s"
            f"  {row['model_flops_per_second'] / 1e12:8.3f} TFLOP/s"
            f"  MFU {100 * row['mfu']:5.1f} %  of probe {row['of_probe']:.2f}"
            + (f"  {compared:.2f} x transformers" if compared else "")
            + (f"  {memory / 2**30:.1f} GiB, driver {row['driver_memory_bytes'] / 2**30:.1f}" if memory else "")
            + (f" (plan: {row['predicted_memory_bytes'] / 2**30:.1f})" if row["predicted_memory_bytes"] else "")
        )


if __name__ == "__main__":
    main()
