"""The longest samples that our plan allows for Llama 8B, next to those that ALST published (arXiv:2506.13996).

    python benchmarks/published_lengths.py

ALST trained 500 thousand tokens on one H100 of 80 GB and 3.7 million on eight. Both sides recompute blocks with their
inputs in main memory, go through MLPs and the loss by tiles, and keep weights and optimizer states under ZeRO 3, which
also offloads them where the row says so. Nothing is fitted: the lengths are those of a dry run's note, up to which the
plan is below 80 GB less what it reserves for CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neox.config import NeoXConfig
from neox.plan import RunPlan, gpu_device, resolve
from neox.plan.devices.device import memory_on
from neox.plan.search.longest_sequence import longest_sample

GIB = 2**30
VOCABULARY = 128_256
LENGTH = 131_072
CPU = {"device": "cpu"}
LLAMA: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_kv_heads": 8,
    "mlp_width": 14336,
    "padded_vocab_size": VOCABULARY,
    "activation": "swiglu",
    "norm": "rmsnorm",
    "pos_emb": "rotary",
    "rotary_emb_base": 500000,
    "no_weight_tying": True,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "attention_config": [[["flash"], "all"]],
    "precision": "bf16",
    "train_micro_batch_size_per_gpu": 1,
    "train_iters": 1,
    "checkpoint_activations": True,
    "checkpoint_in_cpu": True,
    "mlp_tile_size": 4096,
    "gpu_type": "h100",
    "host_memory_gib": 2048,  # of a DGX H100, also for one of its GPUs alone
    "seq_length": LENGTH,
    "max_position_embeddings": LENGTH,
}


@dataclass(frozen=True)
class Case:
    """One way to train with long samples.

    Attributes:
        gpus: Number of GPUs, all of which are context ranks.
        kind: What context ranks exchange; empty with one.
        offloads_weights: Whether ZeRO keeps weights in main memory, too, and not only optimizer states.
        published: Tokens that ALST trained on as many GPUs.
    """

    gpus: int
    kind: str
    offloads_weights: bool
    published: int


CASES = (
    Case(1, "", True, 500_000),
    Case(8, "ulysses", False, 3_700_000),
    Case(8, "ulysses", True, 3_700_000),
    Case(8, "all_gather", True, 3_700_000),
)


def plan_of(case: Case, tokens: int = LENGTH) -> RunPlan:
    """Return the plan of a case for samples of a number of tokens."""
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": CPU}
    if case.offloads_weights:
        zero["offload_param"] = CPU
    keys = {**LLAMA, "zero_optimization": zero, "seq_length": tokens, "max_position_embeddings": tokens}
    if case.gpus > 1:
        keys |= {"context_parallel_size": case.gpus, "context_parallel_kind": case.kind}
    return resolve(NeoXConfig.from_flat(keys), case.gpus, VOCABULARY)


def longest_of(case: Case) -> int:
    """Return the most tokens of a sample that fit."""
    plan = plan_of(case)
    found = longest_sample(plan, gpu_device(plan))
    assert found is not None
    return found.tokens


def table() -> list[str]:
    """Return the lines of the table in Markdown."""
    lines = [
        "| GPUs | context parallelism | in main memory | our plan, tokens | ALST, tokens | ratio "
        "| main memory per rank |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        tokens = longest_of(case)
        plan = plan_of(case, tokens)
        host = memory_on(plan, gpu_device(plan)).main_memory / GIB
        kept = "optimizer, weights, inputs" if case.offloads_weights else "optimizer, inputs"
        kind = case.kind and f"`{case.kind}`"
        lengths = f"{tokens:,} | {case.published:,} | {tokens / case.published:.2f}"
        lines.append(f"| {case.gpus} | {kind or 'none'} | {kept} | {lengths} | {host:,.0f} GiB |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
