"""Peak memory of a step whose loss takes the most: distillation and preferences, next to the plan's estimate."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.held_storages import HeldStorages, use_planned_products
from neox.config import NeoXConfig
from neox.plan import RunPlan, resolve
from neox.plan.devices.device import rank_memory
from tests.distributed.spawn import run_ranks

VOCAB, LENGTH = 8000, 256
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": LENGTH,
    "max_position_embeddings": LENGTH,
    "pos_emb": "rotary",
    "make_vocab_size_divisible_by": 8,
    "attention_config": [[["flash"], "all"]],
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "train_iters": 10,
    "optimizer": {"type": "Adam", "params": {}},
}
DISTILLED = {"teacher_logits": "not-read", "distillation_weight": 0.5}
LOSSES: dict[str, dict[str, Any]] = {
    "texts": {},
    "forward": {**DISTILLED, "distillation_top_k": 100},
    "warm": {**DISTILLED, "distillation_temperature": 2.0},
    "reverse": {**DISTILLED, "distillation_divergence": "reverse"},
    "dpo": {"train_impl": "dpo", "pos_train_data_paths": ["a"], "neg_train_data_paths": ["b"]},
}
ZERO_3 = {"stage": 3, "reduce_bucket_size": 400_000, "stage3_prefetch_bucket_size": 1, "stage3_max_live_parameters": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "zero3": {"zero_optimization": ZERO_3},
}


def plan_of(world: int, loss: str, **layout: Any) -> RunPlan:
    return resolve(NeoXConfig.from_flat({**SIZES, **LOSSES[loss], **layout}), world, VOCAB)


def batches(plan: RunPlan, rank: int) -> Iterator[dict[str, Tensor]]:
    """Yield micro batches of random tokens, with two answers in each row, or a teacher's logits."""
    generator = torch.Generator().manual_seed(rank)
    shape = (plan.batch.train_micro_batch_size_per_gpu, LENGTH)
    top_k = plan.config.distillation.logits_of_token
    second = (torch.arange(LENGTH) >= LENGTH // 2).long().expand(shape)
    while True:
        tokens = torch.randint(0, VOCAB, (shape[0], LENGTH + 1), generator=generator)
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        if plan.config.preferences.on_preferences:
            batch["document_starts"] = second * (LENGTH // 2)
            batch["slots"] = second
            batch["in_answer"] = torch.ones_like(second)
            batch["pair_mask"] = torch.ones(shape[0], 1)
            batch["reference"] = torch.zeros(shape[0], 2)
        else:
            batch["loss_mask"] = torch.ones(shape)
        if top_k:
            batch["teacher_ids"] = torch.randint(0, VOCAB, (*shape, top_k), generator=generator)
            batch["teacher_logits"] = torch.randn(*shape, top_k, generator=generator)
        yield batch


def peaks(plans: list[RunPlan]) -> list[int]:
    """On this rank: the most bytes of tensors in the second step of each plan."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.features.table import build_features

    use_planned_products()
    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        gc.collect()
        with HeldStorages() as held:
            engine = initialize_engine(plan, grid, device, build_features)
            data = batches(plan, grid.data_rank)
            engine.train_batch(data)
            held.peak = held.total
            engine.train_batch(data)
        answers.append(held.peak)
        del engine
    return answers


def compare(world: int, losses: list[str], **layout: Any) -> None:
    plans = [plan_of(world, loss, **layout) for loss in losses]
    measured = run_ranks(world, peaks, plans, timeout=900)
    for number, loss in enumerate(losses):
        planned = rank_memory(plans[number], 0, on_cpu=True).needed(on_cpu=True)
        assert planned == pytest.approx(measured[0][number], rel=0.05), (loss, planned / measured[0][number])


def test_the_plan_counts_what_distillation_takes() -> None:
    compare(1, ["forward", "warm"])


@pytest.mark.slow
def test_the_plan_counts_what_every_loss_takes() -> None:
    compare(1, list(LOSSES))


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_layouts_take_what_the_plan_counts(layout: str) -> None:
    compare(2, ["texts", "warm", "dpo"], **LAYOUTS[layout])


def test_a_gpu_holds_numbers_in_fp32_for_a_teacher() -> None:
    texts, forward, warm = (
        rank_memory(plan_of(1, loss, precision="bf16"), 0, on_cpu=False).activations
        for loss in ("texts", "reverse", "warm")
    )
    logits = 4 * LENGTH * VOCAB
    assert forward - texts > 8 * logits
    assert warm - forward == 4 * logits
