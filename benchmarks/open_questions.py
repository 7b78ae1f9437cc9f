"""What only a card can answer (docs/accelerators.md, "What no card has run"): one question, a few short trainings.

python benchmarks/open_questions.py flex-documents --json out.json
python benchmarks/open_questions.py flex-documents --layers 1 --hidden 64 --heads 4 --seq 64 --steps 2    # on a CPU

Every training has a process of its own. For each it prints the losses, the seconds of the first step (compilation) and
of the others (median), the peak of memory, the kernels of attention that a profile names, and what the question adds.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile

from neox.config import NeoXConfig
from neox.engine import initialize_distributed, initialize_engine
from neox.engine.checkpoints.background_saves import BackgroundSaves
from neox.engine.device import synchronize
from neox.plan import resolve

_VOCABULARY = 50_000
_RECOMPUTED = {"checkpoint_activations": True}
_FLASH = {"attention_config": [[["flash"], "all"]]}
_DOCUMENTS = {"reset_attention_mask": True}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "head_dim": 192, "rotary_pct": 1 / 3, "v_head_dim": 128}
# Question -> the trainings that answer it. What to compare stands in the table of the page.
QUESTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "flex-documents": {
        "dense mask": {**_DOCUMENTS, "compile_layers": False},
        "flash": {**_DOCUMENTS, **_FLASH, "compile_layers": True},
        "flash, recomputed": {**_DOCUMENTS, **_FLASH, **_RECOMPUTED, "compile_layers": True},
    },
    "async-save": {"async_save": {"async_save": True}},
    "inputs-in-cpu": {
        "recomputed": {**_FLASH, **_RECOMPUTED},
        "inputs in CPU memory": {**_FLASH, **_RECOMPUTED, "checkpoint_in_cpu": True},
    },
    "attention-kernels": {
        "alibi": {**_FLASH, "pos_emb": "alibi"},
        "rpe": {"pos_emb": "rpe"},
        "latent": {**_LATENT, "attention_config": [[["latent"], "all"]], "use_bias_in_attn_linear": False},
        "grouped, dropout, documents": {**_FLASH, **_DOCUMENTS, "num_kv_heads": 2, "attention_dropout": 0.1},
    },
}


def batches(samples: int, length: int, *, documents: bool) -> Iterator[dict[str, Tensor]]:
    """Yield micro batches of random tokens, the same in every process; with documents, two in each sample."""
    generator = torch.Generator().manual_seed(0)
    while True:
        rows = torch.randint(0, _VOCABULARY, (samples, length + 1), generator=generator)
        batch = {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
        batch["loss_mask"] = torch.ones(samples, length)
        if documents:
            second = torch.arange(length) >= length // 2
            batch["document_starts"] = (second * (length // 2)).expand(samples, length).contiguous()
        yield batch


def train(args: argparse.Namespace, keys: dict[str, Any]) -> dict[str, Any]:
    """Train in this process and return what was measured."""
    flat = {
        "num_layers": args.layers,
        "hidden_size": args.hidden,
        "num_attention_heads": args.heads,
        "seq_length": args.seq,
        "max_position_embeddings": args.seq,
        "pos_emb": "rotary",
        "zero_optimization": {"stage": 1},
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": 1,
        "train_iters": args.steps,
        **keys,
    }
    with tempfile.TemporaryDirectory() as directory:
        if "async_save" in keys:
            flat |= {"save": directory, "checkpoint_factor": args.steps}
        plan = resolve(NeoXConfig.from_flat(flat), 1, _VOCABULARY)
        engine = initialize_engine(plan, *initialize_distributed(plan))
        data = batches(args.micro_batch, args.seq, documents="reset_attention_mask" in keys)
        losses = []
        seconds = []
        for _ in range(args.steps):
            started = time.perf_counter()
            losses.append(engine.train_batch(data).loss)
            synchronize()
            seconds.append(time.perf_counter() - started)
        with profile() as profiled:
            engine.train_batch(data)
        events = {event.key for event in profiled.key_averages()}
        words = ("attention", "flash", "fmha", "cudnn", "flex", "softmax")
        result = {
            "losses": losses,
            "first step, s": seconds[0],
            "step, s": median(seconds[1:]),
            "kernels": sorted(key for key in events if any(word in key.lower() for word in words)),
        }
        if "async_save" in keys:
            saves = BackgroundSaves(engine)
            stalls = []
            for _ in range(2):
                started = time.perf_counter()
                saves.start(directory)
                stalls.append(time.perf_counter() - started)
                saves.wait()
                engine.train_batch(data)
            result["training waited for saves, s"] = stalls
        if torch.cuda.is_available():
            result["peak, GiB"] = torch.cuda.max_memory_allocated() / 2**30
        result["host peak, GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return result


def main() -> int:
    """Answer a question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    trainings = QUESTIONS[args.question]
    if args.one:
        print(json.dumps(train(args, trainings[args.one])))
        return 0
    found: dict[str, Any] = {}
    failed = False
    for name in trainings:
        done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one", name], capture_output=True, text=True)
        if done.returncode:
            failed = True
            found[name] = {"error": done.stderr[-3000:]}
        else:
            found[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, json.dumps(found[name], indent=2))
    if args.json:
        args.json.write_text(json.dumps({"question": args.question, "trainings": found}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
