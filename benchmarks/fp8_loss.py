"""Losses of training in fp8 beside bf16's: the same network, seeds and batches, one run after the other in one process.

python benchmarks/fp8_loss.py --layers 4 --hidden 128 --heads 4 --seq 64 --micro-batch 8     # a CPU: minutes
python benchmarks/fp8_loss.py --json out.json                                              # a GPU: 160 M

The text is this repository's own, as bytes. What counts is the mean loss of the last tenth of the steps, relative to
bf16's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from neox.config import NeoXConfig
from neox.engine import initialize_distributed, initialize_engine
from neox.ops import FP8_RECIPES
from neox.plan import resolve

ROOT = Path(__file__).parents[1]


def read_text() -> Tensor:
    """Return the bytes of the library's and the documentation's files, [T]."""
    files = (path for folder in ("docs", "neox", "tests") for path in sorted((ROOT / folder).rglob("*")))
    data = b"".join(path.read_bytes() for path in files if path.suffix in (".py", ".md"))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batches(text: Tensor, samples: int, length: int) -> Iterator[dict[str, Tensor]]:
    """Yield micro batches of random places in the text, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, len(text) - length, (samples,), generator=generator)
        rows = torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
        mask = torch.ones(samples, length)
        yield {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous(), "loss_mask": mask}


def train(args: argparse.Namespace, fp8: str | None, text: Tensor) -> list[float]:
    """Return the loss of each step."""
    flat = {
        "num_layers": args.layers,
        "hidden_size": args.hidden,
        "num_attention_heads": args.heads,
        "seq_length": args.seq,
        "max_position_embeddings": args.seq,
        "pos_emb": "rotary",
        "no_weight_tying": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_config": [[["flash"], "all"]],
        "precision": "bf16",
        "fp8": fp8,
        "zero_optimization": {"stage": 1},
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_clipping": 1.0,
        "train_iters": args.steps,
        "lr_decay_style": "cosine",
        "warmup": 0.1,
        "seed": args.seed,
        "optimizer": {"type": "Adam", "params": {"lr": args.lr, "betas": [0.9, 0.95]}},
    }
    plan = resolve(NeoXConfig.from_flat(flat), 1, 256)
    engine = initialize_engine(plan, *initialize_distributed(plan))
    data = batches(text, args.micro_batch, args.seq)
    return [engine.train_batch(data).loss for _ in range(args.steps)]


def main() -> None:
    """Train by each recipe and print the last losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--recipes", nargs="+", choices=FP8_RECIPES, default=list(FP8_RECIPES))
    parser.add_argument("--json", type=Path, help="write all losses there")
    args = parser.parse_args()
    text, last = read_text(), max(1, args.steps // 10)
    losses: dict[str, list[float]] = {}
    for fp8 in (None, *args.recipes):
        name = fp8 or "bf16"
        losses[name] = train(args, fp8, text)
        end = mean(losses[name][-last:])
        relative = end / mean(losses["bf16"][-last:]) - 1
        print(
            f"{name:10s}  first loss {losses[name][0]:.4f}  mean of the last {last}: {end:.4f}  {100 * relative:+.2f} %"
        )
        if args.json:  # after each run: one that is cut off leaves the others
            args.json.write_text(json.dumps({"steps": args.steps, "losses": losses}) + "\n")


if __name__ == "__main__":
    main()
