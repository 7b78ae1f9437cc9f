"""Memory of published ZeRO 3 runs beside what the plan says for the same layout.

    python benchmarks/published_memory.py

The rows of `published_runs.tsv` that publish memory are torchtitan's. Two things differ there: whole logits are held,
in bf16 and in fp32, with their gradients, while this library's loss takes tiles of tokens; and `selective`
recomputation keeps the outputs of every second product, which this library does not offer. Both are added to the plan
of full recomputation here. Rows with stages are left out: they combine stages with ZeRO 3, which is refused here.
"""

from __future__ import annotations

from typing import Any

from benchmarks.step_time import Row, read_rows
from neox.config import NeoXConfig
from neox.plan import RunPlan, resolve

GIB = 2**30
BYTES_OF_LOGIT = 2 + 4 + 4 + 2
"""A logit in bf16 and in fp32, and its gradient in both."""


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
    total = planned + BYTES_OF_LOGIT * tokens * int(row["vocab"]) / int(row["tp"]) / GIB
    if row["recompute"] != "selective":
        return total
    hidden = int(row["hidden"])
    of_keys = hidden * int(row["kv_heads"]) / int(row["heads"])
    outputs = hidden + of_keys + int(row["mlp_width"]) + hidden  # queries, values, gate, and the MLP's output
    attention = hidden
    return total + 2 * (outputs + attention) * tokens * int(row["layers"]) / int(row["tp"]) / GIB


def main() -> None:
    """Print the table."""
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
