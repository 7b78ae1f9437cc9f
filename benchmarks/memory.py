"""Measure the memory of a training step under ZeRO 0 to 3, with and without offload, beside the plan's estimate.

    benchmarks/memory.py [--ranks 2] [--precisions fp32 bf16 fp16] [--stages 0 1 2 3] [--optimizers Adam Lion ...]
                         [--out FILE.json]
    benchmarks/memory.py --experts [--precisions fp32 bf16] [--out FILE.json]

`--experts` measures a mixture of experts that data ranks divide, in layouts of two and four ranks. The plan counts with
equal shares of tokens; the routers here are not trained, so some ranks get more.

On a GPU measured is `torch.cuda.max_memory_allocated()` of a step, and the plan's estimate of the device is compared.
On CPU ranks host memory stands for both: measured is the peak of the storages of all tensors that operations have made
since before the model was built and that are still referred to, and the plan's sum of device and host is compared.
(torch.profiler's memory events are no measure: what gloo's threads release is missing there.) The process itself, what
gloo allocates, and memory inside one operation are in neither. One line for each case; MiB of the fullest rank.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.held_storages import HeldStorages
from benchmarks.machine import describe
from neox.config import NeoXConfig
from neox.config.sections.optimizer_table import OPTIMIZERS, find_optimizer
from neox.plan import Device, RunPlan, gpu_device, host_device, resolve
from neox.plan.devices.device import memory_on
from tests.distributed.spawn import run_ranks

VOCAB, SEQUENCE, BUCKET = 1000, 128, 400_000
MIB = 2**20
CPU = {"device": "cpu"}
CASES: list[dict[str, Any]] = [
    {"stage": 0},
    *({"stage": stage, **offload} for stage in (1, 2, 3) for offload in ({}, {"offload_optimizer": CPU})),
    {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
]

EXPERTS: dict[str, Any] = {
    "num_layers": 6,
    "moe_num_experts": 16,
    "moe_top_k": 4,
    "moe_router_type": "topk",
    "moe_ffn_hidden_size": 256,
    "moe_aux_loss_coeff": 0.01,
}
EXPERT_LAYOUTS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"expert_model_parallel_size": 2}, {"stage": 0}),
    (2, {"expert_model_parallel_size": 2}, {"stage": 1}),
    (2, {"expert_model_parallel_size": 2}, {"stage": 1, "offload_optimizer": CPU}),
    (2, {"expert_model_parallel_size": 2}, {"stage": 2}),
    (2, {"expert_model_parallel_size": 2}, {"stage": 3}),
    (2, {"expert_model_parallel_size": 2, "context_parallel_size": 2}, {"stage": 1}),
    (4, {"expert_model_parallel_size": 2}, {"stage": 1}),
    (4, {"expert_model_parallel_size": 2}, {"stage": 2}),
    (4, {"expert_model_parallel_size": 4}, {"stage": 2}),
    (4, {"expert_model_parallel_size": 2}, {"stage": 3}),
    (4, {"expert_model_parallel_size": 2, "model_parallel_size": 2}, {"stage": 1}),
    (4, {"expert_model_parallel_size": 2, "context_parallel_size": 2}, {"stage": 2}),
    (4, {"expert_model_parallel_size": 2, "pipe_parallel_size": 2, "gradient_accumulation_steps": 4}, {"stage": 1}),
]
"""Ranks, keys and ZeRO of the measured layouts of experts.

The plan counts with more micro batches than stages: with as many, the first gradients come when activations go.
"""
PARAMS = {"SGD": {"momentum": 0.9}}  # without momentum it keeps nothing


def plan_of(ranks: int, precision: str, zero: dict[str, Any], optimizer: str = "Adam", **keys: Any) -> RunPlan:
    """A network of 10 million parameters with small buckets, so that its states are most of its memory."""
    buckets = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET} if zero["stage"] else {}
    if zero["stage"] == 3:
        buckets = {"reduce_bucket_size": BUCKET, "stage3_prefetch_bucket_size": 1, "stage3_max_live_parameters": 1}
    flat = {
        "num_layers": 12,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "seq_length": SEQUENCE,
        "max_position_embeddings": SEQUENCE,
        "pos_emb": "rotary",
        "make_vocab_size_divisible_by": 8,
        "attention_config": [[["flash"], "all"]],
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "precision": precision,
        **({"fp16": {"initial_scale_power": 8}} if precision == "fp16" else {}),  # a step that overflows is skipped
        "train_iters": 10,
        "optimizer": {"type": optimizer, "params": PARAMS.get(optimizer, {})},
        "zero_optimization": {**zero, **buckets},
        **keys,
    }
    return resolve(NeoXConfig.from_flat(flat), ranks, VOCAB)


def device_of(plan: RunPlan) -> Device:
    """Return what a rank of the measurement runs on."""
    if torch.cuda.is_available():
        return gpu_device(plan)
    return host_device(plan, range(plan.grid.world_size), "this machine", None, training=True)


def step_peaks(plans: Sequence[RunPlan]) -> list[int]:
    """Return the peak bytes of a step of each plan on this rank."""
    return [_step_peak(plan) for plan in plans]


def _step_peak(plan: RunPlan) -> int:
    from neox.engine import initialize_distributed, initialize_engine
    from neox.features.table import build_features

    grid, device = initialize_distributed(plan)
    generator = torch.Generator().manual_seed(grid.data_rank)
    length = plan.config.model.seq_length

    def batches() -> Any:
        while True:
            rows = torch.randint(0, VOCAB, (1, length + 1), generator=generator)
            yield {"tokens": rows[:, :-1], "labels": rows[:, 1:], "loss_mask": torch.ones(1, length)}

    def start() -> Any:
        engine = initialize_engine(plan, grid, device, build_features)
        engine.train_batch(batches())
        return engine

    if device.type == "cuda":
        engine = start()
        torch.cuda.reset_peak_memory_stats()
        engine.train_batch(batches())
        return int(torch.cuda.max_memory_allocated())
    gc.collect()
    with HeldStorages() as held:
        engine = start()
        held.peak = held.total
        engine.train_batch(batches())
    return held.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument(
        "--optimizers", nargs="+", default=["Adam"], help="stages that one cannot work under are left out"
    )
    parser.add_argument("--experts", action="store_true", help="layouts of a mixture that data ranks divide")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = _experts(arguments.precisions) if arguments.experts else _dense(arguments)
    if arguments.out:
        device_kind = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        result: dict[str, Any] = {**describe(device_kind), "rows": rows}
        if not arguments.experts:
            result["ranks"] = arguments.ranks
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def _experts(precisions: Sequence[str]) -> list[dict[str, Any]]:
    """Measure the layouts of experts; return a row of each."""
    rows = []
    for precision, ranks in product(precisions, (2, 4)):
        layouts = [(degrees, zero) for world, degrees, zero in EXPERT_LAYOUTS if world == ranks]
        plans = [plan_of(ranks, precision, zero, **EXPERTS, **degrees) for degrees, zero in layouts]
        measured = run_ranks(ranks, step_peaks, plans, timeout=3600)
        for number, ((degrees, zero), plan) in enumerate(zip(layouts, plans, strict=True)):
            peaks = [rank[number] for rank in measured]
            about = {"ranks": ranks, "precision": precision, "stage": zero["stage"], "offload": _offload_of(zero)}
            rows.append({**about, **degrees, **_compared(plan, peaks), "peaks": peaks})
            _show(rows[-1])
    return rows


def _dense(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure ZeRO, offload and optimizers with a dense network; return a row of each."""
    rows: list[dict[str, Any]] = []
    for precision, optimizer in product(arguments.precisions, arguments.optimizers):
        kind = OPTIMIZERS[find_optimizer(optimizer) or ""]
        divisible = kind.elementwise or kind.gathers
        cases = [case for case in CASES if case["stage"] in arguments.stages and (divisible or not case["stage"])]
        plans = [plan_of(arguments.ranks, precision, case, optimizer) for case in cases]
        measured = run_ranks(arguments.ranks, step_peaks, plans, timeout=3600)
        for number, (case, plan) in enumerate(zip(cases, plans, strict=True)):
            about = {"optimizer": optimizer, "precision": precision, "stage": case["stage"]}
            about["offload"] = _offload_of(case)
            rows.append({**about, **_compared(plan, [rank[number] for rank in measured])})
            _show(rows[-1])
    return rows


def _offload_of(zero: dict[str, Any]) -> str:
    offload = "+".join(key.removeprefix("offload_") for key in zero if key.startswith("offload"))
    return offload or "none"


def _compared(plan: RunPlan, peaks: Sequence[int]) -> dict[str, Any]:
    """Return the parts of the plan's estimate, its sum, and what the fullest rank held."""
    device = device_of(plan)
    memory = memory_on(plan, device)
    planned = memory.needed(on_cpu=device.shared)
    return {**asdict(memory), "planned": planned, "measured": max(peaks), "ratio": planned / max(peaks)}


def _show(row: dict[str, Any]) -> None:
    print("  ".join(f"{key} {_shown(value)}" for key, value in row.items() if key != "peaks"), flush=True)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value / MIB:.1f}" if isinstance(value, int) and value > 100 else str(value)


if __name__ == "__main__":
    main()
