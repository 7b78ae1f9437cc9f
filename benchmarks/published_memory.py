"""Memory of published ZeRO 3 runs beside what the plan says for the same layout.

    python benchmarks/published_memory.py
    python benchmarks/published_memory.py --logits      how many bytes torch holds for a logit, measured on CPUs

The rows of `published_runs.tsv` that publish memory are torchtitan's. Two things differ there: whole logits are held,
in bf16 and in fp32, with their gradients, while this library's loss takes tiles of tokens; and `selective`
recomputation keeps the outputs of every second product, which this library does not offer. Both are added to the plan
of full recomputation here. Rows with stages are left out: they combine stages with ZeRO 3, which is refused here.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.step_time import Row, read_rows
from neox.config import NeoXConfig
from neox.plan import RunPlan, resolve
from tests.distributed.spawn import run_ranks

GIB = 2**30
BYTES_OF_LOGIT = 2 + 4 + 4 + 4
"""A logit in bf16, its logarithm of the softmax in fp32, and two fp32 gradients of that (measured: 14.0)."""
BYTES_OF_DIVIDED_LOGIT = 2 + 4 + 4 + 4 + 4
"""The same with torch's `loss_parallel`, which tensor ranks need: one fp32 tensor more (measured: 18.0)."""
TOKENS, VOCAB = 1024, 32064


def plan_of(row: Row) -> RunPlan:
    """Return our plan of a run, with full recomputation and ZeRO 3 that gathers a few layers at a time."""
    length = int(row["seq_length"])
    ranks = int(row["tp"]) * int(row["cp"]) * int(row["dp"])
    keys: dict[str, Any] = {
        "num_layers": int(row["layers"]),
        "hidden_size": int(row["hidden"]),
        "num_attention_heads": int(row["heads"]),
        "num_kv_heads": int(row["kv_heads"]),
        "mlp_width": int(row["mlp_width"]),
        "padded_vocab_size": int(row["vocab"]),
        "seq_length": length,
        "max_position_embeddings": length,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "pos_emb": "rotary",
        "no_weight_tying": True,
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
        "hidden_dropout": 0,
        "attention_dropout": 0,
        "train_micro_batch_size_per_gpu": int(row["micro_batch"]),
        "gradient_accumulation_steps": 1,
        "train_iters": 1,
        "precision": "bf16",
        "attention_config": [[["flash"], "all"]],
        "model_parallel_size": int(row["tp"]),
        "sequence_parallel": row["tp"] != "1",
        "context_parallel_size": int(row["cp"]),
        "checkpoint_activations": True,
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 0},
    }
    return resolve(NeoXConfig.from_flat(keys), ranks, int(row["vocab"]))


def with_what_torchtitan_keeps(row: Row, planned: float) -> float:
    """Return the plan's GiB with whole logits, and with every second product's output if recomputation is selective."""
    tokens = int(row["micro_batch"]) * int(row["seq_length"]) / int(row["cp"])
    of_logit = BYTES_OF_LOGIT if row["tp"] == "1" else BYTES_OF_DIVIDED_LOGIT
    total = planned + of_logit * tokens * int(row["vocab"]) / int(row["tp"]) / GIB
    if row["recompute"] != "selective":
        return total
    hidden = int(row["hidden"])
    of_keys = hidden * int(row["kv_heads"]) / int(row["heads"])
    outputs = hidden + of_keys + int(row["mlp_width"]) + hidden  # queries, values, gate, and the MLP's output
    attention = hidden
    return total + 2 * (outputs + attention) * tokens * int(row["layers"]) / int(row["tp"]) / GIB


def bytes_of_logit(divided: bool) -> float:
    """Return the most bytes of main memory that a loss and its backward pass take for a logit on this rank.

    Args:
        divided: Whether tensor ranks divide the vocabulary.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    here = VOCAB // 2
    growth = 0
    for tokens in (8, TOKENS):  # the first pass loads code
        hidden = torch.randn(tokens, 64, dtype=torch.bfloat16)
        weight = torch.randn(here, 64, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(0, here, (tokens,))
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # a new peak
        before = _status("VmRSS")
        logits: Any = F.linear(hidden, weight)
        if divided:
            logits = DTensor.from_local(logits, mesh, [Shard(1)])
        with loss_parallel() if divided else nullcontext():
            F.cross_entropy(logits.float(), labels).backward()  # type: ignore[no-untyped-call]
        growth = _status("VmHWM") - before
    return growth / (TOKENS * here)


def _status(name: str) -> int:
    """Return a size of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(name))
    return int(found.split()[1]) * 1024


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or the bytes of a logit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logits", action="store_true", help="measure the bytes of a logit")
    if parser.parse_args(arguments).logits:
        print(f"one rank: {run_ranks(1, bytes_of_logit, False)[0]:.2f} bytes")
        print(f"vocabulary over two tensor ranks: {max(run_ranks(2, bytes_of_logit, True)):.2f} bytes")
        return
    print("| run | published GiB | our plan, full recomputation | with torchtitan's logits and outputs | ratio |")
    print("|---|---|---|---|---|")
    for row in read_rows():
        if not row["memory_gib"] or row["pp"] != "1":
            continue
        published = float(row["memory_gib"])
        planned = plan_of(row).memory.total / GIB
        counted = with_what_torchtitan_keeps(row, planned)
        print(f"| {row['id']} | {published} | {planned:.1f} | {counted:.1f} | {counted / published:.2f} |")


if __name__ == "__main__":
    main()
