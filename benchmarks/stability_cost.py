"""What `log_stability_every: 10` costs: the same network trained with and without it, ten steps each in turn.

python benchmarks/stability_cost.py --layers 4 --hidden 256 --heads 4 --seq 256 --micro-batch 4 --rounds 5     # a CPU
python benchmarks/stability_cost.py --json out.json                                                       # a GPU: 160 M

A round is ten steps with the numbers, of which one is observed, and ten steps without. The result is the ratio of the
medians of the rounds' times.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from neox.config import NeoXConfig
from neox.engine import Engine, initialize_distributed, initialize_engine
from neox.features.table import build_features
from neox.plan import resolve

_EVERY = 10
_VOCABULARY = 50_000


def batches(samples: int, length: int) -> Iterator[dict[str, Tensor]]:
    """Yield micro batches of random tokens."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(samples, length)
    while True:
        rows = torch.randint(0, _VOCABULARY, (samples, length + 1), generator=generator)
        yield {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous(), "loss_mask": mask}


def build(args: argparse.Namespace, *, observes: bool) -> Engine:
    """Build an engine with or without the numbers."""
    flat = {
        "num_layers": args.layers,
        "hidden_size": args.hidden,
        "num_attention_heads": args.heads,
        "seq_length": args.seq,
        "max_position_embeddings": args.seq,
        "pos_emb": "rotary",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_config": [[["flash"], "all"]],
        "zero_optimization": {"stage": args.zero},
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_clipping": 1.0,
        "train_iters": 10**6,
        "log_stability_every": _EVERY if observes else None,
    }
    plan = resolve(NeoXConfig.from_flat(flat), 1, _VOCABULARY)
    return initialize_engine(plan, *initialize_distributed(plan), build_features)


def seconds_of_round(engine: Engine, data: Iterator[dict[str, Tensor]]) -> float:
    """Train ten steps; return how long they took."""
    started = time.perf_counter()
    for _ in range(_EVERY):
        engine.train_batch(data)
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    """Train in turn and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    engines = {observes: build(args, observes=observes) for observes in (False, True)}
    data = batches(args.micro_batch, args.seq)
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(args.rounds + 1):
        for observes, engine in engines.items():
            seconds = seconds_of_round(engine, data)
            if number:  # the first round warms up
                times[observes].append(seconds)
    medians = {observes: median(found) for observes, found in times.items()}
    ratio = medians[True] / medians[False]
    print(
        f"ten steps: {medians[False]:.3f} s, with log_stability_every {_EVERY} {medians[True]:.3f} s, ratio {ratio:.4f}"
    )
    if args.json:
        result = {"ratio": ratio, "with": times[True], "without": times[False]}
        args.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
