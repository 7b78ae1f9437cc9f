"""Sides of the training benchmark: one optimizer step of the engine, of the bare network and of transformers.

`train.py` says what each side is and measures them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from neox.config import NeoXConfig
from neox.engine import initialize_distributed, initialize_engine
from neox.engine.build_engine import multiply_in_fp8
from neox.model import GPT
from neox.objectives import CausalLM
from neox.optim import parameter_groups
from neox.parallel import ParallelGrid
from neox.plan import RunPlan, resolve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """A model and a batch. micro_batch: samples; it is halved until it fits into the memory of a GPU.

    With `experts` each block has so many, as wide as the hidden states, and `top_k` of them compute a token.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    micro_batch: int
    accumulation: int = 1
    experts: int = 1
    top_k: int = 1


SHAPES = {
    "tiny": Shape(2, 64, 4, 512, 64, 2),
    "27M": Shape(6, 512, 8, 8192, 512, 4),
    "1.3B": Shape(24, 2048, 16, 50432, 2048, 16, 4),
    "2.8B": Shape(32, 2560, 32, 50432, 2048, 8, 4),
    "6.9B": Shape(32, 4096, 32, 50432, 2048, 4, 8),
    "tiny-16x": Shape(2, 64, 4, 512, 64, 2, experts=16, top_k=4),
    "1.3B-16x": Shape(24, 2048, 16, 50432, 2048, 8, 4, experts=16, top_k=4),  # 1.3 B active parameters of 3.9 B
}


class ClippedAdamW:
    """torch's fused AdamW after clipping by the global norm, with NeoX's decay groups.

    bf16 weights get fp32 master copies and moments and are updated one parameter at a time, so that no fp32 gradient of
    the whole model ever exists.
    """

    def __init__(self, model: nn.Module, max_norm: float = 1.0) -> None:
        self.parameters = list(model.parameters())
        self.max_norm = max_norm
        groups = parameter_groups(model.named_parameters(), 0.1)
        options: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "fused": True}
        self.whole = None
        self.split: list[tuple[nn.Parameter, Tensor, torch.optim.AdamW]] = []
        if self.parameters[0].dtype == torch.float32:
            self.whole = torch.optim.AdamW(groups, **options)
            return
        for group in groups:
            for parameter in group["params"]:
                master = parameter.detach().float()
                self.split.append((parameter, master, torch.optim.AdamW([{**group, "params": [master]}], **options)))

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        if self.whole is not None:
            self.whole.step()
        for parameter, master, optimizer in self.split:
            master.grad = parameter.grad.float()
            optimizer.step()
            master.grad = None
            parameter.data.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


@dataclass
class Side:
    """One implementation: `step()` does a whole optimizer step and returns its loss."""

    name: str
    step: Callable[[], Tensor]


def make_plan(shape: Shape, args: argparse.Namespace, dtype: str) -> RunPlan:
    kind = "flash" if args.attention == "flash" else "global"
    flat = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "seq_length": shape.seq,
        "max_position_embeddings": shape.seq,
        "pos_emb": "rotary",
        "rotary_pct": 0.25,
        "no_weight_tying": True,
        "gpt_j_residual": True,
        "output_layer_parallelism": "column",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_config": [[[kind], "all"]],
        "scaled_upper_triang_masked_softmax_fusion": args.attention == "fused",
        "checkpoint_activations": args.recompute,
        "precision": "bfloat16" if dtype == "bf16" else "fp32",
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "gradient_accumulation_steps": shape.accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1 if dtype == "bf16" else 0},
        "compile_layers": args.compile,
        "fp8": args.fp8 if dtype == "bf16" else None,
        "train_iters": 1000,
        "lr_decay_style": "constant",
        "warmup": 0.0,
        "weight_decay": 0.1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    }
    if shape.experts > 1:
        flat |= {
            "moe_num_experts": shape.experts,
            "moe_top_k": shape.top_k,
            "moe_router_type": "topk",
            "moe_norm_topk_prob": True,
            "moe_ffn_hidden_size": shape.hidden,
        }
    return resolve(NeoXConfig.from_flat(flat), 1, shape.vocab)


def batches(shape: Shape, device: torch.device) -> list[Tensor]:
    """Return ids [B, S + 1] of each micro-batch."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.micro_batch, shape.seq + 1)
    return [torch.randint(0, shape.vocab, size, generator=generator).to(device) for _ in range(shape.accumulation)]


def train_step(micro: list[Tensor], loss_of: Callable[[Tensor], Tensor], optimizer: Any) -> Tensor:
    """Forward and backward over the micro-batches, then clip and update."""
    total = torch.zeros((), device=micro[0].device)
    for ids in micro:
        loss = loss_of(ids) / len(micro)
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def build_model(plan: RunPlan, device: torch.device, dtype: torch.dtype) -> GPT:
    """Build the model; on a GPU its weights are drawn there, since drawing billions on a CPU takes minutes."""
    if device.type == "cpu":
        return GPT(plan, ParallelGrid.single(), dtype=dtype)
    needed, there = 16 * plan.layers.numel, torch.cuda.get_device_properties(device).total_memory
    if needed > 0.95 * there:
        raise SystemExit(f"skipped: weights and optimizer need {needed / 1e9:.0f} GB, the GPU has {there / 1e9:.0f} GB")
    model = GPT(plan, ParallelGrid.single(), device="meta", dtype=dtype).to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.02) if parameter.dim() > 1 else nn.init.zeros_(parameter)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
    for block in model.blocks:
        block.attention.rotary_emb.reset()
    return model


def side_name(kind: str, args: argparse.Namespace, dtype: str) -> str:
    """Return the name of a side of ours."""
    return f"{kind} {dtype}{f' fp8 {args.fp8}' if args.fp8 and dtype == 'bf16' else ''}"


def engine_side(shape: Shape, args: argparse.Namespace, dtype: str, device: torch.device) -> Side:
    """What a user gets: the engine, through DeepSpeed, on one rank."""
    plan = make_plan(shape, args, dtype)
    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    mask = torch.ones(shape.micro_batch, shape.seq)
    micro = [
        {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous(), "loss_mask": mask}
        for ids in batches(shape, torch.device("cpu"))
    ]
    endless = cycle(micro)

    def step() -> Tensor:
        result = engine.train_batch(endless)
        assert not result.update_skipped
        return torch.tensor(result.loss)

    return Side(side_name("neox", args, dtype), step)


def model_side(shape: Shape, args: argparse.Namespace, dtype: str, device: torch.device) -> Side:
    """The bare network in a plain loop."""
    plan = make_plan(shape, args, dtype)
    model = build_model(plan, device, DTYPES[dtype])
    if args.compile:
        for block in model.blocks:  # one block at a time: all share one compiled graph
            block.compile()
    multiply_in_fp8(model, plan, device)
    optimizer, micro = ClippedAdamW(model), batches(shape, device)
    size = (shape.micro_batch, shape.seq)
    weights = torch.full(size, 1 / math.prod(size), device=device)

    def loss_of(ids: Tensor) -> Tensor:
        return model(ids[:, :-1], loss=partial(CausalLM().scores, targets=(ids[:, 1:], weights)))[0]

    def step() -> Tensor:
        if not args.cudnn:
            return train_step(micro, loss_of, optimizer)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            return train_step(micro, loss_of, optimizer)

    return Side(side_name("model", args, dtype), step)


def their_side(
    shape: Shape, args: argparse.Namespace, dtype: str, device: torch.device, *, bf16_weights: bool = False
) -> Side:
    """transformers' model in its usual loop: its own loss, clip_grad_norm_, torch's fused AdamW (Trainer's default).

    bf16 is Trainer's `bf16`: autocast over fp32 weights, with fp32 gradients and moments; with `bf16_weights` weights,
    gradients and moments are all bf16.
    """
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    if shape.experts > 1:
        raise SystemExit("skipped: their GPT-NeoX has no experts; benchmarks/experts.py compares with their Mixtral")
    config = GPTNeoXConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.hidden,
        max_position_embeddings=shape.seq,
        rotary_pct=0.25,
        use_parallel_residual=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cache=False,
    )
    model = GPTNeoXForCausalLM(config).to(device, DTYPES[dtype] if bf16_weights else torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    micro = batches(shape, device)

    class Clipped:
        zero_grad = staticmethod(optimizer.zero_grad)

        @staticmethod
        def step() -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    def loss_of(ids: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16" and not bf16_weights):
            return model(input_ids=ids[:, :-1], labels=ids[:, :-1]).loss

    return Side(
        f"transformers {dtype}{' weights' if bf16_weights else ''}", lambda: train_step(micro, loss_of, Clipped)
    )


SIDES: dict[str, Callable[[Shape, argparse.Namespace, str, torch.device], Side]] = {
    "neox": engine_side,
    "model": model_side,
    "transformers": their_side,
    "transformers-weights": partial(their_side, bf16_weights=True),
}
