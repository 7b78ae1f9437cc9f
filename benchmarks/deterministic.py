"""Whether `deterministic: true` repeats a training bit for bit across processes, and what it costs.

python benchmarks/deterministic.py --layers 2 --hidden 64 --heads 4 --seq 64 --micro-batch 2 --steps 3     # a CPU
python benchmarks/deterministic.py --json out.json                                                        # a GPU: 160 M

Four processes train the same network with dropout on the same batches, two of them deterministically, in turn. Losses
and weights of these two must be equal to the bit; otherwise the exit status is 1. What it costs is the time of a step
against that of the other two.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from neox.config import NeoXConfig
from neox.engine import initialize_distributed, initialize_engine
from neox.plan import resolve

_VOCABULARY = 50_000
_WARM_UP = 2


def batches(samples: int, length: int) -> Iterator[dict[str, Tensor]]:
    """Yield micro batches of random tokens, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    while True:
        rows = torch.randint(0, _VOCABULARY, (samples, length + 1), generator=generator)
        mask = torch.ones(samples, length)
        yield {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous(), "loss_mask": mask}


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train in this process; return the losses as text that keeps every bit, a hash of the weights and step times."""
    flat = {
        "num_layers": args.layers,
        "hidden_size": args.hidden,
        "num_attention_heads": args.heads,
        "seq_length": args.seq,
        "max_position_embeddings": args.seq,
        "pos_emb": "rotary",
        "attention_dropout": 0.1 if args.attention == "global" else 0.0,
        "hidden_dropout": 0.1,
        "attention_config": [[[args.attention], "all"]],
        "compile_layers": False,
        "zero_optimization": {"stage": 1},
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "train_iters": args.steps,
        "deterministic": args.deterministic,
    }
    plan = resolve(NeoXConfig.from_flat(flat), 1, _VOCABULARY)
    engine = initialize_engine(plan, *initialize_distributed(plan))
    data = batches(args.micro_batch, args.seq)
    losses = []
    seconds = []
    for _ in range(args.steps):
        started = time.perf_counter()
        losses.append(engine.train_batch(data).loss.hex())
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"losses": losses, "weights": weights_hash(engine.deepspeed_engine.module), "seconds": seconds}


def weights_hash(model: nn.Module) -> str:
    """Return the SHA-256 of all weights."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def in_process(arguments: list[str], *, deterministic: bool) -> dict[str, Any]:
    """Train in a process of its own."""
    command = [sys.executable, __file__, *arguments, "--one"]
    if deterministic:
        command.append("--deterministic")
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    """Train four times, print the comparison and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--attention", choices=("flash", "global"), default="flash")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deterministic", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(train(args)))
        return 0
    results: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for _ in range(2):
        for deterministic in results:
            results[deterministic].append(in_process(sys.argv[1:], deterministic=deterministic))
    first, second = results[True]
    repeats = first["losses"] == second["losses"] and first["weights"] == second["weights"]
    usual = results[False][0]["losses"] == results[False][1]["losses"]
    medians = {}
    for kind, runs in results.items():
        medians[kind] = median([seconds for run in runs for seconds in run["seconds"][_WARM_UP:]])
    ratio = medians[True] / medians[False]
    verdict = "equal" if repeats else "NOT EQUAL"
    print(f"deterministic: {verdict} over {args.steps} steps; a step takes {ratio:.3f} x the usual")
    print(f"without: {'equal' if usual else 'not equal'}")
    if args.json:
        found = {"repeats": repeats, "repeats_without": usual, "step_ratio": ratio, "seconds": medians[True]}
        args.json.write_text(json.dumps(found) + "\n")
    return 0 if repeats else 1


if __name__ == "__main__":
    sys.exit(main())
