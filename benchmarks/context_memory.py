"""Measure the activations of a rank with and without context ranks, beside the plan's estimate.

    benchmarks/context_memory.py [--tokens 16384] [--ranks 4] [--layers 4] [--hidden 256] [--heads 4]
                                 [--precision fp32] [--recompute] [--out FILE]

One forward and backward pass of one sample on CPU ranks. Measured is the most that operations have made and something
still refers to, beyond what was held before (`held_storages.py`): weights and gradients are there from the start.
Memory inside one operation and gloo's own is not counted. The first line is one rank with all tokens. One line for each
kind; MiB of the fullest rank.
"""

from __future__ import annotations

import argparse
import gc
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.held_storages import HeldStorages, use_planned_products
from neox.config import NeoXConfig
from neox.model import GPT, Context
from neox.objectives import CausalLM
from neox.ops import DTYPES
from neox.parallel import ParallelGrid, context_indices
from neox.plan import RunPlan, host_device, resolve
from neox.plan.devices.device import memory_on
from tests.distributed.spawn import run_ranks

MIB = 2**20
VOCAB = 512
KINDS = ("all_gather", "ulysses")


class Row(NamedTuple):
    """Activations of one kind.

    Attributes:
        kind: What context ranks exchange, or `one rank`.
        measured: Bytes of the fullest rank.
        planned: Bytes in the plan.
        of_one_rank: Measured bytes over those of one rank.
    """

    kind: str
    measured: int
    planned: int
    of_one_rank: float


def plan_of(ranks: int, kind: str, tokens: int, layers: int, hidden: int, heads: int, **keys: Any) -> RunPlan:
    """Return the plan of a small network with long samples, so that activations are most of its memory."""
    flat: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "seq_length": tokens,
        "max_position_embeddings": tokens,
        "pos_emb": "rotary",
        "make_vocab_size_divisible_by": 8,
        "attention_config": [[["flash"], "all"]],
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "train_micro_batch_size_per_gpu": 1,
        "precision": "fp32",
        "train_iters": 10,
        "context_parallel_size": ranks,
        **keys,
    }
    if ranks > 1:
        flat["context_parallel_kind"] = kind
    return resolve(NeoXConfig.from_flat(flat), ranks, VOCAB)


def activation_peaks(plans: list[RunPlan]) -> list[int]:
    """Return the most bytes that a forward and backward pass of each plan held on this rank."""
    use_planned_products()
    return [_activation_peak(plan) for plan in plans]


def _activation_peak(plan: RunPlan) -> int:
    grid = ParallelGrid.build(plan.grid)
    dtype = DTYPES[plan.precision]
    model = GPT(plan, grid, dtype=dtype)
    length = plan.config.model.seq_length or 0
    rows = torch.randint(0, VOCAB, (1, length + 1), generator=torch.Generator().manual_seed(0))
    own = context_indices(length, grid)
    tokens = rows[:, own]
    labels = rows[:, own + 1]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    context = Context(divided=grid.cp_size > 1)
    weights = torch.full(labels.shape, 1 / length)
    loss = partial(CausalLM().scores, targets=(labels, weights))
    with HeldStorages(apart_from=model.parameters()) as held:
        model(tokens, context, loss)[0].backward()
    return held.peak


def measured_rows(tokens: int, ranks: int, layers: int, hidden: int, heads: int, **keys: Any) -> list[Row]:
    """Return one row for one rank, and one for each kind of context ranks."""
    shape = (tokens, layers, hidden, heads)
    whole = plan_of(1, "", *shape, **keys)
    one = run_ranks(1, activation_peaks, [whole], timeout=3600)[0][0]
    divided = [plan_of(ranks, kind, *shape, **keys) for kind in KINDS]
    peaks = run_ranks(ranks, activation_peaks, divided, timeout=3600)
    rows = [Row("one rank", one, _planned(whole), 1.0)]
    for number, kind in enumerate(KINDS):
        fullest = max(peak[number] for peak in peaks)
        rows.append(Row(kind, fullest, _planned(divided[number]), fullest / one))
    return rows


def _planned(plan: RunPlan) -> int:
    device = host_device(plan, range(plan.grid.world_size), "this machine", None, training=True)
    return memory_on(plan, device).activations


def main() -> None:
    """Print the table, and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the sample")
    parser.add_argument("--ranks", type=int, default=4, help="context ranks")
    parser.add_argument("--layers", type=int, default=4, help="blocks")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size")
    parser.add_argument("--heads", type=int, default=4, help="heads")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="type of weights and activations")
    parser.add_argument("--recompute", action="store_true", help="recompute blocks, with MLPs by tiles of 512 tokens")
    parser.add_argument("--out", type=Path, help="file that gets the table, too")
    arguments = parser.parse_args()
    shape = (arguments.tokens, arguments.ranks, arguments.layers, arguments.hidden, arguments.heads)
    keys: dict[str, Any] = {"precision": arguments.precision}
    if arguments.recompute:
        keys |= {"checkpoint_activations": True, "mlp_tile_size": 512}
    lines = [
        f"{arguments.tokens} tokens, {arguments.ranks} context ranks, {arguments.layers} blocks, hidden size "
        f"{arguments.hidden}, {arguments.heads} heads, {arguments.precision}, "
        f"{'recomputed, in tiles' if arguments.recompute else 'nothing recomputed'}, torch {torch.__version__}",
        f"{'':12} {'measured MiB':>12} {'planned MiB':>12} {'planned/measured':>17} {'of one rank':>12}",
    ]
    for row in measured_rows(*shape, **keys):
        lines.append(
            f"{row.kind:12} {row.measured / MIB:12.1f} {row.planned / MIB:12.1f} {row.planned / row.measured:17.3f} "
            f"{row.of_one_rank:12.3f}"
        )
    table = "\n".join(lines) + "\n"
    print(table, end="")
    if arguments.out:
        arguments.out.write_text(table)


if __name__ == "__main__":
    main()
