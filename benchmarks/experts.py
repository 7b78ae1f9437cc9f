"""Training speed of a small mixture of experts on a CPU, in turn with transformers' Mixtral.

python benchmarks/experts.py                 # 8 experts, 2 a token, 29 M active parameters without the embedding
python benchmarks/experts.py --clock cpu     # seconds of the process, for a machine that others use, too

"neox" is what a user gets: `initialize_engine` and its `train_batch` through DeepSpeed. "transformers" is
`MixtralForCausalLM` with the same weights in its usual loop, once for each `experts_implementation` except
`batched_mm`, which copies the weights of its experts for each token: 17 GB here. Both train in fp32: forward, backward,
clipping at 1.0, torch's fused AdamW. Their loss leaves out the balancing loss, and so does ours.

First losses must agree. Rounds go through all sides in turn. The result is the median over rounds of the ratio to the
fastest of transformers' implementations, the one with the least median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from neox.config import NeoXConfig
from neox.convert import to_hf
from neox.engine import initialize_distributed, initialize_engine, save_checkpoint
from neox.plan import RunPlan, resolve

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
IMPLEMENTATIONS = ("eager", "grouped_mm")
VOCABULARY = 8192


def make_plan(args: argparse.Namespace, save: Path) -> RunPlan:
    """Return the plan of a mixture whose width and batch the arguments give."""
    flat = {
        "num_layers": args.layers,
        "hidden_size": args.hidden,
        "num_attention_heads": 8,
        "mlp_width": 2 * args.hidden,
        "moe_num_experts": 8,
        "moe_top_k": 2,
        "moe_router_type": "topk",
        "moe_norm_topk_prob": True,
        "moe_ffn_hidden_size": 2 * args.hidden,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "rms_norm_epsilon": 1e-5,
        "seq_length": args.seq,
        "max_position_embeddings": args.seq,
        "pos_emb": "rotary",
        "rotary_pct": 1,
        "no_weight_tying": True,
        "output_layer_parallelism": "column",
        "use_bias_in_attn_linear": False,
        "use_bias_in_mlp": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_config": [[["flash"], "all"]],
        "precision": "fp32",
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "train_iters": 1000,
        "lr_decay_style": "constant",
        "warmup": 0.0,
        "weight_decay": 0.1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
        "save": str(save),
        "padded_vocab_size": VOCABULARY,
    }
    return resolve(NeoXConfig.from_flat(flat), 1, VOCABULARY)


def tokens_of(plan: RunPlan) -> Tensor:
    """Return one micro batch of random ids [B, S + 1]."""
    size = (plan.batch.train_micro_batch_size_per_gpu, (plan.config.model.seq_length or 0) + 1)
    return torch.randint(0, VOCABULARY, size, generator=torch.Generator().manual_seed(0))


def our_side(plan: RunPlan, ids: Tensor) -> Callable[[], float]:
    """Return a step of the engine, which has written a checkpoint of its initial weights to `save`."""
    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    save_checkpoint(engine, plan.config.checkpoint.save or "")
    inputs = ids[:, :-1].contiguous()
    batch = {"tokens": inputs, "labels": ids[:, 1:].contiguous(), "loss_mask": torch.ones(inputs.shape)}
    endless = cycle([batch])
    return lambda: engine.train_batch(endless).loss


def their_side(directory: Path, implementation: str, ids: Tensor) -> Callable[[], float]:
    """Return a step of transformers' model in its usual loop."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation=implementation, use_cache=False
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    inputs = ids[:, :-1].contiguous()
    targets = ids[:, 1:].contiguous()

    def step() -> float:
        logits = model(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def build_sides(args: argparse.Namespace, directory: Path) -> tuple[RunPlan, dict[str, Callable[[], float]]]:
    """Return the plan and one optimizer step of each side, all with the same weights."""
    plan = make_plan(args, directory / "checkpoints")
    ids = tokens_of(plan)
    sides = {"neox": our_side(plan, ids)}
    to_hf(directory / "checkpoints", plan.config, directory / "hf", verify=False, tokenizer_file=None)
    for implementation in args.implementations:
        sides[f"transformers {implementation}"] = their_side(directory / "hf", implementation, ids)
    return plan, sides


def measure(args: argparse.Namespace, sides: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Return the seconds of each side's step in each round. Raises SystemExit if first losses differ."""
    clock = CLOCKS[args.clock]
    firsts = {name: step() for name, step in sides.items()}
    for name, loss in firsts.items():
        if abs(loss - firsts["neox"]) > 1e-4:
            raise SystemExit(f"first losses differ: {name} {loss:.6f}, neox {firsts['neox']:.6f}")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, step in sides.items():
            started = clock()
            step()
            seconds[name].append(clock() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        plan, sides = build_sides(args, Path(directory))
        seconds = measure(args, sides)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    print(f"{plan.layers.numel:,} parameters, {plan.layers.active_numel:,} active, load {os.getloadavg()[0]:.1f}")
    for name, taken in seconds.items():
        print(f"{name:<24} {medians[name]:7.3f} s a step: {' '.join(f'{one:.3f}' for one in taken)}")
    fastest = min((name for name in medians if name != "neox"), key=lambda name: medians[name])
    ratios = [theirs / ours for theirs, ours in zip(seconds[fastest], seconds["neox"], strict=True)]
    print(f"neox is {statistics.median(ratios):.2f} x as fast as {fastest} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
