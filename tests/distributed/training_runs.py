"""Tiny trainings for tests: plans from flat keys, batches that are a function of the step, curves of layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from neox.config import NeoXConfig
from neox.plan import RunPlan, resolve
from tests.distributed.spawn import join_anew
from tests.masked_batches import masked_samples

VOCAB, SEQ, GLOBAL_BATCH = 60, 16, 4

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": SEQ,
    "max_position_embeddings": SEQ,
    "pos_emb": "rotary",
    "rotary_pct": 0.5,
    "make_vocab_size_divisible_by": 16,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "train_batch_size": GLOBAL_BATCH,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "Adam", "params": {"lr": 0.005, "betas": [0.9, 0.95], "eps": 1e-8}},
    "weight_decay": 0.1,
    "lr_decay_style": "cosine",
    "warmup": 0.1,
    "min_lr": 0.0005,
    "train_iters": 20,
    "seed": 7,
    "zero_optimization": {"stage": 0},
}

# Sizes that 1, 2, 3 and 4 ranks divide along every axis, and one vocabulary for all of them.
FULL_MATRIX: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 12,
    "train_batch_size": 12,
    "padded_vocab_size": 96,
}


def tiny_plan(world: int, *, pp: int = 0, mp: int = 1, zero: int = 0, **keys: Any) -> RunPlan:
    """Resolve TINY with these degrees and further keys; the data-parallel degree is what remains of `world`."""
    flat = {**TINY, "pipe_parallel_size": pp, "model_parallel_size": mp, "zero_optimization": {"stage": zero}, **keys}
    return resolve(NeoXConfig.from_flat(flat), world, VOCAB)


def batches(plan: RunPlan, dp_rank: int, start: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this data rank's micro batches of tokens with some structure to learn, from micro step `start` on.

    The samples of a whole step are the same set under every layout, whatever the micro batch and the data degree.
    """
    size, accumulation = plan.batch.train_micro_batch_size_per_gpu, plan.batch.gradient_accumulation_steps
    micro = start
    while True:
        step, part = divmod(micro, accumulation)
        first = (part * plan.grid.data_size + dp_rank) * size
        micro += 1
        if plan.architecture.bidirectional:
            yield {name: value[first : first + size] for name, value in masked_samples(plan, step).items()}
            continue
        chosen = _step_samples(step, plan.batch.train_batch_size)[first : first + size]
        yield {
            "tokens": chosen[:, :-1].contiguous(),
            "labels": chosen[:, 1:].contiguous(),
            "loss_mask": torch.ones(size, SEQ),
        }


def _step_samples(step: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(0, VOCAB, (count, 1), generator=generator)
    stride = torch.randint(1, 4, (count, 1), generator=generator)
    return (start + stride * torch.arange(SEQ + 1)) % VOCAB  # [count, S + 1]


def train_curve(plan: RunPlan, steps: int) -> list[tuple[float, float]]:
    """Train from initial weights on this rank; return (loss, gradient norm) of each step."""
    from neox.engine import initialize_distributed, initialize_engine

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    data = batches(plan, grid.data_rank)
    results = [engine.train_batch(data) for _ in range(steps)]
    return [(r.loss, r.grad_norm) for r in results]


def train_curves(plans: Sequence[RunPlan], steps: int) -> list[list[tuple[float, float]]]:
    """`train_curve` of several plans of one world size, one after the other in the same processes."""
    curves = []
    for number, plan in enumerate(plans):
        if number:
            join_anew(str(number))
        curves.append(train_curve(plan, steps))
    return curves


def legal_layouts(world: int) -> list[dict[str, int]]:
    """List every (pp, mp, ZeRO stage) on `world` ranks: stages 0 and 1 with pipeline stages, 0 to 3 without."""
    return [
        {"pp": pp, "mp": mp, "zero": zero}
        for pp in range(1, world + 1)
        for mp in range(1, world + 1)
        if world % (pp * mp) == 0
        for zero in (range(4) if pp == 1 else range(2))
    ]


def begun_start(plan: RunPlan) -> Any:
    """Return how a run starts, as rank 0 without a launcher decides and begins it."""
    from neox.engine.checkpoints.run_start import begin_start, verified_choice

    return begin_start(plan, verified_choice(plan)[0])
