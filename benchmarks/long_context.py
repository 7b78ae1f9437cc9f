"""Long samples on one GPU: the longest that fits, and tokens/s of attention by blocks next to a mask of all pairs.

    benchmarks/long_context.py longest --shape 1.3B [--in-main-memory] [--most TOKENS] [--json FILE]
    benchmarks/long_context.py speed --shape 1.3B --tokens 32768 [--window 4096] [--rounds 3] [--json FILE]

A step is one forward and backward pass of one sample in bf16 with gradients, without an optimizer: its states would be
in main memory in such a run. Blocks are recomputed, MLPs go by tiles.

longest: The number of tokens doubles until memory runs out, and then the gap is halved three times. Attention has a
window, so that a step takes seconds, not minutes; what is kept does not depend on it. With --in-main-memory the inputs
of recomputed blocks are there, and lengths for which they would fill more than 0.7 of it are not tried.

speed: Attention to all earlier tokens, to a window, and within documents as long as the window, by blocks and with a
mask of all pairs, in turn. The median of the rounds counts. A side that does not fit says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from neox.config import NeoXConfig
from neox.files import write_text
from neox.model import GPT, Context
from neox.model.stage import StageRange
from neox.objectives import CausalLM
from neox.parallel import ParallelGrid
from neox.plan import RunPlan, resolve

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "padded_vocab_size": 512},
    "1.3B": {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "padded_vocab_size": 50432},
    "8B": {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_kv_heads": 8,
        "mlp_width": 14336,
        "padded_vocab_size": 128_256,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
    },
}
OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


def plan_of(shape: str, tokens: int, device: torch.device, **keys: Any) -> RunPlan:
    """Return the plan of one sample of a number of tokens on one rank."""
    flat: dict[str, Any] = {
        "seq_length": tokens,
        "max_position_embeddings": tokens,
        "pos_emb": "rotary",
        "no_weight_tying": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_config": [[["flash"], "all"]],
        "precision": "bf16" if device.type == "cuda" else "fp32",
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_iters": 1,
        "checkpoint_activations": True,
        "compile_layers": False,
        **SHAPES[shape],
        **keys,
    }
    if tokens > 4096:
        flat["mlp_tile_size"] = 4096
    return resolve(NeoXConfig.from_flat(flat), 1, flat["padded_vocab_size"])


def built(plan: RunPlan, device: torch.device) -> GPT:
    """Return the network on the device, with small random matrices and norms that change nothing."""
    if device.type == "cpu":
        return GPT(plan, ParallelGrid.single())
    model = GPT(plan, ParallelGrid.single(), device="meta", dtype=torch.bfloat16).to_empty(device=device)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0.0, 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.ones_(parameter)
    for module in model.modules():
        reset = getattr(module, "reset", None)
        if reset is not None:
            reset()
    return model


def step(model: GPT, tokens: int, document: int, device: torch.device) -> None:
    """Run the forward and the backward pass of one sample; `document` tokens in each document, 0 for one document."""
    ids = torch.arange(tokens, device=device).unsqueeze(0) % 500
    starts = None
    if document:
        starts = torch.arange(tokens, device=device).unsqueeze(0) // document * document
    weights = torch.full(ids.shape, 1 / tokens, device=device)
    loss = partial(CausalLM().scores, targets=(ids, weights))
    model(ids, Context(document_starts=starts), loss)[0].backward()
    if device.type == "cuda":
        torch.cuda.synchronize()


def released(device: torch.device) -> None:
    """Release what a failed step has left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def longest(arguments: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the longest sample so far, and the shortest that did not fit."""
    keys = {"sliding_window_width": arguments.window, "checkpoint_in_cpu": arguments.in_main_memory}
    first = 4 * arguments.window
    model = built(plan_of(arguments.shape, first, device, **keys), device)
    fits = 0
    fails = 0
    tokens = first
    halvings = 0
    while halvings < 3 and tokens <= arguments.most:
        plan = plan_of(arguments.shape, tokens, device, **keys)
        if _runs(model, plan, tokens, device):
            fits = tokens
        else:
            fails = tokens
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        planned = plan.memory.activations
        yield {"tokens": fits, "too_long": fails or None, "peak_memory_bytes": peak, "planned_activations": planned}
        if fails:
            tokens = (fits + fails) // 2 // first * first
            halvings += 1
            if tokens == fits:
                return
        else:
            tokens *= 2


def _runs(model: GPT, plan: RunPlan, tokens: int, device: torch.device) -> bool:
    """Return whether a step with so many tokens fits."""
    released(device)
    main_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if plan.memory.main_memory > 0.7 * main_memory:
        return False
    try:
        step(model, tokens, 0, device)
    except OUT_OF_MEMORY:
        return False
    return True


def speed(arguments: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield tokens/s of every side."""
    window = {"sliding_window_width": arguments.window}
    documents = {"reset_attention_mask": True}
    sides: dict[str, tuple[dict[str, Any], bool]] = {
        "all earlier tokens": ({}, False),
        "window by blocks": (window, False),
        "documents by blocks": (documents, False),
        "window, mask of all pairs": (window, True),
        "documents, mask of all pairs": (documents, True),
    }
    for name, (keys, is_dense) in sides.items():
        released(device)
        model = built(plan_of(arguments.shape, arguments.tokens, device, **keys), device)
        document = arguments.window if "reset_attention_mask" in keys else 0
        run = partial(step, model, arguments.tokens, document, device)
        seconds = _median_of(run, arguments.rounds, is_dense=is_dense)
        rate = None if seconds is None else arguments.tokens / seconds
        yield {"side": name, "tokens": arguments.tokens, "seconds_per_step": seconds, "tokens_per_second": rate}


def _median_of(run: Callable[[], None], rounds: int, *, is_dense: bool) -> float | None:
    """Return the median time of a step after one that is not counted; None if memory runs out."""
    times = []
    try:
        for number in range(rounds + 1):
            begun = time.perf_counter()
            if is_dense:  # without blocks GPUs get a mask of all pairs
                with patch.object(StageRange, "_block_masks", return_value={}):
                    run()
            else:
                run()
            if number:
                times.append(time.perf_counter() - begun)
    except OUT_OF_MEMORY:
        return None
    return statistics.median(times)


def main() -> None:
    """Measure, print a line for each figure, and write all to a file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("longest", "speed"))
    parser.add_argument("--shape", choices=SHAPES, default="1.3B")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the sample (speed)")
    parser.add_argument("--window", type=int, default=4096, help="tokens of the window, and of each document")
    parser.add_argument("--most", type=int, default=2**24, help="most tokens to try (longest)")
    parser.add_argument("--in-main-memory", action="store_true", help="inputs of recomputed blocks (longest)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (speed)")
    parser.add_argument("--json", type=Path, help="file that gets all figures")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    for row in {"longest": longest, "speed": speed}[arguments.what](arguments, device):
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append(row)
        if arguments.json:
            found = {"name": arguments.shape, "what": arguments.what, "torch": torch.__version__, "figures": rows}
            write_text(arguments.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
